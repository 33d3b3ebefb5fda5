"""Bytes and seconds of runs, and the bytes that other algorithms would have sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from statistics import fmean

from firm.base.quantities import Quantity
from firm.base.sizes import FLOAT_BYTES
from firm.report import formats
from firm.report.drawing import (
    SURFACE,
    LegendEntry,
    Panel,
    Series,
    axis,
    figure,
    nonempty,
    series_panel,
)
from firm.report.page import Section, Table, prose
from firm.report.record import Record
from firm.report.tables import Setting, quantity_panel

STAGES = (
    *("rollout", "reward", "values", "advantages", "forward", "critic", "backward"),
    *("reduce", "gram", "solve", "step"),
)
"""Stages of a local step in the order in which they are stacked; others follow."""
NUM_STAGE_COLORS = 12
WAYS = {"up": "Clients to server", "down": "Server to clients"}
ELAPSED = Quantity("seconds", "Elapsed time of a round", "seconds", kind="round")


@dataclass(frozen=True)
class Rival:
    """Upload size of an algorithm."""

    upload: Callable[[int, int, int], int]
    """Bytes of parameters and gradients that a client uploads per round, as a function of the
    number of objectives M, the number of trainable parameters d, and the adapter's bytes. Excludes
    names, shapes and metrics, some kilobytes that are the same for every algorithm."""
    text: str
    """Description of the upload, to follow "would have uploaded"."""


RIVALS: dict[str, Rival] = {
    "FedCMOO-A": Rival(  # one-way FedCMOO without a compressor, on adapters
        lambda num_objectives, num_trainable, adapter_bytes: (
            adapter_bytes + FLOAT_BYTES * num_objectives * num_trainable
        ),
        f"the adapter and an uncompressed Jacobian of M × d numbers of {FLOAT_BYTES} bytes",
    ),
    "FSMGDA": Rival(
        lambda num_objectives, num_trainable, adapter_bytes: num_objectives * adapter_bytes,
        "one adapter for each objective",
    ),
}
"""Algorithms that reports compare with a run by upload size, by their names in reports."""


def uploads_so_far(record: Record, rival: str) -> list[tuple[int, int]]:
    """Returns the bytes that a rival would have uploaded up to each round, with the round.

    Counts only clients whose updates arrived. Empty if the run does not log its sizes.
    """
    header = record.header
    if not {"num_trainable", "adapter_bytes"} <= header.keys():
        return []
    sizes = header["num_trainable"], header["adapter_bytes"]
    each = RIVALS[rival].upload(len(record.objectives), *sizes)
    totals = accumulate(each * len(row.get("clients") or ()) for row in record.rounds)
    return [(row["round"], total) for row, total in zip(record.rounds, totals, strict=True)]


def total_bytes(record: Record, key: str) -> int:
    """Returns the bytes measured in a whole run, in the direction bytes_up or bytes_down."""
    return sum(row.get(key) or 0 for row in record.rounds)


def ledger_table(settings: Sequence[Setting]) -> Table:
    """Returns the bytes sent by each setting, and the bytes that rivals would have uploaded."""
    columns: dict[str, list[str]] = {"setting": [setting.name for setting in settings]}
    for way in WAYS:
        totals = [fmean(total_bytes(r, f"bytes_{way}") for r in s.records) for s in settings]
        rounds = [max(1, fmean(r.last_round for r in s.records)) for s in settings]
        means = [total / num_rounds for total, num_rounds in zip(totals, rounds, strict=True)]
        columns[f"{way} per round"] = [formats.size(mean) for mean in means]
        columns[f"{way} in total"] = [formats.size(total) for total in totals]
    title, text = prose("ledger")
    for name, rival in RIVALS.items():
        ends = [[uploads_so_far(r, name)[-1:] for r in s.records] for s in settings]
        known = [[at[0][1] for at in own] if all(own) else [] for own in ends]
        if any(known) and any(len(setting.objectives) > 1 for setting in settings):
            cells = [formats.size(fmean(own)) if own else formats.MISSING for own in known]
            columns[f"up with {name}"] = cells
            text += f" {name} would have uploaded {rival.text}."
    if len(columns) > 5:
        text += f" {prose('ledger-rivals')[1]}"
    return Table.of(title, text, columns)


def cost_section(settings: Sequence[Setting]) -> Section:
    """Returns the bytes sent so far, the seconds of a round, and their stages."""
    panels = []
    for way, title in WAYS.items():
        series = []
        for setting in settings:
            sent = setting.bytes_so_far(f"bytes_{way}").dropna() / 1e6
            if not sent.empty:
                series.append(Series.of(setting.key, sent.index, sent.to_numpy().T))
        name, unit = f"megabytes_{way}", "MB so far"
        panels.append(series_panel(name, title, series, y_title=unit, rangemode="tozero"))
    panels.append(quantity_panel("seconds", settings, ELAPSED, ""))
    stages = stage_keys(settings)
    panels += [_stages_panel(settings, stages)] if stages else []
    return Section("cost", *prose("cost"), nonempty(panels), stages)


def _stages_panel(settings: Sequence[Setting], stages: Sequence[LegendEntry]) -> Panel:
    """Returns stacked bars, one for each setting."""
    seconds = {setting: stage_seconds(setting) for setting in settings}
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [seconds[setting].get(key.label, 0.0)],
            "y": [escape(setting.name)],
            "name": escape(key.label),
            "legendgroup": escape(setting.name),
            "showlegend": setting is settings[0],
            "marker": {"color": key.color, "line": {"color": SURFACE, "width": 1}},
            "hovertemplate": "%{y}<br>%{fullData.name}: %{x:.3g} s<extra></extra>",
        }
        for setting in settings
        for key in stages
    ]
    made = figure(
        traces,
        axis("seconds", rangemode="tozero"),
        {"type": "category", "autorange": "reversed"},
        height=120 + 26 * len(settings),
        barmode="stack",
        bargap=0.25,
    )
    return Panel("stages", "Seconds per round, by stage", made)


def stage_keys(settings: Sequence[Setting]) -> list[LegendEntry]:
    """Returns the stages that clients timed, with their colours, in stacking order."""
    seen = {stage for s in settings for stage in s.objectives_with("seconds") if stage}
    stages = [stage for stage in STAGES if stage in seen] + sorted(seen - set(STAGES))
    return [
        LegendEntry(stage, f"var(--stage-{place % NUM_STAGE_COLORS})")
        for place, stage in enumerate(stages)
    ]


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
