"""Sections of the page that compares settings; a section without logged quantities is empty."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from firm.base.quantities import QUANTITIES, Kind, Quantity, shown
from firm.fronts.measures import preference_correlation
from firm.report import formats
from firm.report.criteria import Criterion
from firm.report.drawing import Panel, Series, axis, bars, figure, nonempty, series_panel
from firm.report.outcome_figures import (
    PreferenceOutcome,
    points_panel,
    preference_plane,
    radar_panel,
    ratios_panel,
    user_histograms,
)
from firm.report.page import Block, Samples, Section, drawn_block, prose
from firm.report.run_figures import stage_keys
from firm.report.samples import Sample, samples_of
from firm.report.settings_tables import NUM_TABLE_USERS, least_values, user_values
from firm.report.tables import (
    Setting,
    drawn_objectives,
    mean_and_error,
    quantity_panel,
    reference_of,
    seeds_text,
    series_of,
)
from firm.run.differences import leaves

NUM_OWN_PANELS = 8
"""Up to this many objectives have one panel each."""
NUM_SAMPLES = 8
NUM_WINDOWS = 12
"""Noisy lines are running means over 1/12 of their values, which keeps their shape readable."""
RUN_KEYS = ("name", "out", "seed", "seeds", "resume", "tracking")
"""Top-level keys in which runs of the same method may differ."""


# --- Criteria -------------------------------------------------------------------------------------


def curve_section(settings: Sequence[Setting], criterion: Criterion, name: str) -> Section:
    """Returns a criterion and the KL over the rounds: mean, and each objective or the worst one."""
    entry, objectives = replace(criterion.quantity, name=criterion.curve), criterion.objectives
    panels = []
    # suffixes with a dot, since an objective may be called "kl"
    if len(objectives) > 1:
        title = "Mean over the objectives"
        panels.append(quantity_panel(f"{name}.mean", settings, entry, title=title))
    if len(objectives) <= NUM_OWN_PANELS:
        panels += [
            quantity_panel(f"{name}-{own}", settings, entry, own, title=own) for own in objectives
        ]
    else:
        title, how = "Worst objective of each round", criterion.worst_how
        panels.append(quantity_panel(f"{name}.worst", settings, entry, title=title, how=how))
    for kl in registered(("client", "kl")):
        own = replace(kl, name=criterion.beside_curve("kl"))
        panels.append(quantity_panel(f"{name}.kl", settings, own))
    split = criterion.curve.rpartition("/")[0]
    is_training = not split and any(
        client for s in settings for n in objectives for client in s.lines(criterion.curve, n)
    )
    source = "Means over the clients during training" if is_training else "Global model"
    return Section(
        name,
        f"{split.capitalize()} {entry.title} over the rounds".strip(),
        " ".join(filter(None, [f"{source}.", entry.help, seeds_text(settings)])),
        nonempty(panels),
    )


def upload_section(
    settings: Sequence[Setting], criteria: Sequence[Criterion], name: str
) -> Section:
    """Returns the means of all criteria over the uploaded megabytes."""
    panels = []
    for criterion in criteria:
        entry = replace(criterion.quantity, name=criterion.curve)
        title = f"{'Mean ' if len(criterion.objectives) > 1 else ''}{entry.title}".capitalize()
        panel_name = f"{name}-{criterion.quantity.name}"
        panels.append(quantity_panel(panel_name, settings, entry, title=title, over="megabytes"))
    return Section(
        name,
        *prose("upload"),
        nonempty(panels),
    )


def radar_section(settings: Sequence[Setting], criteria: Sequence[Criterion], name: str) -> Section:
    """Returns the final values of three or more objectives; diverged settings are left out."""
    panels = []
    for criterion in (criterion for criterion in criteria if len(criterion.objectives) > 2):
        means = {s.key: own for s in settings if (own := criterion.mean(s)) is not None}
        if not means:
            continue
        word = criterion.quantity.title
        if criterion.is_higher_better:
            # one tenth below the lowest value: small differences between good settings show
            center = max(float(np.floor(10 * np.min(list(means.values())))) - 1, 0) / 10
            heading = f"Final {word}, from {center:.0%} at the centre"
            span, ticks = (center, 1.0), {"tickformat": "~%"}
        else:
            largest = np.max(list(means.values()), axis=0)
            scale = np.where(largest > 0, largest, 1.0)
            means = {key: values / scale for key, values in means.items()}
            heading = f"Final {word}, relative to the largest of all settings"
            span, ticks = (0.0, 1.0), {}
        radii = {key: values.tolist() for key, values in means.items()}
        panel_name = f"{name}-{criterion.quantity.name}"
        panels.append(
            radar_panel(panel_name, heading, radii, criterion.objectives, span=span, **ticks)
        )
    return Section(
        name,
        *prose("radar"),
        panels,
    )


# --- Configurations -------------------------------------------------------------------------------


def swept_parameters(settings: Sequence[Setting]) -> dict[str, dict[str, dict[float, Setting]]]:
    """Returns the settings by parameter, family and value, for families that vary one number.

    The settings of a family have the same name up to a comma.
    """
    families: dict[str, list[Setting]] = {}
    for setting in settings:
        families.setdefault(setting.name.partition(",")[0], []).append(setting)
    swept: dict[str, dict[str, dict[float, Setting]]] = {}
    for family, members in families.items():
        configs = [_method_leaves(setting) for setting in members]
        # a key may be in the configuration of some members only
        keys = dict.fromkeys(chain.from_iterable(configs))
        changed = [key for key in keys if any(c.get(key) != configs[0].get(key) for c in configs)]
        if len(changed) == 1:
            values: list[Any] = [config.get(changed[0]) for config in configs]
            if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                own = {float(v): setting for v, setting in zip(values, members, strict=True)}
                swept.setdefault(changed[0], {})[family] = own
    return swept


def _method_leaves(setting: Setting) -> dict[str, Any]:
    """Returns the values of a method's configuration by dotted key."""
    return dict(leaves({k: v for k, v in setting.method.items() if k not in RUN_KEYS}))


