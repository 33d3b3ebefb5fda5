"""Sections of pages that compare settings: curves over the rounds, costs, and shared samples."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html import escape
from statistics import fmean
from typing import Any

from firm.report import formats
from firm.report.drawing import SURFACE, Panel, nonempty, series_panel, style_layout
from firm.report.ledger import FLOAT_BYTES, WOULD_BE, total_bytes, uploads_so_far
from firm.report.page import Block, Samples, Section, Table, drawn_block, left_out_note
from firm.report.record import Record
from firm.report.run_figures import stage_keys
from firm.report.samples import Sample, samples_of
from firm.report.tables import Series, Setting, mean_and_error, quantity_panel, seeds_text
from firm.run.quantities import QUANTITIES, Quantity

NUM_SAMPLES = 8
REWARD_UNIT = "mean reward in [0, 1]"


def is_validated(settings: Sequence[Setting]) -> bool:
    """Returns whether every setting was scored on validation prompts while it trained."""
    return all(len(s.records[0].evaluations.get("validation", [])) > 1 for s in settings)


def reward_quantity(settings: Sequence[Setting]) -> Quantity:
    """Returns the calibrated reward, on the validation prompts or in the clients' training."""
    name = "validation/rewards" if is_validated(settings) else "rewards"
    return Quantity(name, "{}", REWARD_UNIT, by="objective", axis={})


def reward_section(settings: Sequence[Setting], name: str) -> Section:
    """Rewards and KL over the rounds, of one scale."""
    validated = is_validated(settings)
    reward, kl = reward_quantity(settings), QUANTITIES["client", "kl"]
    panels = [
        quantity_panel(f"{name}-{objective}", settings, reward, objective)
        for objective in settings[0].objectives
    ]
    kl_name = "validation/kl" if validated else "kl"
    panels.append(quantity_panel(f"{name}-kl", settings, replace(kl, name=kl_name)))
    return Section(
        name,
        "Rewards over the rounds",
        (
            "Of the global model on the validation prompts"
            if validated
            else "Of the clients' replies while they train, means over the clients"
        )
        + f", mapped to [0, 1] by the frozen calibration. {seeds_text(settings)}",
        nonempty(panels),
    )


def weights_section(settings: Sequence[Setting], name: str = "weights") -> Section:
    """Returns the weights λ over the rounds and how far the clients' are apart, of one scale."""
    objectives = settings[0].objectives
    # two weights sum to one: the second is the first upside down
    shown = objectives[:1] if len(objectives) == 2 else objectives
    weights, spread = QUANTITIES["client", "weights"], QUANTITIES["round", "weights_spread"]
    panels = [
        quantity_panel(f"{name}{mark}-{objective}", settings, quantity, objective)
        for quantity, mark in (
            (weights, ""),
            (replace(spread, title="Spread of λ of {} between clients"), "-spread"),
        )
        for objective in shown
        if len(objectives) > 1
    ]
    return Section(
        name,
        "Weights of the objectives",
        "How much each objective's gradient counts in a step, mean over the clients and their "
        "solves, or the server's weight where it finds one for all. At the dashed line all count "
        "alike. The spread is the standard deviation between the clients of a round. "
        f"{seeds_text(settings)}",
        nonempty(panels),
    )


def training_blocks(settings: Sequence[Setting]) -> list[Block]:
    """Returns the sections on drift and everything else that is compared, and on the cost."""
    draws = {"drift": _drift_section, "further": _further_section, "cost": _cost_section}
    titles = {"drift": "Drift and stationarity", "cost": "Bytes and seconds"}
    return [
        drawn_block(titles.get(name, name.capitalize()), partial(draw, settings), name=name)
        for name, draw in draws.items()
    ]


def _drift_section(settings: Sequence[Setting]) -> Section:
    kinds: list[tuple[Any, str]] = [
        ("round", "drift"),
        ("round", "stationarity"),
        ("client", "entropy"),
    ]
    panels = [quantity_panel(f"drift-{key[1]}", settings, QUANTITIES[key]) for key in kinds]
    return Section(
        "drift",
        "Drift and stationarity",
        f"{QUANTITIES['round', 'drift'].help} The bound on Pareto stationarity is the most that "
        "the squared norm of the shortest common gradient can be, on the batches that a round "
        "draws first, where clients or server saw the Gram matrix; where the server reads "
        "compressed gradients it is an estimate. Entropy is the clients' mean while they train.",
        nonempty(panels),
    )


def _further_section(settings: Sequence[Setting]) -> Section:
    """Whatever else is registered, to be compared."""
    quantities = [
        q for q in QUANTITIES.values() if q.section == "further" and q.kind != "evaluation"
    ]
    panels = [
        quantity_panel(f"further-{q.name}{'-' if name else ''}{name}", settings, q, name or None)
        for q in quantities
        for name in (settings[0].objectives if q.by == "objective" else [""])
        if not q.by or q.by == "objective"
    ]
    text = " ".join(q.help for q in quantities if q.help)
    return Section("further", "Further quantities", text, nonempty(panels))


