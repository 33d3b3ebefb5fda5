"""Draws the figures of a run's page: every quantity over the rounds, in one style.

An objective, a client or a stage has the same colour in every figure.
"""

from collections.abc import Sequence
from html import escape
from itertools import combinations

from firm.base.quantities import Quantity, shown
from firm.federation.rivals import RIVALS
from firm.report import formats
from firm.report.drawing import (
    INK,
    MUTED,
    Error,
    LegendEntry,
    Panel,
    Trace,
    bars,
    curve,
    nonempty,
    rounds_figure,
)
from firm.report.ledger import uploads_so_far
from firm.report.plane import ACCURACY, KL, Cloud, Spot, planes
from firm.report.record import Record, main_error, score
from firm.report.tables import DASHES, Setting, drawn_objectives, reference_of
from firm.run.comparison import score_label
from firm.run.rows import Row, mean_over_clients

STAGES = (
    *("rollout", "reward", "values", "advantages", "forward", "critic", "backward"),
    *("reduce", "gram", "solve", "step"),
)
"""Stages of a local step in the order in which they are stacked; others follow."""

FIELDS = ("scores", "rewards")
"""Evaluated fields of objectives: scores and rewards of replies, or margins and accuracies."""
NEED_TWO = ("weights", "gradients")
"""Sections without meaning for a single objective."""

NUM_OBJECTIVE_COLORS, NUM_CLIENT_COLORS, NUM_STAGE_COLORS = 6, 8, 12

GLOBAL_MODEL = LegendEntry("global model, validation", INK)
MEAN = LegendEntry("mean over clients", INK)
CUT = LegendEntry("replies that the length limit cut", MUTED, "dash")
UP = LegendEntry("clients to server", "var(--up)")
DOWN = LegendEntry("server to clients", "var(--down)", "dash")
"""Dashed, since uploads and downloads are nearly equal in most runs and would overlap."""
RIVAL_COLOR = 3
"""Index of the first rival's colour among the clients' colours."""
SERVER = LegendEntry("weights of the server", "var(--round-last)", "dash")
VIEWS = {
    "epsilon": LegendEntry("observers of the models who know which clients participated", INK),
    "epsilon_if_unknown": LegendEntry(
        "observers who do not know which clients participated", MUTED, "dash"
    ),
    "epsilon_server": LegendEntry("the server", "var(--round-last)", "dot"),
}
"""Legend of the privacy spent, by the key in the row of a round."""


def rival_keys() -> dict[str, LegendEntry]:
    """Returns the legend entries of the algorithms that a run's uploads are compared with."""
    return {
        name: LegendEntry(
            f"{name} would have uploaded",
            f"var(--client-{(RIVAL_COLOR + place) % NUM_CLIENT_COLORS})",
            "dot",
            is_thin=True,
        )
        for place, name in enumerate(RIVALS)
    }


def objective_color(record: Record, objective: str) -> str:
    """Returns the objective's colour."""
    return f"var(--objective-{record.objectives.index(objective) % NUM_OBJECTIVE_COLORS})"