def parameter_section(
    families: Mapping[str, Mapping[float, Setting]],
    criteria: Sequence[Criterion],
    name: str,
    *,
    key: str,
) -> Section:
    """Returns the final means over the objectives against a parameter.

    Each family is a line, in the colour of its first setting; a value with which a seed diverged
    has no point.
    """
    panels, legend, has_gap = [], {}, False
    for criterion in criteria:
        lines = [_against_parameter(family, own, criterion) for family, own in families.items()]
        # one value of the parameter is no line
        if len({x for line in lines for x in line.xs.tolist()}) < 2:
            continue
        lines = [line for line in lines if len(line.xs)]
        entry = criterion.quantity
        title, x_title = f"Final {entry.title}, mean over the objectives", key.rpartition(".")[2]
        axes = {"x_title": x_title.replace("_", " "), "y_title": entry.unit, **entry.axis}
        panels.append(points_panel(f"{name}-{entry.name}", title, lines, **axes))
        legend |= {line.key.label: line.key for line in lines}
        has_gap |= any(len(line.xs) < len(families[line.key.label]) for line in lines)
    text = (
        "Final values at each value of the parameter; the values are evenly spaced, not to scale. "
        f"{seeds_text([s for own in families.values() for s in own.values()])}"
        f"{' Values with which a run diverged have no point.' if has_gap else ''}"
    )
    return Section(name, f"The setting {key}", text, panels, list(legend.values()))


def _against_parameter(
    family: str, settings: Mapping[float, Setting], criterion: Criterion
) -> Series:
    """Returns the final means over the objectives by rising value, without diverged runs."""
    ends = {value: criterion.finals(setting).mean(axis=1) for value, setting in settings.items()}
    known = [value for value in sorted(ends) if len(ends[value]) and np.isfinite(ends[value]).all()]
    figures = [mean_and_error(ends[value][:, None]) for value in known]  # each [1], [1]
    means, ses = np.concatenate(figures, axis=1) if figures else np.empty((2, 0))
    key = replace(next(iter(settings.values())).key, label=family)
    return Series(key, np.array(known), means, ses)


