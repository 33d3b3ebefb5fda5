"""Draws the figures of a run's page: every quantity over the rounds, in one style.

An objective or a client has the same colour in every figure.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain, combinations

from firm.base.quantities import Quantity, shown
from firm.report import formats
from firm.report.drawing import (
    INK,
    MUTED,
    Error,
    LegendEntry,
    Panel,
    Trace,
    curve,
    nonempty,
    rounds_figure,
)
from firm.report.plane import ACCURACY, KL, Cloud, Spot, planes
from firm.report.record import Record, is_base, main_error, score
from firm.report.tables import DASHES, Setting, drawn_objectives, reference_of
from firm.run.comparison import score_label
from firm.run.rows import Points, mean_over_clients

FIELDS = ("scores", "rewards")
"""Evaluated fields of objectives: scores and rewards of replies, or margins and accuracies."""
NEED_TWO = ("weights", "gradients", "advantage_covariance")
"""Sections without meaning for a single objective."""
NUM_OBJECTIVE_COLORS, NUM_CLIENT_COLORS = 6, 8

GLOBAL_MODEL = LegendEntry("global model, validation", INK)
MEAN = LegendEntry("mean over clients", INK)
SERVER = LegendEntry("weights of the server", "var(--round-last)", "dash")
VIEWS = {
    "epsilon": LegendEntry("observers of the models who know which clients participated", INK),
    "epsilon_if_unknown": LegendEntry(
        "observers who do not know which clients participated", MUTED, "dash"
    ),
    "epsilon_server": LegendEntry("the server", "var(--round-last)", "dot"),
}
"""Legend of the privacy spent, by the key in the row of a round."""

REWARDS = Quantity(
    "rewards",
    "{}",
    "mean reward in [0, 1]",
    by="objective",
    lines="clients and mean",
    evaluated="rewards",
)
"""Rewards mapped to [0, 1]; `reward_unit` has the unit of others. A run's page draws them only
against the bounds of constraints."""

RAW = ("scores", "scores_std")
"""Quantities of clients in the units of their reward models."""

Lines = dict[LegendEntry, Trace]


def reward_unit(record: Record, *objectives: str) -> str:
    """Returns the unit of objectives' rewards, which may be raw, or of accuracies on pairs."""
    if record.learns_from_pairs:
        return ACCURACY
    return REWARDS.unit if all(map(record.is_bounded, objectives)) else "mean reward"


def objective_color(record: Record, objective: str) -> str:
    """Returns the objective's colour."""
    return f"var(--objective-{record.objectives.index(objective) % NUM_OBJECTIVE_COLORS})"