def client_key(record: Record, client: str) -> LegendEntry:
    """Returns the client's colour and dash."""
    index = record.clients.index(client)
    dash = DASHES[index // NUM_CLIENT_COLORS % len(DASHES)]
    return LegendEntry(client, f"var(--client-{index % NUM_CLIENT_COLORS})", dash, is_thin=True)


def stage_keys(settings: Sequence[Setting]) -> list[LegendEntry]:
    """Returns the stages that clients timed, with their colours, in stacking order."""
    seen = {stage for s in settings for stage in s.objectives_with("seconds") if stage}
    stages = [stage for stage in STAGES if stage in seen] + sorted(seen - set(STAGES))
    return [
        LegendEntry(stage, f"var(--stage-{place % NUM_STAGE_COLORS})")
        for place, stage in enumerate(stages)
    ]


# --- Quantities -----------------------------------------------------------------------------------


def quantity_panels(run: Setting, section: str) -> tuple[list[Panel], list[LegendEntry]]:
    """Returns the figures of all quantities of a section, and the keys of their lines.

    Args:
        run: A setting of one run.
        section: Its name.
    """
    panels: list[Panel] = []
    keys: dict[str, LegendEntry] = {}
    needs_two = section in NEED_TWO
    is_old = section == "diagnostics" and not run.objectives_with("score_length_correlation")
    if is_old or (needs_two and len(run.objectives) < 2):
        return [], []  # the spread of the rewards, all that old runs measured, says little alone
    for quantity in shown(section):
        # evaluations of pairs and of replies have fields of equal names
        is_main, is_of_pairs = quantity.evaluated in FIELDS, quantity.name.startswith("pair_")
        if is_main and is_of_pairs != run.records[0].learns_from_pairs:
            continue
        for panel, own in _panels(run, quantity):
            if panel.figure["data"]:
                panels.append(panel)
                keys |= {key.label: key for key in own}
    return panels, list(keys.values())


def _panels(run: Setting, quantity: Quantity) -> list[tuple[Panel, list[LegendEntry]]]:
    """Returns the figures of a quantity, one or one per objective, with the keys of their lines."""
    entries = _entries(run.records[0], quantity)
    if quantity.kind == "round" or quantity.lines == "means":
        lines = [
            curve(key, mean_over_clients(run.lines(quantity.name, name)).items())
            for name, key in entries.items()
        ]
        keys = list(entries.values()) if quantity.by else []
        if quantity.name == "truncated_share" and run.objectives_with(quantity.name):
            ends = mean_over_clients(run.lines("end_share"))
            lines.append(curve(CUT, [(at, 1.0 - share) for at, share in ends.items()]))
            keys.append(CUT)
        return [(_panel(run, quantity, quantity.title.removesuffix(", {}"), lines), keys)]
    return [_client_panel(run, quantity, name, key) for name, key in entries.items()]


def _entries(record: Record, quantity: Quantity) -> dict[str, LegendEntry]:
    """Returns the keys of a quantity's values: objectives, pairs, or the quantity itself."""
    if quantity.by == "pair":
        pairs = enumerate(combinations(record.objectives, 2))
        return {
            f"{a}-{b}": LegendEntry(f"{a} / {b}", INK, DASHES[index % len(DASHES)])
            for index, (a, b) in pairs
        }
    if not quantity.by:
        return {"": LegendEntry(quantity.title, INK)}
    names = drawn_objectives(quantity, record.objectives)
    is_all = len(names) == len(record.objectives)
    return {
        name: LegendEntry(name, objective_color(record, name) if is_all else INK) for name in names
    }


def _client_panel(
    run: Setting, quantity: Quantity, name: str, entry: LegendEntry
) -> tuple[Panel, list[LegendEntry]]:
    """Returns thin lines for the clients, and bold ones for mean, server and global model."""
    record = run.records[0]
    lines = run.lines(quantity.name, name)
    of_clients = {client: points for client, points in lines.items() if client}
    size = 4 if record.last_round <= 20 else 2
    keys = [client_key(record, client) for client in record.clients]
    traces = [
        curve(key, of_clients.get(key.label, {}).items(), width=1.25, size=size) for key in keys
    ]
    if quantity.lines == "clients and mean" and len(keys) > 1:
        traces.append(curve(MEAN, mean_over_clients(of_clients).items(), width=2.5, size=0))
        keys.append(MEAN)
    if "" in lines and quantity.of is None:  # else another quantity has that name
        traces.append(curve(SERVER, lines[""].items(), size=0))
        keys.append(SERVER)
    if quantity.evaluated:
        color = objective_color(record, name) if name else INK
        evaluated = evaluation_line(run, quantity.evaluated, name, color)
        traces.append(evaluated)
        keys += [GLOBAL_MODEL] if evaluated["x"] and not quantity.by else []
    title = quantity_title(quantity, entry.label if name else "", record.objectives)
    return _panel(run, quantity, title, traces, name), keys


def quantity_title(quantity: Quantity, entry: str, objectives: Sequence[str]) -> str:
    """Returns the title of a figure of one objective or pair, or of all objectives."""
    both = " / ".join(objectives) if len(objectives) == 2 else "largest / smallest"
    return quantity.title.format(entry or both)


def _panel(
    run: Setting, quantity: Quantity, title: str, lines: Sequence[Trace], objective: str = ""
) -> Panel:
    reference = reference_of(quantity, run.objectives)
    figure = rounds_figure(lines, quantity.unit, reference=reference, **quantity.axis)
    return Panel("-".join(filter(None, [quantity.name, objective])), title, figure)


def evaluation_line(run: Setting, field: str, name: str, color: str) -> Trace:
    """Returns an evaluated quantity of the global model on the validation prompts, with errors."""
    quantity = f"validation/{field}"
    points = run.lines(quantity, name).get("", {})
    ses: list[Error | None] = list(run.errors(quantity, name).values())
    record = run.records[0]
    if record.learns_from_pairs and field == record.main_field:
        rows = {row["round"]: row for row in record.evaluations.get("validation", [])}
        ses = [main_error(record, rows[at], name) for at in points]
    return curve(LegendEntry(GLOBAL_MODEL.label, color), points.items(), width=2.5, size=7, ses=ses)


# --- The trade-off --------------------------------------------------------------------------------


def trade_off_rows(record: Record) -> list[Row]:
    """Returns the evaluations on the validation prompts, by round.

    Without these, the base and the aligned model on the test prompts once both are measured; the
    two splits have different prompts, so that they share no plane.
    """
    if rows := record.evaluations.get("validation"):
        return rows
    rows = record.evaluations.get("test", [])
    return rows if rows and rows[-1]["round"] > 0 else []


def trade_off_planes(record: Record) -> list[Panel]:
    """Returns the path of the global model over the rounds, one plane per pair of objectives."""
    spots = _spots(record, trade_off_rows(record))
    if not spots:
        return []
    cloud = Cloud(LegendEntry("global model", MUTED), 0, [], spots, range(len(spots)))
    unit = ACCURACY if record.learns_from_pairs else "mean raw score"
    return nonempty(planes("plane", [cloud], record.objectives, unit=unit))


def _spots(record: Record, rows: Sequence[Row]) -> list[Spot]:
    """Returns the models of evaluations that have all scores.

    Both ends of the path over the rounds have labels and error bars; bars at every point would hide
    the path.
    """
    places, field = [], record.main_field
    for row in rows:
        place = {name: score(row, field, name, "mean") for name in record.objectives}
        if len(place) == 1:
            place[KL] = row.get("kl")
        known = {name: value for name, value in place.items() if value is not None}
        if len(known) == len(place):
            places.append((row, known))
    spots = []
    for index, (row, place) in enumerate(places):
        is_last = index == len(places) - 1
        has_bars = index == 0 or is_last
        errors = {n: main_error(record, row, n) if has_bars else None for n in record.objectives}
        label = "base" if row["round"] == 0 else f"round {row['round']}" if is_last else ""
        shade = min(row["round"] / max(record.num_rounds, 1), 1.0)
        spots.append(Spot(place, errors, _facts(record, row), label=label, shade=shade))
    return spots


def _facts(record: Record, row: Row) -> dict[str, str]:
    """Returns the tooltip of a round's model; only the last round has an adapter."""
    adapters = {0: "none, the base model"}
    if record.is_finished:
        adapters[record.last_round] = f"{record.name}/adapter"
    return {
        "split": row.get("split", ""),
        "round": str(row["round"]),
        "preference": formats.shares(record.preference),
        "seed": str(record.seed),
        "KL": formats.number(row.get("kl")),
        "adapter": adapters.get(row["round"], "of this round not kept"),
    }


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
        figure = rounds_figure(lines, "change (base SDs)", reference=0.0)
        panels.append(Panel(f"true-{objective}", objective, figure))
    for name in record.extra_scores():
        if name not in true_scores(record):
            line = evaluation_line(run, "scores", name, INK)
            label = score_label(name)
            figure = rounds_figure([line], f"mean {escape(label)}")
            panels.append(Panel(f"extra-{name}", label, figure))
    return nonempty(panels)


def _effect_line(run: Setting, name: str, key: LegendEntry) -> Trace:
    """Returns the paired change since the base model over the SD of its score per prompt."""
    base_se = run.errors("validation/scores", name).get(0)
    base = next(iter(run.records[0].evaluations.get("validation", [])), {})
    entry = base.get("scores", {}).get(name, {})
    num_prompts = entry.get("num_prompts", base.get("num_prompts"))
    changes = run.lines("validation/change", name).get("", {})
    changes = {at: change for at, change in changes.items() if at > 0}
    if not base_se or not num_prompts or not changes:
        return curve(key, [])
    deviation = base_se * num_prompts**0.5
    points = [(0, 0.0), *((at, change / deviation) for at, change in changes.items())]
    errors = run.errors("validation/change", name)
    ses = [0.0, *((errors[at] or 0.0) / deviation for at in changes)]
    return curve(key, points, width=2.5, size=7, ses=ses)


# --- Cost and privacy -----------------------------------------------------------------------------


def cost_curves(run: Setting) -> list[Panel]:
    """Returns bytes sent so far by this run and by rival algorithms, and seconds per round."""
    record = run.records[0]
    traffic = [
        curve(key, run.bytes_so_far(quantity).get(0, {}).items())
        for quantity, key in (("bytes_up", UP), ("bytes_down", DOWN))
    ]
    if len(record.objectives) > 1:
        traffic += [
            curve(key, uploads_so_far(record, name), size=0) for name, key in rival_keys().items()
        ]
    seconds, rounds = [], [row["round"] for row in record.rounds]
    for key in stage_keys([run]):
        lines = run.lines("seconds", key.label).values()
        totals = [sum(points.get(at, 0.0) for points in lines) for at in rounds]
        seconds.append(bars(key, rounds, totals, "%{fullData.name}, round %{x}: %{y:.3g} s"))
    elapsed = [(row["round"], row.get("seconds")) for row in record.rounds]
    seconds.append(curve(LegendEntry("whole round", INK), elapsed))
    traffic_figure = rounds_figure(
        traffic, "bytes so far", rangemode="tozero", tickformat="~s", ticksuffix="B"
    )
    seconds_figure = rounds_figure(seconds, "seconds", rangemode="tozero")
    seconds_figure["layout"] |= {"barmode": "stack", "bargap": 0.25}
    sent = Panel("bytes", "Bytes sent so far", traffic_figure)
    return nonempty([sent, Panel("seconds", "Seconds per round", seconds_figure)])


def privacy_curves(run: Setting) -> tuple[list[Panel], list[LegendEntry]]:
    """Returns ε by round for each kind of observer, the share of clipped deltas, and the legend."""
    views = {view: run.lines("privacy", view).get("", {}) for view in (*VIEWS, "clipped")}
    spent = [curve(key, views[view].items()) for view, key in VIEWS.items()]
    clipped = rounds_figure(
        [curve(LegendEntry("clipped", INK), views["clipped"].items())], "share", tickformat="~%"
    )
    panels = [
        Panel("epsilon", "ε so far", rounds_figure(spent, "ε", rangemode="tozero")),
        Panel("clipped", "Clients whose update was clipped", clipped),
    ]
    return nonempty(panels), [key for view, key in VIEWS.items() if views[view]]
