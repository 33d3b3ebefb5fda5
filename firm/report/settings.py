"""What runs of several settings and seeds say, setting by setting: rows, sections and samples."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, stdev
from typing import Any

import numpy as np

from firm.fronts import differing_figure
from firm.report import formats
from firm.report.comparison import Measure
from firm.report.comparison_page import Sample
from firm.report.drawing import SURFACE, Key, Panel, nonempty, style_layout
from firm.report.figures import NUM_STAGE_COLORS, STAGES
from firm.report.fmoo_figures import AlgorithmRuns, Value, series_of, series_panel
from firm.report.ledger import FLOAT_BYTES, WOULD_BE, total_bytes, uploads_so_far
from firm.report.page import Section
from firm.report.record import Record
from firm.report.samples import Reply, sample_pairs
from firm.report.study_page import Table
from firm.run.directory import Row
from firm.run.errors import UserError

NUM_SAMPLES = 8


@dataclass(frozen=True)
class Setting:
    """Runs that differ by their seed alone."""

    name: str
    index: int
    """Place among colours and symbols, from 0."""
    records: Sequence[Record]

    @property
    def key(self) -> Key:
        """Its entry in a legend."""
        return AlgorithmRuns(self.name, self.index, ()).key

    @property
    def objectives(self) -> tuple[str, ...]:
        """The runs' objectives."""
        return self.records[0].objectives

    def runs(self) -> AlgorithmRuns:
        """Returns what the figures over the rounds show of the runs."""
        rows = [round_rows(record) for record in self.records]
        return AlgorithmRuns(self.name, self.index, rows)

    def finals(self, value: Callable[[Record], float | None]) -> list[float]:
        """Returns a figure of each run that has it."""
        return [y for record in self.records if (y := value(record)) is not None]


def settings_of(runs: Mapping[str, Sequence[Record]], *, first: int = 0) -> list[Setting]:
    """Returns the settings that have runs, in order.

    Args:
        runs: Runs by setting; those without metrics are left out.
        first: Place of the first setting among colours and symbols.

    Raises:
        UserError: No setting has a run with metrics, or the runs of one do not have the same
            objectives and calibration.
    """
    settings = [
        Setting(name, index, known)
        for index, (name, records) in enumerate(runs.items(), start=first)
        if (known := [record for record in records if record.header])
    ]
    if not settings:
        raise UserError(f"none of {len(runs)} settings has a run with metrics; run one first.")
    for setting in settings:
        start = setting.records[0]
        for record in setting.records[1:]:
            if not is_same_scale(start, record):
                raise UserError(
                    f"rewards of {setting.name!r} mean different things: {start.name} and "
                    f"{record.name} have other objectives or calibrations; run its seeds with one "
                    "evaluation.calibration_seed."
                )
    return settings