def preference_section(settings: Sequence[Setting], losses: Criterion, name: str) -> Section:
    """Returns the ratios of two losses, as requested by preferences and as reached by runs.

    A preference r, positive, asks for r₁F₁ = r₂F₂.
    """
    outcomes = []
    for setting in settings if len(losses.objectives) == 2 else ():
        preference = (setting.method.get("strategy") or {}).get("preference")
        ends = losses.finals(setting)  # [S, 2]
        ends = ends[np.isfinite(ends).all(axis=1)]
        if isinstance(preference, list) and min(preference) > 0 and len(ends):
            outcomes.append(PreferenceOutcome(setting.key, tuple(preference), ends))
    if not outcomes:
        return Section(name, "", "", [])
    first, second = objectives = losses.objectives
    title, text = prose("losses", first=first, second=second)
    limits = least_values(settings, losses)
    if limits:
        text += (
            " The grey region is below the losses of training for one objective alone; no model is "
            "expected there."
        )
    pairs = [(outcome.preference, row) for outcome in outcomes for row in outcome.losses]
    correlation = preference_correlation(*zip(*pairs, strict=True))
    if correlation is not None:
        text += (
            " The rank correlation of requested and reached ratios is "
            f"{formats.correlation(correlation, len(pairs))}, with an approximate 95 % interval; "
            "1 means the same order."
        )
    box = (limits[0], limits[1]) if limits else None
    panels = [
        preference_plane(name, "Final losses", outcomes, objectives=objectives, limits=box),
        ratios_panel("ratios", "Ratio of the final losses", outcomes, objectives=objectives),
    ]
    legend = [outcome.key for outcome in outcomes]
    return Section(name, title, text, panels, legend)


def user_section(settings: Sequence[Setting], criterion: Criterion, name: str) -> Section:
    """Returns histograms of the users' final accuracies, one for each setting.

    Includes only users measured with all seeds. Up to ten users are shown in the table instead.
    """
    users = {
        s.key: user_values(s, criterion).dropna(axis="columns").to_numpy(dtype=float)
        for s in settings
    }
    users = {key: own for key, own in users.items() if own.shape[1] > NUM_TABLE_USERS}
    if not users:
        return Section(name, "", "", [])
    title, text = prose("users", count=next(iter(users.values())).shape[1])
    return Section(name, title, text, user_histograms(name, users))


# --- Over the rounds ------------------------------------------------------------------------------


def quantities_section(
    settings: Sequence[Setting],
    objectives: Sequence[str],
    quantities: Sequence[Quantity],
    name: str,
    *,
    title: str,
    text: str = "",
) -> Section:
    """Returns registered quantities over the rounds, with their help texts."""
    panels, helps = [], [text]
    window = max((_window(settings, quantity.name) for quantity in quantities), default=1)
    for quantity in quantities:
        place = name if quantity.by and quantity.name == name else f"{name}-{quantity.name}"
        entry = replace(quantity, reference=reference_of(quantity, objectives))
        own = [
            quantity_panel(f"{place}-{n}" if n else place, settings, entry, n, window=window)
            for n in (drawn_objectives(entry, objectives) if entry.by else [""])
        ]
        panels += nonempty(own)
        helps += [quantity.help] if nonempty(own) else []
    sentences = [*helps, _smoothing(window), seeds_text(settings)]
    return Section(name, title, " ".join(filter(None, sentences)), panels)


def weights_section(settings: Sequence[Setting], objectives: Sequence[str], name: str) -> Section:
    """Returns the weights λ over the rounds and their spread between clients."""
    if not 2 <= len(objectives) <= NUM_OWN_PANELS:
        return Section(name, "", "", [])
    spread = QUANTITIES["round", "weights_spread"]
    spread = replace(spread, title="Spread of λ of {} between clients", help="")
    quantities = [replace(QUANTITIES["client", "weights"], help=""), spread]
    title, text = prose("weights")
    return quantities_section(settings, objectives, quantities, name, title=title, text=text)


def training_blocks(settings: Sequence[Setting], objectives: Sequence[str]) -> list[Block]:
    """Returns the sections on drift, on everything else that was logged, and on the cost."""
    drift = registered(("round", "drift"), ("round", "stationarity"), ("client", "entropy"))
    # the bound falls by orders of magnitude, of which a linear axis would show only the first
    log = {"type": "log", "tickformat": "~g", "nticks": 6}
    drift = [replace(q, axis=log) if q.name == "stationarity" else q for q in drift]
    own = partial(quantities_section, settings, objectives)
    further = further_quantities()
    return [
        drawn_block("drift", lambda: own(drift, "drift", title="Drift and stationarity")),
        drawn_block("further", lambda: own(further, "further", title="Further quantities")),
        drawn_block("cost", lambda: cost_section(settings, "cost")),
    ]


