"""The figures of a run's page: every quantity in lines over the rounds, in one style.

An objective, a client or a stage has the same colour in every figure.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import combinations

from firm.report import formats
from firm.report.drawing import (
    INK,
    MUTED,
    SURFACE,
    Key,
    Panel,
    Trace,
    curve,
    nonempty,
    rounds_figure,
)
from firm.report.ledger import uploads_so_far
from firm.report.plane import KL, Cloud, Spot, planes
from firm.report.record import Record, score
from firm.report.tables import Frame, Setting
from firm.run.quantities import Quantity, shown
from firm.run.rows import Row

STAGES = (
    "rollout",
    "reward",
    "values",
    "advantages",
    "forward",
    "critic",
    "backward",
    "reduce",
    "gram",
    "solve",
    "step",
)
"""Stages of a local step in the order in which they are stacked; others follow."""

NUM_OBJECTIVE_COLORS, NUM_CLIENT_COLORS, NUM_STAGE_COLORS = 6, 8, 12
DASHES = ("solid", "dash", "dot")
"""Clients past the number of colours are told apart by their line."""

GLOBAL_MODEL = Key("global model, validation", INK)
MEAN = Key("mean over clients", INK)
CUT = Key("replies that the length limit cut", MUTED, "dash")
UP = Key("clients to server", "var(--up)")
DOWN = Key("server to clients", "var(--down)", "dash")
"""Nearly equal in most runs: the dashes let both be seen."""
WOULD_SEND = {
    "FedCMOO-A": Key("FedCMOO-A would have sent up", "var(--client-3)", "dot", is_thin=True),
    "FSMGDA": Key("FSMGDA would have sent up", "var(--client-4)", "dot", is_thin=True),
}
SERVER = Key("weights of the server", "var(--round-last)", "dash")
VIEWS = {
    "epsilon": Key("for those who see the models and know who took part", INK),
    "epsilon_if_unknown": Key("the same, if who took part is secret", MUTED, "dash"),
    "epsilon_server": Key("for the server", "var(--round-last)", "dot"),
}
"""Against whom the row of a round states the privacy spent, by its key."""


def objective_color(record: Record, objective: str) -> str:
    """Returns the objective's colour."""
    return f"var(--objective-{record.objectives.index(objective) % NUM_OBJECTIVE_COLORS})"