def scales(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Returns the settings in groups whose rewards mean the same."""
    groups: list[list[Setting]] = []
    for setting in settings:
        for group in groups:
            if is_same_scale(group[0].records[0], setting.records[0]):
                group.append(setting)
                break
        else:
            groups.append([setting])
    return groups


def is_same_scale(first: Record, second: Record) -> bool:
    """Returns whether two runs have the same objectives, and a reward means the same in both."""
    if first.objectives != second.objectives:
        return False
    maps = [record.header.get("calibration") or {} for record in (first, second)]
    return not any(
        differing_figure(maps[0].get(name, {}), maps[1].get(name, {})) for name in first.objectives
    )


# --- Figures of one run ---------------------------------------------------------------------------


def final_row(record: Record) -> Row | None:
    """Returns the evaluation of the final model on the test prompts, None until there is one."""
    rows = record.evaluations.get("test", [])
    trained = [row for row in rows if row["round"] > 0 or record.num_rounds == 0]
    return trained[-1] if trained else None


def final_reward(objective: str) -> Callable[[Record], float | None]:
    """Returns what takes a run's final reward on the test prompts, calibrated."""
    return lambda record: _entry(final_row(record), "normalized", objective)


def final_score(name: str) -> Callable[[Record], float | None]:
    """Returns what takes another mean score of a run's final replies."""
    return lambda record: _entry(final_row(record), "scores", name)


def final_figure(key: str) -> Callable[[Record], float | None]:
    """Returns what takes another figure of a run's final evaluation, such as kl."""
    return lambda record: (final_row(record) or {}).get(key)


def _entry(row: Row | None, field: str, name: str) -> float | None:
    return (((row or {}).get(field) or {}).get(name) or {}).get("mean")


def round_rows(record: Record) -> list[Row]:
    """Returns one row per round of what the figures show: the validation's, clients' and round's.

    "reward" and "kl" are the global model's on the validation prompts, "trained_reward" and
    "trained_kl" those of the clients' training replies, means over the clients; rewards are
    calibrated. Weights are the clients' mean, and the server's where it has some.
    """
    rows: dict[int, Row] = defaultdict(dict)
    for row in record.evaluations.get("validation", []):
        rewards = row.get("normalized") or {}
        rows[row["round"]] |= {
            "reward": {name: figures["mean"] for name, figures in rewards.items()},
            "kl": row.get("kl"),
        }
    by_round: dict[int, list[Row]] = defaultdict(list)
    for trainings in record.trainings.values():
        for row in trainings:
            by_round[row["round"]].append(row)
    up = down = 0
    for row in record.rounds:
        at = row["round"]
        up, down = up + (row.get("bytes_up") or 0), down + (row.get("bytes_down") or 0)
        clients = by_round[at]
        own = [np.mean(each["weights"], axis=0) for each in clients if each.get("weights")]
        mean = np.mean(own, axis=0).tolist() if own else []
        rows[at] |= {
            "trained_reward": {
                name: _mean([(each.get("reward") or {}).get(name) for each in clients])
                for name in record.objectives
            },
            "trained_kl": _mean([each.get("kl") for each in clients]),
            "weights": row.get("weights") or dict(zip(record.objectives, mean, strict=False)),
            "spread": row.get("weights_spread") or {},
            "drift": row.get("drift"),
            "stationarity": row.get("stationarity"),
            "entropy": _mean([each.get("entropy") for each in clients]),
            "megabytes": (up + down) / 1e6,
            "megabytes_up": up / 1e6,
            "megabytes_down": down / 1e6,
        }
    return [{"round": at, **rows[at]} for at in sorted(rows)]


def is_validated(settings: Sequence[Setting]) -> bool:
    """Returns whether every setting was scored on validation prompts while it trained."""
    return all(len(s.records[0].evaluations.get("validation", [])) > 1 for s in settings)


def reward_in(row: Row, objective: str, *, validated: bool) -> float | None:
    """Returns an objective's reward of a round, on validation prompts or while training."""
    return (row.get("reward" if validated else "trained_reward") or {}).get(objective)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def stage_seconds(record: Record) -> dict[str, float]:
    """Returns seconds per round by stage, summed over the clients, averaged over the rounds."""
    totals: dict[str, float] = defaultdict(float)
    for trainings in record.trainings.values():
        for row in trainings:
            for stage, seconds in (row.get("seconds") or {}).items():
                totals[stage] += seconds or 0.0
    return {stage: seconds / max(1, record.last_round) for stage, seconds in totals.items()}


# --- Sections of all settings ---------------------------------------------------------------------


def curve_panel(
    name: str, title: str, runs: Sequence[AlgorithmRuns], value: Value, y_title: str, **y_axis: Any
) -> Panel:
    """Returns a quantity over the rounds, mean over the seeds with a band of its error."""
    series = [found for one in runs if (found := series_of(one, value))]
    return series_panel(name, title, series, y_title=y_title, num_bands=len(series), **y_axis)


def seeds_text(settings: Sequence[Setting]) -> str:
    """Returns a sentence on what lines and bands are."""
    counts = sorted({len(setting.records) for setting in settings})
    if counts[-1] == 1:
        return "One run each: nothing here tells of the noise between seeds."
    seeds = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
    return f"Lines are means over {seeds} seeds, bands one standard error to both sides."


def reward_section(settings: Sequence[Setting], name: str = "rewards") -> Section:
    """Returns rewards and KL over the rounds, of one scale.

    They are the global model's on the validation prompts, or those of the clients' training
    replies where a setting has no validation.
    """
    validated = is_validated(settings)
    runs = [setting.runs() for setting in settings]
    panels = [
        curve_panel(
            f"{name}-{objective}",
            objective,
            runs,
            lambda row, key=objective: reward_in(row, key, validated=validated),
            "mean reward in [0, 1]",
        )
        for objective in settings[0].objectives
    ]
    panels.append(
        curve_panel(
            f"{name}-kl",
            "KL from the base model",
            runs,
            lambda row: row.get("kl" if validated else "trained_kl"),
            "nats per reply",
            rangemode="tozero",
        )
    )
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
        [],
    )


