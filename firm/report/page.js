const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll("[data-figure]")];
const hasMouse = matchMedia("(pointer: fine)").matches;

// Traces that the reader has put away, by their legend group.
const hidden = new Set();
let numDrawings = 0;

// Figures name their colours by CSS variables, so that light and dark are decided in the style sheet.
function colored(value, style) {
  if (Array.isArray(value)) return value.map((entry) => colored(entry, style));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, colored(entry, style)]));
  const variable = typeof value === "string" && /^var\((--[\w-]+)\)$/.exec(value);
  return variable ? style.getPropertyValue(variable[1]).trim() : value;
}

// A figure saved by itself carries the title and the legend that the page shows around it.
function save(plot) {
  const { title } = figures[plot.dataset.figure];
  const layout = { ...plot.layout, showlegend: true, title: { text: title }, margin: { t: 56 } };
  Plotly.downloadImage(
    { data: plot.data, layout },
    { format: "svg", width: 800, height: 500, filename: plot.dataset.figure },
  );
}

function draw(plot) {
  const { figure } = figures[plot.dataset.figure];
  const { data, layout } = colored(figure, getComputedStyle(document.documentElement));
  for (const trace of data) trace.visible = !hidden.has(trace.legendgroup);
  // On a touch screen a finger on a figure scrolls the page.
  layout.dragmode = hasMouse ? "zoom" : false;
  return Plotly.react(plot, data, layout, { responsive: true, displayModeBar: false });
}

async function drawAll() {
  const drawing = ++numDrawings;
  for (const plot of plots) {
    await draw(plot);
    if (drawing !== numDrawings) return; // a later call draws all again
    const button = document.querySelector(`[data-save="${CSS.escape(plot.dataset.figure)}"]`);
    button.onclick = () => save(plot);
    button.hidden = false;
    await new Promise((resume) => setTimeout(resume)); // the page stays scrollable meanwhile
  }
  document.documentElement.dataset.drawn = plots.length;
}

const choices = [...document.querySelectorAll("[data-choice]")];

function choose(isShown) {
  for (const button of choices) {
    const pressed = isShown(button);
    button.setAttribute("aria-pressed", pressed);
    if (pressed) hidden.delete(button.dataset.choice);
    else hidden.add(button.dataset.choice);
  }
}

const isPressed = (button) => button.getAttribute("aria-pressed") === "true";
choose(isPressed);
for (const button of choices)
  button.onclick = () => {
    choose((other) => isPressed(other) !== (other === button));
    drawAll();
  };
for (const button of document.querySelectorAll("[data-set]"))
  button.onclick = () => {
    const labels = JSON.parse(button.dataset.set);
    choose((other) => labels.includes(other.dataset.choice));
    drawAll();
  };

if (window.Plotly) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
} else document.getElementById("no-plotly").hidden = false;