def client_key(record: Record, client: str) -> Key:
    """Returns the client's colour and dash."""
    index = record.clients.index(client)
    dash = DASHES[index // NUM_CLIENT_COLORS % len(DASHES)]
    return Key(client, f"var(--client-{index % NUM_CLIENT_COLORS})", dash, is_thin=True)


def stage_keys(settings: Sequence[Setting]) -> list[Key]:
    """Returns the stages that clients timed with their colours, in the order of their stack."""
    seen = {stage for s in settings for stage in s.values("seconds")["objective"] if stage}
    stages = [stage for stage in STAGES if stage in seen] + sorted(seen - set(STAGES))
    return [
        Key(stage, f"var(--stage-{place % NUM_STAGE_COLORS})") for place, stage in enumerate(stages)
    ]


def pair_keys(record: Record) -> dict[str, Key]:
    """Returns the dash of each pair of objectives, by its name in the rows."""
    pairs = combinations(record.objectives, 2)
    return {
        f"{a}-{b}": Key(f"{a} / {b}", INK, DASHES[index % len(DASHES)])
        for index, (a, b) in enumerate(pairs)
    }


# --- Quantities -----------------------------------------------------------------------------------


def quantity_panels(run: Setting, section: str) -> tuple[list[Panel], list[Key]]:
    """Returns the figures of all quantities of a section, and the keys of their lines.

    Args:
        run: A setting of one run.
        section: Its name.
    """
    panels: list[Panel] = []
    keys: dict[str, Key] = {}
    needs_two = section in ("weights", "gradients")
    is_old = section == "diagnostics" and run.values("score_length_correlation").empty
    if is_old or (needs_two and len(run.objectives) < 2):
        return [], []  # the scores' spread, all that old runs measured, says little alone
    for quantity in shown(section):
        if run.values(quantity.name).empty and not _evaluated(run, quantity, ""):
            continue
        for panel, own in _panels(run, quantity):
            if panel.figure["data"]:
                panels.append(panel)
                keys |= {key.label: key for key in own}
    return panels, list(keys.values())


def _panels(run: Setting, quantity: Quantity) -> list[tuple[Panel, list[Key]]]:
    """The figures of a quantity with the keys of their lines: one, or one for each objective."""
    record = run.records[0]
    entries = _entries(record, quantity)
    if quantity.kind == "round" or quantity.lines == "means":
        title = quantity.title.removesuffix(", {}")
        lines = [
            curve(_means(run.values(quantity.name, name)), key.label, key.color, dash=key.mark)
            for name, key in entries.items()
        ]
        keys = list(entries.values()) if quantity.by else []
        if quantity.name == "truncated_share":
            lines.append(_cut_line(run))
            keys.append(CUT)
        return [(Panel(quantity.name, title, _figure(record, quantity, lines)), keys)]
    panels = []
    for name, key in entries.items():
        values = run.values(quantity.name, name)
        lines = _client_lines(record, values, with_mean=quantity.lines == "clients and mean")
        keys = [client_key(record, client) for client in record.clients]
        if quantity.lines == "clients and mean" and len(record.clients) > 1:
            keys.append(MEAN)
        if (server := values[values["client"] == ""]).size:
            points = zip(server["round"].tolist(), server["value"].tolist(), strict=True)
            lines.append(curve(points, SERVER.label, SERVER.color, dash=SERVER.mark, size=0))
            keys.append(SERVER)
        if evaluated := _evaluated(run, quantity, name):
            lines.append(evaluated)
            keys += [] if quantity.by else [GLOBAL_MODEL]
        label = key.label
        if not quantity.by:
            both = len(record.objectives) == 2
            label = " / ".join(record.objectives) if both else "largest / smallest"
        panel_name = f"{quantity.name}-{name}" if quantity.by else quantity.name
        figure = _figure(record, quantity, lines)
        panels.append((Panel(panel_name, quantity.title.format(label), figure), keys))
    return panels


def _entries(record: Record, quantity: Quantity) -> dict[str, Key]:
    """What a quantity has values of: objectives, pairs, or nothing but itself."""
    if quantity.by == "pair":
        return pair_keys(record)
    if not quantity.by:
        return {"": Key(quantity.title, INK)}
    two = quantity.is_share and len(record.objectives) == 2
    names = record.objectives[:1] if two else record.objectives
    return {name: Key(name, INK if two else objective_color(record, name)) for name in names}


def _figure(record: Record, quantity: Quantity, lines: list[Trace]) -> dict:
    reference = quantity.reference
    if reference == "1/M":
        reference = 1 / len(record.objectives)
    return rounds_figure(lines, quantity.unit, reference=reference, **quantity.axis)


def _client_lines(record: Record, values: Frame, *, with_mean: bool) -> list[Trace]:
    """One thin line per client and, over several clients, their mean in ink."""
    points: dict[str, list[tuple[int, float]]] = {}
    for client, at, value in values[["client", "round", "value"]].itertuples(index=False):
        points.setdefault(client, []).append((at, value))
    lines = []
    for client in record.clients:
        key = client_key(record, client)
        size = 4 if record.last_round <= 20 else 2
        own = points.get(client, [])
        lines.append(curve(own, client, key.color, dash=key.mark, width=1.25, size=size))
    if with_mean and len(record.clients) > 1:
        means = _means(values[values["client"] != ""])
        lines.append(curve(means, MEAN.label, MEAN.color, width=2.5, size=0))
    return lines


def _means(values: Frame) -> list[tuple[int, float]]:
    """Rounds with the mean over the clients that have a value."""
    means = values.groupby("round")["value"].mean()
    return list(zip(means.index.tolist(), means.tolist(), strict=True))


def _cut_line(run: Setting) -> Trace:
    """The share of replies that do not end by themselves, beside the dialogues cut by a model."""
    points = [(at, 1.0 - share) for at, share in _means(run.values("end_share"))]
    return curve(points, CUT.label, CUT.color, dash=CUT.mark)


def _evaluated(run: Setting, quantity: Quantity, objective: str) -> Trace | None:
    """The global model's line on the validation split, with its standard errors."""
    if not quantity.evaluated:
        return None
    color = objective_color(run.records[0], objective) if objective else INK
    return evaluation_line(run, quantity.evaluated, objective, color)


def evaluation_line(run: Setting, field: str, name: str, color: str) -> Trace | None:
    """Returns a figure of the global model on the validation prompts; None where there is none."""
    values = run.values(f"validation/{field}", name)
    if values.empty:
        return None
    points = list(zip(values["round"].tolist(), values["value"].tolist(), strict=True))
    ses = [None if math.isnan(se) else se for se in values["se"].tolist()]
    return curve(points, GLOBAL_MODEL.label, color, width=2.5, size=7, ses=ses)


# --- The trade-off --------------------------------------------------------------------------------


def final_test(record: Record) -> list[Row]:
    """Returns the evaluations on the test split once the aligned model has one."""
    rows = record.evaluations.get("test", [])
    return rows if rows and rows[-1]["round"] > 0 else []


def trade_off_planes(record: Record) -> list[Panel]:
    """Returns where the rounds took the global model, one pair of objectives at a time."""
    validation, test = record.evaluations.get("validation", []), final_test(record)
    clouds = [
        Cloud(Key("validation, after each round", MUTED), 0, [], _spots(record, validation, test)),
        Cloud(Key("test, base and aligned", INK, "dot"), 2, [], _spots(record, test)),
    ]
    clouds = [Cloud(c.key, c.index, [], c.means, range(len(c.means))) for c in clouds if c.means]
    if not clouds:
        return []
    panels = planes("plane", clouds, record.objectives, unit="mean raw score")
    return nonempty(panels)


def _spots(record: Record, rows: Sequence[Row], others: Sequence[Row] = ()) -> list[Spot]:
    """The models of evaluations that have all scores.

    Of the path over the rounds both ends are named. Bars at every point would hide it: the ends
    have them until the test split was scored, whose points have them then.
    """
    axes = [KL, *record.objectives] if len(record.objectives) == 1 else record.objectives

    def place(row: Row) -> dict[str, float | None]:
        return {n: row.get("kl") if n == KL else score(row, "scores", n, "mean") for n in axes}

    rows = [row for row in rows if None not in place(row).values()]
    is_test = bool(rows) and rows[0].get("split") == "test"
    spots = []
    for row in rows:
        is_end = row is rows[0] or row is rows[-1]
        has_bars = is_test or (is_end and not others)
        errors = {n: score(row, "scores", n, "se") if has_bars else None for n in record.objectives}
        label = "base" if row["round"] == 0 else f"round {row['round']}" if row is rows[-1] else ""
        known = {name: value for name, value in place(row).items() if value is not None}
        spots.append(
            Spot(
                known,
                errors,
                _facts(record, row),
                label="" if is_test else label,
                shade=min(row["round"] / max(record.num_rounds, 1), 1.0),
            )
        )
    return spots


def _facts(record: Record, row: Row) -> dict[str, str]:
    """What the pointer shows of a round's model; the adapter is the last round's."""
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
    for objective in record.objectives:
        if f"true_{objective}" not in true_scores(record):
            continue
        color = objective_color(record, objective)
        learned = _effect_line(record, objective, name="learned score", color=color)
        true = _effect_line(record, f"true_{objective}", name="true score", color=color, dash="dot")
        figure = rounds_figure([*learned, *true], "change (base SDs)", reference=0.0)
        panels.append(Panel(f"true-{objective}", objective, figure))
    for name in record.extra_scores():
        if name not in true_scores(record) and (line := evaluation_line(run, "scores", name, INK)):
            figure = rounds_figure([line], f"mean of {escape(name)}")
            panels.append(Panel(f"extra-{name}", name, figure))
    return nonempty(panels)


def _effect_line(
    record: Record, score_name: str, *, name: str, color: str, dash: str = "solid"
) -> list[Trace]:
    """Paired change since the base model over the SD of the base model's score per prompt."""
    rows = record.evaluations.get("validation", [])
    if not rows or rows[0]["round"] != 0:
        return []
    base_se = score(rows[0], "scores", score_name, "se")
    num_prompts = rows[0].get("num_prompts")
    if not base_se or not num_prompts:
        return []
    deviation = base_se * math.sqrt(num_prompts)
    points, ses = [(0.0, 0.0)], [0.0]
    for row in rows[1:]:
        mean = score(row, "change", score_name, "mean")
        se = score(row, "change", score_name, "se")
        if mean is not None:
            points.append((row["round"], mean / deviation))
            ses.append((se or 0.0) / deviation)
    if len(points) == 1:
        return []
    return [curve(points, name, color, width=2.5, size=7, dash=dash, ses=ses)]


# --- Cost and privacy -----------------------------------------------------------------------------


def cost_curves(run: Setting) -> list[Panel]:
    """Returns bytes so far in both directions, what others would have sent, and seconds."""
    record = run.records[0]
    traffic = [
        curve(run.bytes_so_far(quantity)[0].items(), key.label, key.color, dash=key.mark)
        for quantity, key in (("bytes_up", UP), ("bytes_down", DOWN))
        if not run.bytes_so_far(quantity).empty
    ]
    if len(record.objectives) > 1:
        traffic += [
            curve(uploads_so_far(record, name), key.label, key.color, dash=key.mark, size=0)
            for name, key in WOULD_SEND.items()
        ]
    seconds = run.values("seconds")
    seconds = seconds[seconds["client"] != ""]
    by_stage = seconds.pivot_table("value", "round", "objective", aggfunc="sum")
    by_stage = by_stage.reindex([row["round"] for row in record.rounds]).fillna(0.0)
    bars = [
        {
            "type": "bar",
            "x": by_stage.index.tolist(),
            "y": by_stage[key.label].tolist(),
            "name": escape(key.label),
            "marker": {"color": key.color, "line": {"color": SURFACE, "width": 1}},
            "hovertemplate": "%{fullData.name}, round %{x}: %{y:.3g} s<extra></extra>",
        }
        for key in stage_keys([run])
    ]
    elapsed = [(row["round"], row.get("seconds")) for row in record.rounds]
    traffic_figure = rounds_figure(
        traffic, "bytes so far", rangemode="tozero", tickformat="~s", ticksuffix="B"
    )
    seconds_figure = rounds_figure(
        [*bars, curve(elapsed, "whole round", INK)], "seconds", rangemode="tozero"
    )
    seconds_figure["layout"] |= {"barmode": "stack", "bargap": 0.25}
    return nonempty(
        [
            Panel("bytes", "Bytes sent so far", traffic_figure),
            Panel("seconds", "Seconds per round", seconds_figure),
        ]
    )


def privacy_curves(run: Setting) -> tuple[list[Panel], list[Key]]:
    """Returns ε by round against each who may look on and the share of clipped deltas; the keys."""
    keys = {view: key for view, key in VIEWS.items() if not run.values("privacy", view).empty}
    spent = [
        curve(_means(run.values("privacy", view)), key.label, key.color, dash=key.mark)
        for view, key in keys.items()
    ]
    clipped = [curve(_means(run.values("privacy", "clipped")), "clipped", INK)]
    panels = [
        Panel("epsilon", "ε so far", rounds_figure(spent, "ε", rangemode="tozero")),
        Panel(
            "clipped",
            "Clients whose update was clipped",
            rounds_figure(clipped, "share", tickformat="~%"),
        ),
    ]
    return nonempty(panels), list(keys.values())
