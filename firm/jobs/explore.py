"""Explores a conditioned run: a page with its front, a slider for each objective, and a chat."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from firm.alignment.prompts import ChatMessage
from firm.base.extras import install_command
from firm.fronts.nearest import Expectation, expected_rewards
from firm.fronts.reach import mean_preference, reaching
from firm.jobs.chat import SIDES, ChatReply, Conversation
from firm.jobs.configs import ChatConfig, ExploreConfig, SpeakersConfig
from firm.jobs.pick import conditioned_front
from firm.report.drawing import LegendEntry
from firm.report.front_sections import front_clouds, unit
from firm.report.plane import KL, Cloud, Spot, planes
from firm.report.static import light_color
from firm.run.errors import UserError
from firm.serving.page_guard import PageGuard, is_heard

HELP = (
    "Move the sliders to choose a trade-off: the gains in the objectives from their smallest to "
    "their largest rewards on this front become as nearly proportional to the sliders as the front "
    "allows, on validation prompts where the run has them. The base model and the model at this "
    "trade-off then reply side by side, with the same sampling noise."
)
STYLE = """
#reached :is(td, th) { white-space: nowrap; padding: .3rem .5rem; }
@media (max-width: 480px) { #reached :is(td, th) { padding: .3rem; font-size: .85rem; } }
"""
LEGEND = (
    "Circles: measured front by preference, ± one standard error; hollow circles are dominated. "
    "Square: model at the sliders' trade-off. Star: base model. The table lists the base model's "
    "rewards, and the rewards expected at this preference."
)
ASKED = "Message to both models"

HOST = "127.0.0.1"

MAX_WAITING = 32
"""Number of requests that wait for the model, or for figures; later ones are refused."""
CLEAR, GRAY = "rgba(0, 0, 0, 0)", "#808890"
"""Colours that are legible on light and dark pages."""
POINT = LegendEntry("the sliders' trade-off", "var(--objective-1)")


@dataclass(frozen=True)
class TargetPoint:
    """The point on the measured front for a target trade-off."""

    preference: list[float]
    """Preference at which the adapter replies."""
    expected: Expectation
    """Expected rewards, interpolated linearly between the measured preferences."""


class Explorer:
    """The front and the policy of a conditioned run.

    Args:
        cfg: The run, and the sampling and scoring of replies.

    Raises:
        UserError: The run has no front, or its model or reward models cannot be loaded.
    """

    def __init__(self, cfg: ExploreConfig) -> None:
        run = cfg.run or Path()
        self.front = conditioned_front(run, "explore")
        own = {f.name: getattr(cfg, f.name) for f in fields(SpeakersConfig)}
        equal = [1.0] * len(self.front.objectives)
        chat = ChatConfig(run=run, show_rewards=cfg.show_rewards, preference=equal, **own)
        self._conversation = Conversation(chat)
        self._clouds = front_clouds({run.name: self.front})

    def reach(self, target: Sequence[float]) -> TargetPoint:
        """Returns the point on the front for target shares [M]; see `firm.fronts.reaching`.

        Raises:
            ValueError: The target is not a valid preference, or all models have collapsed.
        """
        parts = reaching(self.front, target)
        return TargetPoint(mean_preference(parts), expected_rewards(parts))

    def planes(self, point: TargetPoint) -> list[dict[str, Any]]:
        """Returns a plotly figure of the front for each pair of objectives, with `point` marked."""
        facts = {
            f"preference for {name}": f"{share:.3f}"
            for name, share in zip(self.front.objectives, point.preference, strict=True)
        }
        spot = Spot(point.expected.rewards, point.expected.errors, facts)
        here = Cloud(POINT, len(self._clouds), [], [spot])
        base = {KL: 0.0, **self.front.base}
        panels = planes(
            "front",
            [*self._clouds, here],
            self.front.objectives,
            unit=unit({"": self.front}),
            base=base,
        )
        figures = [_in_any_light(panel.figure) for panel in panels]
        for figure in figures:
            figure["layout"]["modebar"] = {"bgcolor": CLEAR, "color": GRAY}
        return figures

    def answer(
        self, point: TargetPoint, dialogues: Mapping[str, list[ChatMessage]], line: str, turn: int
    ) -> tuple[dict[str, ChatReply], dict[str, list[ChatMessage]]]:
        """Returns the replies of the base model and at `point`, and the extended dialogues."""
        self._conversation.turn_to(point.preference)
        return self._conversation.extend(dialogues, line, turn)


def _in_any_light(figure: Any) -> Any:
    """Returns a figure with a transparent background and without CSS color variables."""
    match figure:
        case dict():
            return {key: _in_any_light(value) for key, value in figure.items()}
        case list() | tuple():
            return [_in_any_light(value) for value in figure]
        case "var(--surface)":
            return CLEAR
        case "var(--ink)" | "var(--muted)":
            return GRAY
        case "var(--grid)":
            return "rgba(128, 136, 144, 0.25)"
        case str() if figure.startswith("var("):
            return light_color(figure)
    return figure


def main(cfg: ExploreConfig) -> None:
    """Serves the page on localhost until interrupted."""
    if cfg.port is not None:  # fail before anything is loaded
        _check_free(cfg.port)
    _gradio()
    page = build_page(Explorer(cfg))
    print(f"{serve(page, cfg.port)} (press Ctrl-C to stop)", flush=True)
    page.block_thread()


def serve(page: Any, port: int | None) -> str:
    """Serves a page on localhost, in a thread, and returns its address.

    Raises:
        UserError: The port is in use.
    """
    from starlette.middleware import Middleware

    try:
        _, address, _ = page.launch(
            server_name=HOST,
            server_port=port,
            share=False,
            root_path="",
            mcp_server=False,
            enable_monitoring=False,
            app_kwargs={"middleware": [Middleware(PageGuard)]},
            quiet=True,
            prevent_thread_lock=True,
            footer_links=[],
            theme=_theme(),
            css=STYLE,
        )
    except OSError as error:
        raise _port_error(port) from error
    return address


def _check_free(port: int) -> None:
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise _port_error(port) from error


def _port_error(port: int | None) -> UserError:
    place = port or "any port from 7860"
    return UserError(f"port: the page cannot be served at {place}; choose another --port.")


def build_page(explorer: Explorer) -> Any:
    """Returns the page as Gradio Blocks, not yet served.

    Raises:
        UserError: Gradio is not installed.
    """
    gradio = _gradio()
    import plotly.graph_objects as go

    front = explorer.front

    def moved(*target: float) -> list[Any]:
        """Returns the figures with the sliders' point marked, and its description."""
        point = _target_point(explorer, target)
        if point is None:
            return [*[gradio.skip()] * len(figures), "Move at least one slider above 0."]
        return [*map(go.Figure, explorer.planes(point)), _in_words(explorer, point)]

    def asked(
        request: gradio.Request,  # pyright: ignore[reportInvalidTypeForm]  # Gradio's mark
        line: str,
        talk: dict[str, Any],
        *target: float,
    ) -> list[Any]:
        """Returns a cleared input field, the state, and both dialogues with the new replies."""
        if is_heard(request.session_hash):
            line, talk = reply(explorer, line, talk, target)
        return [line, talk, *(talk["shown"][side] for side in SIDES)]

    first = explorer.reach([1.0] * len(front.objectives))
    figures = [go.Figure(plane) for plane in explorer.planes(first)]
    with gradio.Blocks(title=f"FIRM · {front.strategy}", analytics_enabled=False) as page:
        gradio.Markdown(f"# {_escape(front.strategy)}\n\n{HELP}")
        with gradio.Row():
            with gradio.Column(scale=2):
                sliders = [
                    gradio.Slider(0, 1, value=0.5, step=0.01, label=name, elem_id=f"share-{index}")
                    for index, name in enumerate(front.objectives)
                ]
                words = gradio.Markdown(_in_words(explorer, first), elem_id="reached")
            with gradio.Column(scale=3):
                plots = [gradio.Plot(figure, show_label=False) for figure in figures]
                gradio.Markdown(LEGEND)
        with gradio.Row():
            chats = [
                gradio.Chatbot(
                    label=label,
                    height=320,
                    min_width=320,
                    render_markdown=False,
                    buttons=["copy"],
                    elem_id=side,
                )
                for side, label in zip(SIDES, ("base model", "at this trade-off"), strict=True)
            ]
        with gradio.Row():
            line = gradio.Textbox(
                label=ASKED,
                show_label=False,
                placeholder=ASKED,
                scale=6,
                elem_id="line",
                max_lines=4,
            )
            ask = gradio.Button("Ask", variant="primary", scale=1, elem_id="ask")
            restart = gradio.Button("Start over", scale=1, elem_id="restart")
        talk = gradio.State(_nothing_said())
        gradio.on(
            [slider.change for slider in sliders],
            moved,
            sliders,
            [*plots, words],
            trigger_mode="always_last",
            show_progress="hidden",
        )
        # all requests share one model and its adapter slot, so they run one at a time
        limits = {"concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private"}
        gradio.on(
            [ask.click, line.submit], asked, [line, talk, *sliders], [line, talk, *chats], **limits
        )
        gradio.on(
            [restart.click, *(chat.clear for chat in chats)],
            lambda: [_nothing_said(), *([] for _ in SIDES)],
            None,
            [talk, *chats],
        )
    return page.queue(max_size=MAX_WAITING)


def reply(
    explorer: Explorer, line: str, talk: dict[str, Any], target: Sequence[float]
) -> tuple[str, dict[str, Any]]:
    """Returns the rest of a line, and the talk with the replies to it if it can be answered."""
    point = _target_point(explorer, target)
    if not line.strip() or point is None:
        return line, talk
    answers, dialogues = explorer.answer(point, talk["said"], line.strip(), talk["turn"])
    shown = {side: [*talk["shown"][side], *_turn(line, answers[side])] for side in SIDES}
    return "", {"said": dialogues, "turn": talk["turn"] + 1, "shown": shown}


def _gradio() -> Any:
    # such variables could make Gradio serve folders of this machine or open a tunnel to it
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        if name != "GRADIO_TEMP_DIR":
            del os.environ[name]
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError:
        raise UserError(
            f"the page needs Gradio: {install_command('explore')}. Without it, use "
            "`firm chat RUN --preference 0.7,0.3` in a terminal."
        ) from None
    return gradio


def _theme() -> Any:
    """Returns a theme in the colours of reports, which loads no fonts from other servers."""
    theme = _gradio().themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    accent = light_color("var(--objective-0)")
    fills = {"slider_color": accent, "button_primary_background_fill": accent}
    fills |= {"button_primary_background_fill_hover": light_color("var(--objective-5)")}
    return theme.set(**fills, **{f"{name}_dark": color for name, color in fills.items()})


def _target_point(explorer: Explorer, target: Sequence[float]) -> TargetPoint | None:
    return explorer.reach(target) if any(target) else None


def _nothing_said() -> dict[str, Any]:
    return {"said": {}, "turn": 0, "shown": {side: [] for side in SIDES}}


def _turn(line: str, answer: ChatReply) -> list[dict[str, str]]:
    scores = f"\n\n{'  ·  '.join(answer.scores)}" if answer.scores else ""
    return [
        {"role": "user", "content": line.strip()},
        {"role": "assistant", "content": f"{answer.text}{scores}"},
    ]


def _in_words(explorer: Explorer, point: TargetPoint) -> str:
    """Returns the preference and its expected rewards, as a table."""
    rows = [
        f"| {_escape(name)} | {share:.3f} | {explorer.front.base[name]:.3f} "
        f"| {point.expected.rewards[name]:.3f} ± {point.expected.errors[name]:.3f} |"
        for name, share in zip(explorer.front.objectives, point.preference, strict=True)
    ]
    head = "| | preference | base | expected |\n|---|---|---|---|"
    return "\n".join([head, *rows])


def _escape(text: str) -> str:
    """Escapes all Markdown syntax in a text."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]()<>#+-.!|~&" else sign for sign in text)
