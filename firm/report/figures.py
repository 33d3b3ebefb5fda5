"""The curves and bars of the page over the rounds; the page lays the panels out in a grid.

An objective, a client or a stage has the same colour in every figure.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import combinations
from statistics import fmean

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
from firm.report.ledger import bytes_so_far, uploads_so_far
from firm.report.record import Record, score
from firm.run.directory import Row

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

NUM_OBJECTIVE_COLORS = 6
NUM_CLIENT_COLORS = 8
NUM_STAGE_COLORS = 12
DASHES = ("solid", "dash", "dot")
"""Clients past the number of colours are told apart by their line."""

GLOBAL_MODEL = "global model, validation"
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
"""What the row of a round tells of privacy: against whom, by its key."""


def objective_color(record: Record, objective: str) -> str:
    """Returns the objective's colour."""
    return f"var(--objective-{record.objectives.index(objective) % NUM_OBJECTIVE_COLORS})"


def client_key(record: Record, client: str) -> Key:
    """Returns the client's colour and dash."""
    index = record.clients.index(client)
    dash = DASHES[index // NUM_CLIENT_COLORS % len(DASHES)]
    return Key(client, f"var(--client-{index % NUM_CLIENT_COLORS})", dash, is_thin=True)


def stages(record: Record) -> list[str]:
    """Returns the stages that clients timed, in the order in which they are stacked."""
    rows = [row for rows in record.trainings.values() for row in rows]
    seen = {stage for row in rows for stage in row.get("seconds", {})}
    return [stage for stage in STAGES if stage in seen] + sorted(seen - set(STAGES))


def stage_color(record: Record, stage: str) -> str:
    """Returns the stage's colour."""
    return f"var(--stage-{stages(record).index(stage) % NUM_STAGE_COLORS})"


def reward_curves(record: Record) -> list[Panel]:
    """Returns one panel per objective: validation score, and what each client saw in training."""
    panels = []
    for objective in record.objectives:
        lines = _client_lines(
            record, lambda row, name=objective: _of(row, "reward_raw", name), with_mean=False
        )
        mean = _validation_scores(record, objective, objective_color(record, objective))
        figure = rounds_figure([*lines, *mean], "mean raw reward")
        panels.append(Panel(f"reward-{objective}", objective, figure))
    return nonempty(panels)


def learned_and_true(record: Record) -> list[Panel]:
    """Returns one panel per objective that has a true score, then one per other extra score.

    Learned and true scores have different units, so both are shown as the change since the base
    model divided by the standard deviation, over prompts, of the base model's own score.
    """
    panels = []
    for objective in record.objectives:
        if f"true_{objective}" not in true_scores(record):
            continue
        color = objective_color(record, objective)
        learned = _effect_line(record, objective, name="learned reward", color=color)
        true = _effect_line(record, f"true_{objective}", name="true score", color=color, dash="dot")
        figure = rounds_figure([*learned, *true], "change (base SDs)", reference=0.0)
        panels.append(Panel(f"true-{objective}", objective, figure))
    for name in record.extra_scores():
        if name not in true_scores(record):
            line = _validation_scores(record, name, INK)
            figure = rounds_figure(line, f"mean of {escape(name)}")
            panels.append(Panel(f"extra-{name}", name, figure))
    return nonempty(panels)


def true_scores(record: Record) -> list[str]:
    """Returns the names of the true scores, `true_` before the objective's name."""
    true_names = [f"true_{objective}" for objective in record.objectives]
    return [name for name in true_names if name in record.extra_scores()]


def weight_curves(record: Record) -> list[Panel]:
    """Returns each client's mean weights per round, and how far the clients are apart."""
    num_objectives = len(record.objectives)
    if num_objectives < 2:
        return []
    # Two weights sum to one: the second is the first upside down.
    shown = record.objectives[:1] if num_objectives == 2 else record.objectives
    panels = []
    for index, objective in enumerate(shown):
        lines = _client_lines(record, lambda row, j=index: _column_mean(row, "weights", j))
        server = [(row["round"], _of(row, "weights", objective)) for row in record.rounds]
        lines.append(curve(server, SERVER.label, SERVER.color, dash=SERVER.mark, size=0))
        figure = rounds_figure(
            lines, "mean weight λ", reference=1 / num_objectives, range=[-0.02, 1.02]
        )
        panels.append(Panel(f"weight-{objective}", f"λ of {objective}", figure))
    spread = [
        curve(
            [(row["round"], _of(row, "weights_spread", objective)) for row in record.rounds],
            name=objective,
            color=INK if num_objectives == 2 else objective_color(record, objective),
        )
        for objective in shown
    ]
    figure = rounds_figure(spread, "SD of λ over clients", rangemode="tozero")
    return nonempty([*panels, Panel("weights-spread", "Spread of λ over clients", figure)])


def has_server_weights(record: Record) -> bool:
    """Returns whether the server weighed the objectives, for all clients alike."""
    return any(row.get("weights") for row in record.rounds)


def gradient_curves(record: Record) -> list[Panel]:
    """Returns cosines, norm ratio, β-effect and drift: how much the objectives disagree."""
    if len(record.objectives) < 2:
        return []
    panels = []
    for index, (a, b) in enumerate(combinations(record.objectives, 2)):
        lines = _client_lines(record, lambda row, j=index: _column_mean(row, "cosines", j))
        figure = rounds_figure(lines, "cosine", reference=0.0, range=[-1.05, 1.05])
        panels.append(Panel(f"cosine-{a}-{b}", f"Cosine, {a} / {b}", figure))
    lines = _client_lines(record, _norm_ratio)
    figure = rounds_figure(
        lines, "norm ratio", reference=1.0, type="log", tickformat="~g", nticks=6
    )
    panels.append(Panel("norm-ratio", norm_ratio_title(record), figure))
    lines = _client_lines(record, lambda row: _mean(row.get("beta_effect")))
    figure = rounds_figure(
        lines, "share of the way", reference=0.05, rangemode="tozero", tickformat="~%"
    )
    panels.append(Panel("beta-effect", "β-effect", figure))
    drift = curve([(row["round"], row.get("drift")) for row in record.rounds], "drift", INK)
    figure = rounds_figure([drift], "spread / server step", rangemode="tozero")
    panels.append(Panel("drift", "Client drift", figure))
    bound = [(row["round"], row.get("stationarity")) for row in record.rounds]
    figure = rounds_figure([curve(bound, "bound", INK)], "squared norm", rangemode="tozero")
    panels.append(Panel("stationarity", "Bound on Pareto stationarity", figure))
    return nonempty(panels)


def norm_ratio_title(record: Record) -> str:
    """Returns what the norm ratio divides by what."""
    if len(record.objectives) == 2:
        return f"Norm, {record.objectives[0]} / {record.objectives[1]}"
    return "Norm, largest / smallest"


def has_stationarity(record: Record) -> bool:
    """Returns whether the server saw what the bound on Pareto stationarity needs."""
    return any(row.get("stationarity") is not None for row in record.rounds)


def pair_keys(record: Record) -> list[Key]:
    """Returns the dash of each pair of objectives."""
    pairs = combinations(record.objectives, 2)
    return [
        Key(f"{a} / {b}", INK, DASHES[index % len(DASHES)]) for index, (a, b) in enumerate(pairs)
    ]


def reward_diagnostics(record: Record) -> list[Panel]:
    """Returns what the clients measured of their rewards beside the mean, averaged over them.

    Nothing of a run that measured no more than the rewards' spread: it says little alone.
    """
    logged = {key for rows in record.trainings.values() for row in rows for key in row}
    if "reward_length_correlation" not in logged:
        return []
    correlations = [
        curve(
            _client_means(record, "reward_correlation", f"{a}-{b}"), key.label, INK, dash=key.mark
        )
        for (a, b), key in zip(combinations(record.objectives, 2), pair_keys(record), strict=True)
    ]
    ended = _client_means(record, "end_share")
    not_ended = [(at, None if share is None else 1.0 - share) for at, share in ended]
    cut = curve(not_ended, CUT.label, CUT.color, dash=CUT.mark)
    sides = {"range": [-1.05, 1.05], "reference": 0.0}
    spread = _objective_means(record, "reward_raw_std")
    with_length = _objective_means(record, "reward_length_correlation")
    cut_dialogues = _objective_means(record, "reward_truncated_share")
    return nonempty(
        [
            Panel(
                "reward-spread",
                "Spread of the rewards",
                rounds_figure(spread, "SD of raw reward", rangemode="tozero"),
            ),
            Panel(
                "reward-correlation",
                "Reward against reward",
                rounds_figure(correlations, "correlation", **sides),
            ),
            Panel(
                "reward-length",
                "Reward against reply length",
                rounds_figure(with_length, "correlation", **sides),
            ),
            Panel(
                "truncated",
                "Texts cut short",
                rounds_figure([*cut_dialogues, cut], "share", rangemode="tozero", tickformat="~%"),
            ),
        ]
    )


def training_curves(record: Record) -> list[Panel]:
    """Returns the small multiples that show whether PPO is healthy."""
    quantities = [
        ("kl", "KL from the base model", "nats per reply"),
        ("kl_coefficient", "KL coefficient", "coefficient"),
        ("entropy", "Entropy of the policy", "nats per token"),
        ("response_length", "Reply length", "tokens"),
        ("end_share", "Replies that end by themselves", "share"),
        ("clip_fraction", "Clip fraction", "share of tokens"),
    ]
    in_validation = {"kl": "kl", "response_length": "length", "end_share": "end_share"}
    panels = []
    for name, title, unit in quantities:
        lines = _client_lines(record, lambda row, key=name: row.get(key), with_mean=False)
        if name in in_validation:
            lines += _validation_figures(record, in_validation[name])
        panels.append(Panel(name, title, rounds_figure(lines, unit, rangemode="tozero")))
    for objective in record.objectives:
        lines = _client_lines(
            record, lambda row, name=objective: _of(row, "value_loss", name), with_mean=False
        )
        figure = rounds_figure(lines, "loss", rangemode="tozero")
        panels.append(Panel(f"value-loss-{objective}", f"Value loss, {objective}", figure))
    return nonempty(panels)


def cost_curves(record: Record) -> list[Panel]:
    """Returns bytes so far in both directions, what others would have sent, and seconds."""
    traffic = [
        curve(bytes_so_far(record, "bytes_up"), UP.label, UP.color),
        curve(bytes_so_far(record, "bytes_down"), DOWN.label, DOWN.color, dash=DOWN.mark),
    ]
    if len(record.objectives) > 1:
        traffic += [
            curve(uploads_so_far(record, name), key.label, key.color, dash=key.mark, size=0)
            for name, key in WOULD_SEND.items()
        ]
    bars = [
        {
            "type": "bar",
            "x": [row["round"] for row in record.rounds],
            "y": [_stage_seconds(record, row["round"], stage) for row in record.rounds],
            "name": escape(stage),
            "marker": {"color": stage_color(record, stage), "line": {"color": SURFACE, "width": 1}},
            "hovertemplate": "%{fullData.name}, round %{x}: %{y:.3g} s<extra></extra>",
        }
        for stage in stages(record)
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


def privacy_curves(record: Record) -> list[Panel]:
    """Returns ε by round against each who may look on, and the share of clipped deltas."""
    spent = [
        curve(
            [(row["round"], _of(row, "privacy", view)) for row in record.rounds],
            key.label,
            key.color,
            dash=key.mark,
        )
        for view, key in VIEWS.items()
    ]
    clipped = [(row["round"], _of(row, "privacy", "clipped")) for row in record.rounds]
    shares = rounds_figure([curve(clipped, "clipped", INK)], "share", tickformat="~%")
    return nonempty(
        [
            Panel("epsilon", "ε so far", rounds_figure(spent, "ε", rangemode="tozero")),
            Panel("clipped", "Clients whose update was clipped", shares),
        ]
    )


def privacy_keys(record: Record) -> list[Key]:
    """Returns the legend of ``privacy_curves``, of what the run tells alone."""
    told = {view for row in record.rounds for view in row.get("privacy") or ()}
    return [key for view, key in VIEWS.items() if view in told]


def _client_lines(
    record: Record, value: Callable[[Row], float | None], *, with_mean: bool = True
) -> list[Trace]:
    """One thin line per client and, over several clients, their mean in ink."""
    lines = []
    by_round: dict[int, list[float]] = {}
    for client in record.clients:
        points = [(row["round"], value(row)) for row in record.trainings.get(client, [])]
        for round_number, y in points:
            if y is not None:
                by_round.setdefault(round_number, []).append(y)
        key = client_key(record, client)
        size = 4 if record.last_round <= 20 else 2
        lines.append(curve(points, client, key.color, dash=key.mark, width=1.25, size=size))
    if with_mean and len(record.clients) > 1:
        means = [(round_number, fmean(ys)) for round_number, ys in sorted(by_round.items())]
        lines.append(curve(means, "mean over clients", INK, width=2.5, size=0))
    return lines


def _objective_means(record: Record, field: str) -> list[Trace]:
    """One line per objective: the clients' mean of its entry in a field of their rows."""
    return [
        curve(_client_means(record, field, name), name, objective_color(record, name))
        for name in record.objectives
    ]


def _client_means(
    record: Record, field: str, name: str | None = None
) -> list[tuple[float, float | None]]:
    """Rounds with the clients' mean of a field, or of its entry `name`."""
    values: dict[int, list[float | None]] = {}
    for rows in record.trainings.values():
        for row in rows:
            value = row.get(field) if name is None else _of(row, field, name)
            values.setdefault(row["round"], []).append(value)
    return [(round_number, _mean(values[round_number])) for round_number in sorted(values)]


def _validation_scores(record: Record, name: str, color: str) -> list[Trace]:
    """The global model's mean score on the validation split, with its standard error."""
    rows = record.evaluations.get("validation", [])
    points = [(row["round"], score(row, "scores", name, "mean")) for row in rows]
    ses = [score(row, "scores", name, "se") for row in rows]
    return [curve(points, GLOBAL_MODEL, color, width=2.5, size=7, ses=ses)]


def _validation_figures(record: Record, key: str) -> list[Trace]:
    """Another figure of the global model, with its standard error if it has one."""
    rows = record.evaluations.get("validation", [])
    points = [(row["round"], row.get(key)) for row in rows]
    ses = [row.get(f"{key}_se") for row in rows]
    return [curve(points, GLOBAL_MODEL, INK, width=2.5, size=7, ses=ses)]


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


def _of(row: Row, field: str, name: str) -> float | None:
    return (row.get(field) or {}).get(name)


def _mean(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in values or () if value is not None]
    return fmean(known) if known else None


def _column_mean(row: Row, field: str, index: int) -> float | None:
    """Mean over a round's solves of entry `index` of a list per solve."""
    return _mean([entries[index] for entries in row.get(field) or () if len(entries) > index])


def _norm_ratio(row: Row) -> float | None:
    """Geometric mean of a round's norm ratios: first over second, or largest over smallest."""
    ratios = []
    for norms in row.get("gradient_norms") or ():
        if len(norms) < 2 or not all(norms):
            continue  # a zero gradient has no ratio
        ratio = norms[0] / norms[1] if len(norms) == 2 else max(norms) / min(norms)
        ratios.append(math.log(ratio))
    return math.exp(fmean(ratios)) if ratios else None


def _stage_seconds(record: Record, round_number: int, stage: str) -> float:
    """Seconds of a stage in a round, summed over the clients."""
    return sum(
        row.get("seconds", {}).get(stage) or 0
        for rows in record.trainings.values()
        for row in rows
        if row["round"] == round_number
    )