def weights_section(settings: Sequence[Setting], name: str = "weights") -> Section:
    """Returns the weights λ over the rounds and how far the clients' are apart, of one scale."""
    objectives = settings[0].objectives
    # Two weights sum to one: the second is the first upside down.
    shown = objectives[:1] if len(objectives) == 2 else objectives
    runs = [setting.runs() for setting in settings] if len(objectives) > 1 else []
    options: dict[str, Any] = {"reference": 1 / len(objectives), "range": [-0.02, 1.02]}
    panels = [
        curve_panel(
            f"{name}-{objective}",
            f"λ of {objective}",
            runs,
            lambda row, key=objective: (row.get("weights") or {}).get(key),
            "mean weight λ",
            **options,
        )
        for objective in shown
    ]
    panels += [
        curve_panel(
            f"{name}-spread-{objective}",
            f"Spread of λ of {objective} between clients",
            runs,
            lambda row, key=objective: (row.get("spread") or {}).get(key),
            "SD of λ over clients",
            rangemode="tozero",
        )
        for objective in shown
    ]
    return Section(
        name,
        "Weights of the objectives",
        "How much each objective's gradient counts in a step, mean over the clients and their "
        "solves, or the server's weight where it finds one for all. At the dashed line all count "
        "alike. The spread is the standard deviation between the clients of a round. "
        f"{seeds_text(settings)}",
        nonempty(panels),
        [],
    )


def drift_section(settings: Sequence[Setting], name: str = "drift") -> Section:
    """Returns drift, the bound on Pareto stationarity and entropy over the rounds."""
    runs = [setting.runs() for setting in settings]
    quantities = [
        ("drift", "Client drift", "spread / server step"),
        ("stationarity", "Bound on Pareto stationarity", "squared norm"),
        ("entropy", "Entropy of the policy", "nats per token"),
    ]
    panels = [
        curve_panel(
            f"{name}-{key}",
            title,
            runs,
            lambda row, k=key: row.get(k),
            unit,
            rangemode="tozero",
        )
        for key, title, unit in quantities
    ]
    return Section(
        name,
        "Drift and stationarity",
        "Drift is the clients' distance from their mean, measured in steps of the server. The "
        "bound on Pareto stationarity is the most that the squared norm of the shortest common "
        "gradient can be, on the batches that a round draws first, where clients or server saw "
        "the Gram matrix; where the server reads compressed gradients it is an estimate. Entropy "
        "is the clients' mean while they train.",
        nonempty(panels),
        [],
    )


def cost_section(settings: Sequence[Setting], name: str = "cost") -> Section:
    """Returns the bytes sent so far, and the seconds of a round by stage."""
    runs = [setting.runs() for setting in settings]
    panels = [
        curve_panel(
            f"{name}-{key}",
            title,
            runs,
            lambda row, k=key: row.get(k),
            "MB so far",
            rangemode="tozero",
        )
        for key, title in (
            ("megabytes_up", "Clients to server"),
            ("megabytes_down", "Server to clients"),
        )
    ]
    seconds, legend = _seconds_panel(settings, f"{name}-seconds")
    return Section(
        name,
        "Bytes and seconds",
        "What the federation sent so far, as serialised, in MB of 10⁶ bytes. The bars are seconds "
        "per stage of a round, summed over its clients, means over rounds and seeds; they are "
        "those of machines that may have done other work as well.",
        nonempty([*panels, seconds]),
        legend,
    )