def _cost_section(settings: Sequence[Setting]) -> Section:
    """The bytes sent so far, and the seconds of a round by stage."""
    panels = []
    for key, title in (("up", "Clients to server"), ("down", "Server to clients")):
        series = []
        for setting in settings:
            sent = setting.bytes_so_far(f"bytes_{key}").dropna() / 1e6
            if not sent.empty:
                xs = sent.index.to_numpy(dtype=float)
                series.append(Series(setting.key, xs, *mean_and_error(sent.to_numpy().T)))
        panel = series_panel(
            f"cost-megabytes_{key}",
            title,
            series,
            y_title="MB so far",
            num_bands=len(series),
            rangemode="tozero",
        )
        panels.append(panel)
    return Section(
        "cost",
        "Bytes and seconds",
        "What the federation sent so far, as serialised, in MB of 10⁶ bytes. The bars are seconds "
        "per stage of a round, summed over its clients, means over rounds and seeds; they are "
        "those of machines that may have done other work as well.",
        nonempty([*panels, _seconds_panel(settings)]),
        stage_keys(settings),
    )


def _seconds_panel(settings: Sequence[Setting]) -> Panel:
    """Stacked bars, one for each setting."""
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [escape(setting.name)],
            "x": [stage_seconds(setting).get(key.label, 0.0)],
            "name": escape(key.label),
            "legendgroup": escape(setting.name),
            "showlegend": setting is settings[0],
            "marker": {"color": key.color, "line": {"color": SURFACE, "width": 1}},
            "hovertemplate": f"{escape(setting.name)}<br>{escape(key.label)}: %{{x:.3g}} s"
            "<extra></extra>",
        }
        for setting in settings
        for key in stage_keys(settings)
    ]
    layout = style_layout(
        120 + 26 * len(settings),
        {"title": {"text": "seconds per round, all clients", "standoff": 8}, "rangemode": "tozero"},
        {"type": "category", "autorange": "reversed"},
    )
    layout |= {"barmode": "stack", "bargap": 0.25}
    return Panel("cost-seconds", "Seconds per stage", {"data": traces, "layout": layout})


def stage_seconds(setting: Setting) -> dict[str, float]:
    """Returns seconds per round by stage, summed over clients, averaged over rounds and seeds."""
    seconds = setting.values("seconds")
    totals = seconds[seconds["client"] != ""].pivot_table(
        "value", "seed", "objective", aggfunc="sum"
    )
    rounds = [max(1, record.last_round) for record in setting.records]
    by_seed = totals.reindex(range(len(rounds))).fillna(0.0).div(rounds, axis=0)
    return {str(stage): float(mean) for stage, mean in by_seed.mean().items()}


def ledger_table(settings: Sequence[Setting]) -> Table:
    """Returns what each setting sent, and what others would have sent in its place."""
    rows = []
    for setting in settings:
        records = setting.records
        num_rounds = max(1, round(fmean(record.last_round for record in records)))
        up, down = (
            fmean(total_bytes(r, key) for r in records) for key in ("bytes_up", "bytes_down")
        )
        others = []
        for name in WOULD_BE:
            ends = [uploads_so_far(record, name)[-1:] for record in records]
            mean = fmean(end[0][1] for end in ends) if all(ends) else None
            others.append(formats.MISSING if mean is None else formats.size(mean))
        sizes = [formats.size(value) for value in (up / num_rounds, up, down / num_rounds, down)]
        rows.append([setting.name, *sizes, *others])
    headings = ["setting", "up per round", "up in total", "down per round", "down in total"]
    return Table(
        "Communication",
        "Bytes as serialised, all clients together, means over the seeds. The last columns are "
        "what FedCMOO-A and FSMGDA would have uploaded with as many clients in as many rounds, by "
        f"the sizes of what they send: FedCMOO-A the adapter and an uncompressed Jacobian of "
        f"M × d numbers of {FLOAT_BYTES} bytes, FSMGDA M adapters, each without the names and "
        "metrics that come on top of what was measured.",
        [*headings, *(f"up with {name}" for name in WOULD_BE)],
        rows,
    )


def shared_samples(settings: Sequence[Setting]) -> Samples:
    """Returns prompts that all settings' first runs answered, with their replies, and who replied.

    The base model's reply, which is that of the first setting's run, comes first.
    """
    by_setting = {
        setting: {
            sample.turns: sample
            for sample in samples_of(setting.records[0])
            if len(sample.replies) > 1
        }
        for setting in settings
    }
    named = {setting: own for setting, own in by_setting.items() if own}
    first = next(iter(named.values()), {})
    prompts = [turns for turns in first if all(turns in own for own in named.values())]
    samples = [
        Sample(turns, [first[turns].replies[0], *(own[turns].replies[1] for own in named.values())])
        for turns in prompts[:NUM_SAMPLES]
    ]
    names = [f"{setting.name}, seed {setting.records[0].seed}" for setting in named]
    text = "Replies to the same prompts, with the raw scores of each."
    return Samples(text, samples, ["base model", *names] if named else [])


def left_out_notes(records: Sequence[Record]) -> list[str]:
    """Returns a sentence for each run on what was not valid in its files; none where all was."""
    return [
        left_out_note(f"the log of {record.name}", record.left_out)
        for record in records
        if record.left_out
    ]
