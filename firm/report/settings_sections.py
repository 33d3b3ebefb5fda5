"""Sections of the page that compares settings; a section without logged quantities is empty."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import chain
from typing import Any, Literal

import numpy as np

from firm.base.quantities import LOG, QUANTITIES, Kind, Quantity, shown
from firm.fronts.measures import preference_correlation
from firm.report import formats
from firm.report.criteria import Criterion
from firm.report.drawing import (
    MUTED,
    Panel,
    Series,
    annotation,
    axis,
    figure,
    mean_and_error,
    nonempty,
    points_panel,
    scatter,
    series_panel,
    straight_line,
)
from firm.report.ledger import cost_section, ledger_table
from firm.report.page import Block, Samples, Section, prose
from firm.report.plane import Cloud, planes
from firm.report.samples import Sample, samples_of
from firm.report.settings_tables import NUM_TABLE_USERS, least_values, user_values
from firm.report.tables import (
    Setting,
    drawn_objectives,
    quantity_panel,
    reference_of,
    seeds_text,
    series_of,
)
from firm.run.differences import leaves

NUM_OWN_PANELS = 8
"""Up to this many objectives have one panel each."""
NUM_SAMPLES = 8
SMOOTHING = 24
"""Lines of more values are running averages, with a half-life of this part of them."""
RUN_KEYS = ("name", "out", "seed", "seeds", "resume", "tracking")
"""Top-level keys in which runs of the same method may differ."""
TRAINING: dict[str, Sequence[tuple[Kind, str]]] = {
    "weights": [("client", "weights"), ("round", "weights_spread")],
    "drift": [("round", "drift"), ("round", "stationarity"), ("client", "entropy")],
}
"""Quantities of sections, by kind and name; a program may not have registered all of them."""


# --- Criteria -------------------------------------------------------------------------------------


def curve_section(
    settings: Sequence[Setting], criterion: Criterion, *, half_life: float | None = None
) -> Section:
    """Returns a criterion over the rounds and over the uploads, and the KL.

    It has panels of the mean over the objectives, and of each objective or of the worst one; with a
    half-life, lines are running averages.
    """
    own, objectives = criterion.quantity, criterion.objectives
    entry = replace(own, name=criterion.curve)
    mean = "Mean over the objectives" if len(objectives) > 1 else own.title.capitalize()
    # suffixes with a dot, since an objective may be called "kl"
    views: dict[str, dict[str, Any]] = {".mean": {"title": mean}} if len(objectives) > 1 else {}
    if len(objectives) <= NUM_OWN_PANELS:
        views |= {f"-{name}": {"objective": name, "title": name} for name in objectives}
    else:
        views[".worst"] = {"title": "Worst objective of each round", "how": criterion.worst_how}
    views[".upload"] = {"title": f"{mean}, over uploaded data", "over": "megabytes"}
    panels = [
        quantity_panel(own.name + at, settings, entry, half_life=half_life, **view)
        for at, view in views.items()
    ]
    if kl := QUANTITIES.get(("client", "kl")):
        kl = replace(kl, name=f"{criterion.curve.removesuffix(own.name)}kl")
        panels.append(quantity_panel(f"{own.name}.kl", settings, kl, half_life=half_life))
    split = criterion.curve.rpartition("/")[0]
    is_training = not split and any(
        client for s in settings for n in objectives for client in s.lines(criterion.curve, n)
    )
    source = "Means over the clients during training" if is_training else "Global model"
    title, uploads = prose("curves", subject=f"{split.capitalize()} {own.title}".strip())
    sentences = [f"{source}.", own.help, seeds_text(settings), uploads]
    return Section(own.name, title, " ".join(filter(None, sentences)), nonempty(panels))


def objectives_section(settings: Sequence[Setting], criteria: Sequence[Criterion]) -> Section:
    """Returns the final values of three or more objectives; diverged settings are left out.

    Losses, whose scales differ, are divided by the largest of all settings.
    """
    panels = []
    for criterion in (criterion for criterion in criteria if len(criterion.objectives) > 2):
        means = {s.key: own for s in settings if (own := criterion.mean(s)) is not None}
        unit, scale = criterion.quantity.unit, np.ones(len(criterion.objectives))
        if criterion.sign < 0 and means:
            largest = np.max(list(means.values()), axis=0)
            unit, scale = f"{unit} / largest of all settings", np.where(largest > 0, largest, 1.0)
        places, none = np.arange(len(scale), dtype=float), np.zeros(len(scale))
        series = [Series(key, places, values / scale, none) for key, values in means.items()]
        names = {"x_title": "objective", "y_title": unit, "labels": criterion.objectives}
        if series:
            title = f"Final {criterion.quantity.title}"
            panels.append(
                points_panel(f"objectives-{criterion.quantity.name}", title, series, **names)
            )
    return Section("objectives", *prose("objectives"), panels)


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
        configs = [
            dict(leaves({key: value for key, value in s.method.items() if key not in RUN_KEYS}))
            for s in members
        ]
        # a key may be in the configuration of some members only
        keys = dict.fromkeys(chain.from_iterable(configs))
        changed = [key for key in keys if any(c.get(key) != configs[0].get(key) for c in configs)]
        if len(changed) == 1:
            values: list[Any] = [config.get(changed[0]) for config in configs]
            if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                own = {float(v): setting for v, setting in zip(values, members, strict=True)}
                swept.setdefault(changed[0], {})[family] = own
    return swept


def parameter_section(
    key: str, families: Mapping[str, Mapping[float, Setting]], criteria: Sequence[Criterion]
) -> Section:
    """Returns the final means over the objectives against a parameter.

    Each family is a line, in the colour of its first setting; a value with which a seed diverged
    has no point.
    """
    panels, legend, has_gap = [], {}, False
    for criterion in criteria:
        lines = []
        for family, settings in families.items():
            ends = {at: criterion.finals(s).mean(axis=1) for at, s in sorted(settings.items())}
            known = {at: own for at, own in ends.items() if len(own) and np.isfinite(own).all()}
            has_gap |= 0 < len(known) < len(ends)
            if not known:
                continue
            figures = [mean_and_error(own[:, None]) for own in known.values()]  # each [1], [1]
            first = replace(next(iter(settings.values())).key, label=family)
            lines.append(Series(first, np.array(list(known)), *np.concatenate(figures, axis=1)))
        # one value of the parameter is no line
        if len({x for line in lines for x in line.xs.tolist()}) < 2:
            continue
        entry, x_title = criterion.quantity, key.rpartition(".")[2].replace("_", " ")
        axes = {"x_title": x_title, "y_title": entry.unit, **entry.axis}
        title = f"Final {entry.title}, mean over the objectives"
        panels.append(points_panel(f"{key}-{entry.name}", title, lines, **axes))
        legend |= {line.key.label: line.key for line in lines}
    title, text = prose("parameter", key=key)
    text += f" {seeds_text([s for own in families.values() for s in own.values()])}"
    text += " Values with which a run diverged have no point." if has_gap else ""
    return Section(key, title, text, panels, list(legend.values()))


def preference_section(
    settings: Sequence[Setting],
    losses: Criterion,
    clouds_of: Callable[[Sequence[Setting], Criterion], Sequence[Cloud]],
) -> Section | None:
    """Returns the losses that preferences request, as rays, and the losses that runs reached.

    A preference r, positive, asks for r₁F₁ = r₂F₂ (Figure 4 of Askin et al., 2024). The region
    below the losses of training for one objective alone is grey, since no model is expected there.
    """
    asked, pairs = {}, []
    for setting in settings if len(losses.objectives) == 2 else ():
        strategy = setting.method.get("strategy") or {}
        # another strategy's preference weighs gradients
        preference = strategy.get("preference") if strategy.get("name") == "fedcmoo_pref" else None
        ends = losses.finals(setting)  # [S, 2]
        ends = ends[np.isfinite(ends).all(axis=1)]
        if isinstance(preference, list) and min(preference) > 0 and len(ends):
            asked[setting] = preference
            pairs += [(preference, row) for row in ends]
    if not asked:
        return None
    first, second = objectives = losses.objectives
    title, text = prose("losses", first=first, second=second)
    if limits := least_values(settings, losses):
        text += f" {prose('losses-limits')[1]}"
    correlation = preference_correlation(*zip(*pairs, strict=True))
    if correlation is not None:
        value = formats.correlation(correlation, len(pairs))
        text += f" {prose('losses-correlation', value=value)[1]}"
    (panel,) = planes("preferences", clouds_of(list(asked), losses), objectives, unit="loss")
    layout = panel.figure["layout"]
    ends = layout["xaxis"]["range"][1], layout["yaxis"]["range"][1]
    rays, notes = [], []
    for setting, preference in asked.items():
        slope = preference[0] / preference[1]
        x = min(ends[0], ends[1] / slope)
        wanted = replace(setting.key, label=f"{setting.name}, wanted", mark="dot")
        rays.append(scatter(wanted, [0, x], [0, x * slope], mode="lines", width=1.5))
        ratio = " : ".join(f"{share:g}" for share in preference)
        at = ("left", "middle") if x == ends[0] else ("center", "bottom")
        place = {"xanchor": at[0], "yanchor": at[1]}
        notes.append(annotation(x, x * slope, ratio, setting.key.color, **place))
    layout |= {"annotations": notes, "margin": layout["margin"] | {"r": 44}}
    for name in ("xaxis", "yaxis"):
        layout[name]["range"] = [0, layout[name]["range"][1]]
    if limits:
        grey = {"type": "rect", "x0": 0, "y0": 0, "line": {"width": 0}, "fillcolor": MUTED}
        grey |= {"opacity": 0.16, "layer": "below"}
        layout["shapes"] = [
            grey | {"x1": limits[0], "y1": ends[1]},
            grey | {"x0": limits[0], "x1": ends[0], "y1": limits[1]},
            straight_line(x=limits[0]),
            straight_line(y=limits[1]),
        ]
    panel = replace(
        panel, title="Final losses", figure=panel.figure | {"data": [*rays, *panel.figure["data"]]}
    )
    return Section("preferences", title, text, [panel], [setting.key for setting in asked])


def user_section(settings: Sequence[Setting], criterion: Criterion) -> Section | None:
    """Returns the users' final accuracies, a box for each setting.

    Includes only users measured with all seeds. Up to ten users are shown in the table instead.
    """
    boxes, num_users = [], 0
    for setting in settings:
        users = user_values(setting, criterion).dropna(axis="columns").to_numpy(dtype=float)
        if users.shape[1] > NUM_TABLE_USERS:
            num_users = num_users or users.shape[1]
            label, color = escape(setting.name), setting.key.color
            box = {"type": "box", "y": users.ravel().tolist(), "boxmean": True}
            box |= {"name": label, "legendgroup": label, "marker": {"color": color, "size": 4}}
            boxes.append(box | {"line": {"color": color, "width": 1.5}})
    if not boxes:
        return None
    made = figure(boxes, axis("setting"), axis("accuracy of a user"))
    panel = Panel("users", "Final accuracy by user", made)
    return Section("users", *prose("users", count=num_users), [panel])


# --- Over the rounds ------------------------------------------------------------------------------


def training_sections(
    settings: Sequence[Setting], objectives: Sequence[str], *, sampled: Sequence[Setting]
) -> dict[str, Callable[[], Block | None]]:
    """Returns the functions that draw traffic, samples, drift and all else that runs log, by name.

    Args:
        settings: Any settings; they need no common scale.
        objectives: The objectives of most of them.
        sampled: Settings whose samples are shown.
    """
    are_runs = all(setting.records for setting in settings)
    return {
        "ledger": lambda: ledger_table(settings) if are_runs else None,
        "samples": lambda: shared_samples(sampled),
        "drift": lambda: quantities_section(settings, objectives, "drift"),
        "further": lambda: quantities_section(settings, objectives, "further"),
        "cost": lambda: cost_section(settings),
    }


def quantities_of(section: str) -> list[Quantity]:
    """Returns the quantities of a section; "further" has all that no other section shows."""
    if section == "further":
        return [q for q in shown("further") if q.kind != "evaluation" and q.by != "pair"]
    found = [QUANTITIES[place] for place in TRAINING[section] if place in QUANTITIES]
    # a linear axis would show only the first orders of magnitude of the bound on stationarity
    return [replace(q, axis=LOG) if q.name == "stationarity" else q for q in found]


def quantities_section(
    settings: Sequence[Setting],
    objectives: Sequence[str],
    name: str,
    *,
    half_life: float | Literal["auto"] | None = "auto",
) -> Section | None:
    """Returns a section's quantities over the rounds, with their help texts.

    Weights are shown of 2 to 8 objectives. With "auto", long lines are smoothed as far as keeps
    their shape readable.
    """
    if name == "weights" and not 2 <= len(objectives) <= NUM_OWN_PANELS:
        return None
    quantities, panels, helps = quantities_of(name), [], []
    if half_life == "auto":
        half_life = _half_life(settings, [quantity.name for quantity in quantities])
    for quantity in quantities:
        entry = replace(quantity, reference=reference_of(quantity, objectives))
        title = entry.title if "{}" in entry.title else f"{entry.title}, {{}}"
        own = [
            quantity_panel(
                f"{entry.name}-{n}" if n else entry.name,
                settings,
                entry,
                n,
                title=title.format(n) if n else entry.title,
                half_life=half_life,
            )
            for n in (drawn_objectives(entry, objectives) if entry.by else [""])
        ]
        panels += nonempty(own)
        helps += [quantity.help] if nonempty(own) else []
    title, text = prose(f"settings-{name}")
    sentences = [text, *helps, _smoothing(half_life), seeds_text(settings)]
    return Section(name, title, " ".join(filter(None, sentences)), panels)


def progress_section(settings: Sequence[Setting], criterion: Criterion) -> Section:
    """Returns the loss reduction by a local training of each setting, from the same models.

    Each setting that measured "progress" has a panel: by setting and objective, the loss before
    minus the loss after a local training from the round's global model, averaged over the clients.
    """
    opening = criterion.beside("progress/")
    measured = {s: quantities for s in settings if (quantities := s.quantities(opening))}
    names = dict.fromkeys(chain.from_iterable(measured.values()))
    half_life = _half_life(settings, list(names))
    labels = [*(s.name for s in settings), *(n.removeprefix(opening) for n in names)]
    # a setting that has not run yet is trained from these models, too, and needs a colour
    keys = {label: Setting(label, at, ()).key for at, label in enumerate(dict.fromkeys(labels))}
    keys |= {setting.name: setting.key for setting in settings}
    panels, legend = [], {}
    for source, quantities in measured.items():
        lines = [
            series_of(
                source, quantity, half_life=half_life, key=keys[quantity.removeprefix(opening)]
            )
            for quantity in quantities
        ]
        lines = [line for line in lines if line]
        legend |= {line.key.label: line.key for line in lines}
        title, name = f"From the models of {source.name}", f"progress-{len(panels)}"
        unit = "loss reduction"
        panels.append(series_panel(name, title, lines, y_title=unit, rangemode="tozero"))
    title, text = prose("progress", smoothing=_smoothing(half_life))
    if later := [setting.name for setting in settings if panels and setting.name not in legend]:
        text += f" Not trained from these models, since added later: {', '.join(later)}."
    return Section("progress", title, text, panels, list(legend.values()))


def _half_life(settings: Sequence[Setting], quantities: Sequence[str]) -> float | None:
    """Returns the half-life of the running averages of quantities, in values; None for short."""
    count = max((s.num_rounds(name) for s in settings for name in quantities), default=0)
    return count / SMOOTHING if count > SMOOTHING else None


def _smoothing(half_life: float | None) -> str:
    return prose("smoothing", half_life=f"{half_life:.2g}")[1] if half_life else ""


# --- Samples --------------------------------------------------------------------------------------


def shared_samples(settings: Sequence[Setting]) -> Samples:
    """Returns the prompts that the first runs of all settings answered, with their replies.

    The first reply is the base model's, taken from the first setting's run.
    """
    by_setting = {
        setting: {
            sample.turns: sample
            for sample in samples_of(setting.records[0], by_preference=False)
            if len(sample.replies) > 1
        }
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
    has_scores = any(reply.scores for sample in samples for reply in sample.replies)
    text = f"Replies to the same prompts{', with the raw scores of each' if has_scores else ''}."
    return Samples(text, samples, ["base model", *names] if named else [])