def registered(*places: tuple[Kind, str]) -> list[Quantity]:
    """Returns the quantities of these kinds and names that a part of the program registered."""
    return [QUANTITIES[place] for place in places if place in QUANTITIES]


def further_quantities() -> list[Quantity]:
    """Returns the registered quantities that no other section shows."""
    return [q for q in shown("further") if q.kind != "evaluation" and q.by != "pair"]


def progress_section(settings: Sequence[Setting], criterion: Criterion, name: str) -> Section:
    """Returns the loss reduction by a local training of each setting, from the same models.

    Each setting that measured "progress" has a panel: by setting and objective, the loss before
    minus the loss after a local training from the round's global model, averaged over the clients.
    """
    opening = criterion.beside("progress/")
    measured = {s: quantities for s in settings if (quantities := s.quantities(opening))}
    names = dict.fromkeys(chain.from_iterable(measured.values()))
    window = max((_window(settings, quantity) for quantity in names), default=1)
    labels = [*(s.name for s in settings), *(n.removeprefix(opening) for n in names)]
    # a setting that has not run yet is trained from these models, too, and needs a colour
    keys = {label: Setting(label, at, ()).key for at, label in enumerate(dict.fromkeys(labels))}
    keys |= {setting.name: setting.key for setting in settings}
    panels, legend = [], {}
    for source, quantities in measured.items():
        lines = [
            series_of(source, quantity, window=window, key=keys[quantity.removeprefix(opening)])
            for quantity in quantities
        ]
        lines = [line for line in lines if line]
        legend |= {line.key.label: line.key for line in lines}
        title, panel_name = f"From the models of {source.name}", f"{name}-{len(panels)}"
        axes: Any = {"y_title": "loss reduction", "rangemode": "tozero"}
        panels.append(series_panel(panel_name, title, lines, **axes))
    title, text = prose("progress", smoothing=_smoothing(window))
    return Section(name, title, text, panels, list(legend.values()))


def _window(settings: Sequence[Setting], quantity: str) -> int:
    """Returns the number of measured rounds that each point of a quantity's lines averages."""
    counts = [s.values(quantity).query("seed == 0")["round"].nunique() for s in settings]
    return max(1, max(counts) // NUM_WINDOWS)


def _smoothing(window: int) -> str:
    return f"Each point is the mean of the last {window} values measured." if window > 1 else ""


# --- Costs and samples ----------------------------------------------------------------------------


def cost_section(settings: Sequence[Setting], name: str) -> Section:
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
            series_panel(f"{name}-megabytes_{key}", way, series, num_bands=len(series), **axes)
        )
    text = "Serialised traffic of the federation so far, in MB of 10⁶ bytes."
    if stages := stage_keys(settings):
        panels.append(_seconds_panel(settings, f"{name}-seconds"))
        text += (
            " Bars are seconds per stage of a round, summed over its clients and averaged over "
            "rounds and seeds; other work on the machines may have affected them."
        )
    return Section(name, "Bytes and seconds", text, nonempty(panels), stages)


def _seconds_panel(settings: Sequence[Setting], name: str) -> Panel:
    """Returns stacked bars, one for each setting."""
    traces = []
    for setting in settings:
        seconds, label = stage_seconds(setting), escape(setting.name)
        for key in stage_keys(settings):
            hover = f"{label}<br>{escape(key.label)}: %{{x:.3g}} s"
            options = {"legendgroup": label, "showlegend": setting is settings[0]}
            traces.append(
                bars(key, [seconds.get(key.label, 0.0)], [label], hover, orientation="h", **options)
            )
    made = figure(
        traces,
        axis("seconds", rangemode="tozero"),
        {"type": "category", "autorange": "reversed"},
        height=120 + 26 * len(settings),
        barmode="stack",
        bargap=0.25,
    )
    return Panel(name, "Seconds per round, by stage", made)


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


def shared_samples(settings: Sequence[Setting]) -> Samples:
    """Returns the prompts that the first runs of all settings answered, with their replies.

    The first reply is the base model's, taken from the first setting's run.
    """
    by_setting = {
        setting: {s.turns: s for s in samples_of(setting.records[0]) if len(s.replies) > 1}
        for setting in settings
        if setting.records
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