def client_key(record: Record, client: str) -> LegendEntry:
    """Returns the client's colour and dash."""
    index = record.place_by_client[client]
    dash = DASHES[index // NUM_CLIENT_COLORS % len(DASHES)]
    return LegendEntry(client, f"var(--client-{index % NUM_CLIENT_COLORS})", dash, is_thin=True)


# --- Quantities -----------------------------------------------------------------------------------


def quantity_panels(run: Setting, section: str) -> tuple[list[Panel], list[LegendEntry]]:
    """Returns the figures of all quantities of a section, and the keys of their lines.

    Args:
        run: A setting of one run.
        section: Its name.
    """
    panels: list[Panel] = []
    keys: dict[LegendEntry, None] = {}
    if section in NEED_TWO and len(run.objectives) < 2:
        return [], []
    for quantity in shown(section):
        # evaluations of pairs and of replies have fields of equal names
        if quantity.name in NEED_TWO and len(run.objectives) < 2:
            continue
        is_main, is_of_pairs = quantity.evaluated in FIELDS, quantity.name.startswith("pair_")
        if is_main and is_of_pairs != run.records[0].learns_from_pairs:
            continue
        reference = reference_of(quantity, run.objectives)
        for name, title, lines in _figures(run, quantity):
            known = {key: line for key, line in lines.items() if line["x"]}
            made = rounds_figure(
                known.values(), quantity.unit, reference=reference, **quantity.axis
            )
            panels += nonempty([Panel(name, title, made)])
            keys |= dict.fromkeys(known if quantity.by or len(lines) > 1 else ())
    return panels, sorted(keys, key=lambda key: not key.is_thin)  # not all clients have all


def _figures(run: Setting, quantity: Quantity) -> Iterator[tuple[str, str, Lines]]:
    """Yields name, title and lines of the figures of a quantity: one, or one per objective."""
    entries = _entries(run.records[0], quantity)
    if quantity.kind == "round" or quantity.lines == "means":
        means = {
            key: curve(key, mean_over_clients(_points(run, quantity, name)).items())
            for name, key in entries.items()
        }
        yield quantity.name, quantity.title.removesuffix(", {}"), means
    else:
        for name, key in entries.items():
            title = quantity_title(quantity, key.label if name else "", run.objectives)
            panel_name = f"{quantity.name}-{name}" if name else quantity.name
            yield panel_name, title, _client_lines(run, quantity, name)


def _entries(record: Record, quantity: Quantity) -> dict[str, LegendEntry]:
    """Returns the keys of a quantity's values: objectives, pairs, or the quantity itself."""
    if quantity.by == "pair":
        return {
            f"{a}-{b}": LegendEntry(f"{a} / {b}", INK, DASHES[index % len(DASHES)])
            for index, (a, b) in enumerate(combinations(record.objectives, 2))
        }
    if not quantity.by:
        return {"": LegendEntry(quantity.title, INK)}
    names = drawn_objectives(quantity, record.objectives)
    return {name: LegendEntry(name, objective_color(record, name)) for name in names}


def _points(run: Setting, quantity: Quantity, name: str) -> dict[str, Points]:
    """Returns points by client, without clients whose scores have units of their own."""
    own = run.records[0].of_own_model(name) if quantity.name in RAW else {}
    left_out = {*chain.from_iterable(own.values())}
    lines = run.lines(quantity.name, name)
    return {client: points for client, points in lines.items() if client not in left_out}


def _client_lines(run: Setting, quantity: Quantity, name: str) -> Lines:
    """Returns thin lines for the clients, and bold ones for mean, server and global model."""
    record, lines = run.records[0], _points(run, quantity, name)
    of_clients = {client: points for client, points in lines.items() if client}
    size = 4 if record.last_round <= 20 else 2
    drawn = {}
    for client in record.place_by_client:
        key = client_key(record, client)
        drawn[key] = curve(key, of_clients.get(client, {}).items(), width=1.25, size=size)
    if quantity.lines == "clients and mean" and len(record.place_by_client) > 1:
        drawn[MEAN] = curve(MEAN, mean_over_clients(of_clients).items(), width=2.5, size=0)
    if "" in lines and quantity.of is None:  # else another quantity has that name
        drawn[SERVER] = curve(SERVER, lines[""].items(), size=0)
    if quantity.evaluated:
        drawn[GLOBAL_MODEL] = evaluation_line(run, quantity.evaluated, name)
    return drawn


def quantity_title(quantity: Quantity, entry: str, objectives: Sequence[str]) -> str:
    """Returns the title of a figure of one objective or pair, or of all objectives."""
    both = " / ".join(objectives) if len(objectives) == 2 else "largest / smallest"
    return quantity.title.format(entry or both)


def evaluation_line(run: Setting, field: str, name: str) -> Trace:
    """Returns an evaluated quantity of the global model on the validation prompts, with errors."""
    quantity = f"validation/{field}"
    points = run.lines(quantity, name).get("", {})
    ses: list[Error | None] = list(run.errors(quantity, name).values())
    record = run.records[0]
    if record.learns_from_pairs and field == record.main_field:
        rows = {row["round"]: row for row in record.evaluations.get("validation", [])}
        ses = [main_error(record, rows[at], name) for at in points]
    return curve(GLOBAL_MODEL, points.items(), width=2.5, size=7, ses=ses)


def constraint_panels(run: Setting) -> tuple[list[Panel], list[LegendEntry]]:
    """Returns the rewards that the strategy bounds from below, by round, and the legend."""
    panels: list[Panel] = []
    keys: dict[LegendEntry, None] = {}
    for name, bound in run.records[0].min_rewards.items():
        unit = reward_unit(run.records[0], name)
        lines = {key: line for key, line in _client_lines(run, REWARDS, name).items() if line["x"]}
        made = rounds_figure(lines.values(), unit, reference=float(bound))
        panels += nonempty([Panel(f"constraint-{name}", f"{name}, at least {bound:g}", made)])
        keys |= dict.fromkeys(lines)
    return panels, sorted(keys, key=lambda key: not key.is_thin)


# --- The trade-off --------------------------------------------------------------------------------


def trade_off_planes(record: Record) -> list[Panel]:
    """Returns the path of the global model over the rounds, one plane per pair of objectives.

    The models are those on the validation prompts or, without these, the base and the aligned model
    on the test prompts once both are measured; the two splits have different prompts, so that they
    share no plane. Both ends of the path have labels and error bars; bars at every point would hide
    it.
    """
    test, field = record.evaluations.get("test", []), record.main_field
    final = test if test and not is_base(test[-1]) else []
    places = []
    for row in record.evaluations.get("validation") or final:
        place = {name: score(row, field, name, "mean") for name in record.objectives}
        if len(place) == 1:
            place[KL] = row.get("kl")
        known = {name: value for name, value in place.items() if value is not None}
        if len(known) == len(place):
            places.append((row, known))
    spots = []
    for index, (row, place) in enumerate(places):
        is_last = index == len(places) - 1
        names = record.objectives if index == 0 or is_last else ()
        errors = {name: main_error(record, row, name) for name in names}
        number = row.get("adapter_round", row["round"])
        is_end = is_last and index > 0  # which is the base model, too, if no update was kept
        label = ", ".join(["base"] * is_base(row) + [f"round {number}"] * is_end)
        facts = {
            "split": row.get("split", ""),
            "round": str(number),
            "KL": formats.number(row.get("kl")),
        }
        shade = min(row["round"] / max(record.num_rounds, 1), 1.0)
        spots.append(Spot(place, errors, facts, label=label, shade=shade))
    cloud = Cloud(LegendEntry("global model", MUTED), 0, [], spots, range(len(spots)))
    unit = ACCURACY if record.learns_from_pairs else "mean raw score"
    return nonempty(planes("plane", [cloud], record.objectives, unit=unit)) if spots else []


# --- Learned and true scores ----------------------------------------------------------------------


def true_scores(record: Record) -> list[str]:
    """Returns the names of the true scores, `true_` before the objective's name."""
    true_names = [f"true_{objective}" for objective in record.objectives]
    return [name for name in true_names if name in record.extra_scores()]


def learned_and_true(run: Setting) -> list[Panel]:
    """Returns one panel per objective that has a true score, then one per other extra score.

    Learned and true scores have different units, so both are shown as the change since the base
    model divided by the standard deviation, over prompts, of the base model's own score.
    """
    record = run.records[0]
    panels = []
    for true_name in true_scores(record):
        objective = true_name.removeprefix("true_")
        color = objective_color(record, objective)
        lines = [
            _effect_line(run, objective, LegendEntry("learned score", color)),
            _effect_line(run, true_name, LegendEntry("true score", color, "dot")),
        ]
        made = rounds_figure(lines, "change (base SDs)", reference=0.0)
        panels.append(Panel(f"true-{objective}", objective, made))
    for name in record.extra_scores():
        if name not in true_scores(record):
            label = score_label(name)
            made = rounds_figure([evaluation_line(run, "scores", name)], f"mean {escape(label)}")
            panels.append(Panel(f"extra-{name}", label, made))
    return nonempty(panels)


def _effect_line(run: Setting, name: str, key: LegendEntry) -> Trace:
    """Returns the paired change since the base model over the SD of its score per prompt."""
    base_se = run.errors("validation/scores", name).get(0)
    base = next(iter(run.records[0].evaluations.get("validation", [])), {})
    num_prompts = score(base, "scores", name, "num_prompts") or base.get("num_prompts")
    changes = run.lines("validation/change", name).get("", {})
    changes = {at: change for at, change in changes.items() if at > 0}
    if not base_se or not num_prompts or not changes:
        return curve(key, [])
    deviation = base_se * num_prompts**0.5
    points = [(0, 0.0), *((at, change / deviation) for at, change in changes.items())]
    errors = run.errors("validation/change", name)
    ses = [0.0, *((errors[at] or 0.0) / deviation for at in changes)]
    return curve(key, points, width=2.5, size=7, ses=ses)


# --- Privacy --------------------------------------------------------------------------------------


def privacy_curves(run: Setting) -> tuple[list[Panel], list[LegendEntry]]:
    """Returns ε by round for each kind of observer, the share of clipped deltas, and the legend."""
    views = {view: run.lines("privacy", view).get("", {}) for view in (*VIEWS, "clipped")}
    spent = [curve(key, views[view].items()) for view, key in VIEWS.items()]
    clipped = curve(LegendEntry("clipped", INK), views["clipped"].items())
    panels = [
        Panel("epsilon", "ε so far", rounds_figure(spent, "ε", rangemode="tozero")),
        Panel(
            "clipped",
            "Clients whose update was clipped",
            rounds_figure([clipped], "share", tickformat="~%"),
        ),
    ]
    return nonempty(panels), [key for view, key in VIEWS.items() if views[view]]