def _seconds_panel(settings: Sequence[Setting], name: str) -> tuple[Panel, list[Key]]:
    """Stacked bars, one for each setting."""
    by_setting = {s.name: [stage_seconds(record) for record in s.records] for s in settings}
    seen = {stage for runs in by_setting.values() for run in runs for stage in run}
    stages = [stage for stage in STAGES if stage in seen] + sorted(seen - set(STAGES))
    keys = [
        Key(stage, f"var(--stage-{index % NUM_STAGE_COLORS})") for index, stage in enumerate(stages)
    ]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [escape(setting.name)],
            "x": [fmean(run.get(key.label, 0.0) for run in by_setting[setting.name])],
            "name": escape(key.label),
            "legendgroup": escape(setting.name),
            "showlegend": setting is settings[0],
            "marker": {"color": key.color, "line": {"color": SURFACE, "width": 1}},
            "hovertemplate": f"{escape(setting.name)}<br>{escape(key.label)}: %{{x:.3g}} s"
            "<extra></extra>",
        }
        for setting in settings
        for key in keys
    ]
    layout = style_layout(
        120 + 26 * len(settings),
        {"title": {"text": "seconds per round, all clients", "standoff": 8}, "rangemode": "tozero"},
        {"type": "category", "autorange": "reversed"},
    )
    layout |= {"barmode": "stack", "bargap": 0.25}
    return Panel(name, "Seconds per stage", {"data": traces, "layout": layout}), keys


# --- Tables ---------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> str:
    """Returns mean ± standard deviation over the seeds; of one seed the value alone.

    >>> spread([0.25, 0.75]).replace(formats.NBSP, " "), spread([0.5]), spread([])
    ('0.50 ± 0.35', '0.500', '–')
    """
    if not values:
        return formats.MISSING
    return formats.measure(Measure(fmean(values), stdev(values) if len(values) > 1 else None))


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
    return Table(
        "Communication",
        "Bytes as serialised, all clients together, means over the seeds. The last columns are "
        "what FedCMOO-A and FSMGDA would have uploaded with as many clients in as many rounds, by "
        f"the sizes of what they send: FedCMOO-A the adapter and an uncompressed Jacobian of "
        f"M × d numbers of {FLOAT_BYTES} bytes, FSMGDA M adapters, each without the names and "
        "metrics that come on top of what was measured.",
        [
            "setting",
            "up per round",
            "up in total",
            "down per round",
            "down in total",
            *(f"up with {name}" for name in WOULD_BE),
        ],
        rows,
    )


# --- Samples --------------------------------------------------------------------------------------


def shared_samples(settings: Sequence[Setting]) -> tuple[list[Sample], list[str]]:
    """Returns prompts that all settings' first runs answered, with their replies, and who replied.

    The base model's reply, which is that of the first setting's run, comes first.
    """
    pairs = [
        {pair.turns: pair for pair in sample_pairs(setting.records[0]) if pair.aligned}
        for setting in settings
    ]
    named = [(setting, found) for setting, found in zip(settings, pairs, strict=True) if found]
    if not named:
        return [], []
    prompts = [turns for turns in named[0][1] if all(turns in found for _, found in named)]
    samples = []
    for turns in prompts[:NUM_SAMPLES]:
        replies: list[Reply] = [named[0][1][turns].base]
        replies += [reply for _, found in named if (reply := found[turns].aligned)]
        samples.append(Sample(turns, replies))
    names = [f"{setting.name}, seed {setting.records[0].seed}" for setting, _ in named]
    return samples, ["base model", *names]
