"""Sections of pages that compare settings: curves over the rounds, costs, and shared samples."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html import escape
from statistics import fmean
from typing import Any

from firm.quantities import QUANTITIES, Quantity, shown
from firm.report import formats
from firm.report.drawing import Panel, Series, axis, bars, figure, nonempty, series_panel
from firm.report.ledger import FLOAT_BYTES, WOULD_BE, total_bytes, uploads_so_far
from firm.report.page import Block, Samples, Section, Table, drawn_block
from firm.report.run_figures import stage_keys
from firm.report.samples import Sample, samples_of
from firm.report.tables import Setting, drawn_objectives, mean_and_error, quantity_panel, seeds_text

NUM_SAMPLES = 8


def is_validated(settings: Sequence[Setting]) -> bool:
    """Returns whether every setting was scored on validation prompts while it trained."""
    return all(len(s.records[0].evaluations.get("validation", [])) > 1 for s in settings)


def reward_quantity(settings: Sequence[Setting]) -> Quantity:
    """Returns the calibrated reward, on the validation prompts or in the clients' training."""
    name = "validation/rewards" if is_validated(settings) else "rewards"
    return Quantity(name, "{}", "mean reward in [0, 1]", by="objective", axis={})


def further_quantities() -> list[Quantity]:
    """Returns whatever else is registered to be compared."""
    return [
        quantity
        for quantity in shown("further")
        if quantity.kind != "evaluation" and quantity.by != "pair"
    ]


def objective_panels(name: str, settings: Sequence[Setting], quantity: Quantity) -> list[Panel]:
    """Returns the figures of a quantity, a line for each setting: one, or one by objective."""
    if not quantity.by:
        return [quantity_panel(name, settings, quantity)]
    return [
        quantity_panel(f"{name}-{objective}", settings, quantity, objective)
        for objective in drawn_objectives(quantity, settings[0].objectives)
    ]


def reward_section(settings: Sequence[Setting], name: str) -> Section:
    """Returns rewards and KL over the rounds, of one scale."""
    validated = is_validated(settings)
    kl = QUANTITIES["client", "kl"]
    kl = replace(kl, name="validation/kl") if validated else kl
    panels = [
        *objective_panels(name, settings, reward_quantity(settings)),
        quantity_panel(f"{name}-kl", settings, kl),
    ]
    which = (
        "Of the global model on the validation prompts"
        if validated
        else "Of the clients' replies while they train, means over the clients"
    )
    text = f"{which}, mapped to [0, 1] by the frozen calibration. {seeds_text(settings)}"
    return Section(name, "Rewards over the rounds", text, nonempty(panels))


def weights_section(settings: Sequence[Setting], name: str = "weights") -> Section:
    """Returns the weights λ over the rounds and how far the clients' are apart, of one scale."""
    spread = QUANTITIES["round", "weights_spread"]
    spread = replace(spread, title="Spread of λ of {} between clients")
    panels = []
    if len(settings[0].objectives) > 1:
        panels += objective_panels(name, settings, QUANTITIES["client", "weights"])
        panels += objective_panels(f"{name}-spread", settings, spread)
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
    return [drawn_block(name, partial(draw, settings)) for name, draw in draws.items()]


def _drift_section(settings: Sequence[Setting]) -> Section:
    quantities = [
        QUANTITIES["round", "drift"],
        QUANTITIES["round", "stationarity"],
        QUANTITIES["client", "entropy"],
    ]
    text = (
        f"{quantities[0].help} The bound on Pareto stationarity is the most that "
        "the squared norm of the shortest common gradient can be, on the batches that a round "
        "draws first, where clients or server saw the Gram matrix; where the server reads "
        "compressed gradients it is an estimate. Entropy is the clients' mean while they train."
    )
    panels = [
        panel for q in quantities for panel in objective_panels(f"drift-{q.name}", settings, q)
    ]
    return Section("drift", "Drift and stationarity", text, nonempty(panels))


def _further_section(settings: Sequence[Setting]) -> Section:
    quantities = further_quantities()
    panels = [
        panel for q in quantities for panel in objective_panels(f"further-{q.name}", settings, q)
    ]
    text = " ".join(q.help for q in quantities if q.help)
    return Section("further", "Further quantities", text, nonempty(panels))


def _cost_section(settings: Sequence[Setting]) -> Section:
    """Returns the bytes sent so far, and the seconds of a round by stage."""
    panels = []
    for key, way in (("up", "Clients to server"), ("down", "Server to clients")):
        series = []
        for setting in settings:
            sent = setting.bytes_so_far(f"bytes_{key}").dropna() / 1e6
            if not sent.empty:
                xs = sent.index.to_numpy(dtype=float)
                series.append(Series(setting.key, xs, *mean_and_error(sent.to_numpy().T)))
        axes: Any = {"y_title": "MB so far", "rangemode": "tozero"}
        panels.append(
            series_panel(f"cost-megabytes_{key}", way, series, num_bands=len(series), **axes)
        )
    text = (
        "What the federation sent so far, as serialised, in MB of 10⁶ bytes. The bars are seconds "
        "per stage of a round, summed over its clients, means over rounds and seeds; they are "
        "those of machines that may have done other work as well."
    )
    panels = nonempty([*panels, _seconds_panel(settings)])
    return Section("cost", "Bytes and seconds", text, panels, stage_keys(settings))


def _seconds_panel(settings: Sequence[Setting]) -> Panel:
    """Returns stacked bars, one for each setting."""
    traces = []
    for setting in settings:
        seconds, name = stage_seconds(setting), escape(setting.name)
        for key in stage_keys(settings):
            hover = f"{name}<br>{escape(key.label)}: %{{x:.3g}} s"
            options = {"legendgroup": name, "showlegend": setting is settings[0]}
            traces.append(
                bars(key, [seconds.get(key.label, 0.0)], [name], hover, orientation="h", **options)
            )
    made = figure(
        traces,
        axis("seconds", rangemode="tozero"),
        {"type": "category", "autorange": "reversed"},
        height=120 + 26 * len(settings),
        barmode="stack",
        bargap=0.25,
    )
    return Panel("cost-seconds", "Seconds per round, by stage", made)


def stage_seconds(setting: Setting) -> dict[str, float]:
    """Returns seconds per round by stage, summed over clients, averaged over rounds and seeds."""
    seconds = {}
    for stage in (key.label for key in stage_keys([setting])):
        by_seed = []
        for seed, record in enumerate(setting.records):
            lines = setting.lines("seconds", stage, seed=seed).values()
            total = sum(value for points in lines for value in points.values())
            by_seed.append(total / max(1, record.last_round))
        seconds[stage] = fmean(by_seed)
    return seconds


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
        setting: {s.turns: s for s in samples_of(setting.records[0]) if len(s.replies) > 1}
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
