"""Sections of the classic page for what only some runs measure: users, preferences, parameters.

Each function returns None where the rows have nothing to show; `comparison_page` skips that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from firm.quantities import QUANTITIES, Quantity
from firm.report import formats
from firm.report.classic_figures import (
    Outcome,
    points_panel,
    preference_plane,
    ratios_panel,
    user_histograms,
)
from firm.report.classic_page import FIELDS, quantity
from firm.report.drawing import NUM_BANDS, Series, series_panel
from firm.report.page import Section
from firm.report.tables import Setting, mean_and_error, quantity_panel, seeds_text, series_of

NUM_TABLE_USERS = 10
"""Up to so many users fit the table; of more, the spread is shown."""
NUM_WEIGHT_LINES = 8
"""Up to so many objectives have lines that one can tell apart."""
STATIONARITY = replace(
    QUANTITIES["round", "stationarity"],
    title="Nearness to Pareto stationarity",
    help="Smallest squared norm of a weighted mean of the objectives' gradients. Where it is 0, no "
    "step lowers the losses of all objectives at once. It comes from the gradients as each "
    "algorithm's server estimates them, noise of the batches included: compare how the lines "
    "change rather than how high they lie. Gradients that are small because learning has not begun "
    "look the same.",
    axis={"type": "log", "tickformat": "~g", "nticks": 6},
)
NUM_WINDOWS = 12
"""Noisy lines are running means over this part of their values: a shape, and not a thicket."""


# --- Final values ---------------------------------------------------------------------------------


def users_section(settings: Sequence[Setting]) -> Section | None:
    """Returns how the users' final accuracies are spread, a histogram for each setting.

    Only users that all seeds of a setting name count. Ten users or fewer have room in the table.
    """
    users = {setting.key: _user_accuracies(setting) for setting in settings}
    users = {key: own for key, own in users.items() if own.shape[1] > NUM_TABLE_USERS}
    if not users:
        return None
    text = (
        "Final accuracy of the global model on each user's own samples, of "
        f"{next(iter(users.values())).shape[1]} users, those of all seeds together. The dashed "
        "line marks the mean; SD is the standard deviation over the users, in percentage points. "
        "Of two settings with the same mean, the narrower one treats its users more alike."
    )
    return Section("users", "Accuracy, user by user", text, user_histograms("users", users))


def _user_accuracies(setting: Setting) -> np.ndarray:
    """Returns the last accuracies of each seed and user, shape [S, C]."""
    finals = setting.finals("users", setting.objectives_with("users"))  # [S', C]
    if len(finals) < len(setting.runs):
        return np.empty((len(setting.runs), 0))
    return finals[:, np.isfinite(finals).all(axis=0)]


def preferences_section(
    settings: Sequence[Setting],
    preferences: Mapping[str, tuple[float, float]],
    *,
    limits: tuple[float, float] | None = None,
    correlation: float | None = None,
) -> Section | None:
    """Returns which ratio of two losses the preferences asked for, and where the losses ended.

    None unless the losses have two objectives, and a setting that did not diverge a preference.

    Args:
        settings: One without a preference, and seeds that diverged, are left out.
        preferences: r, positive, by setting: it asks for r₁F₁ = r₂F₂ (Figure 4 of FedCMOO), with
            the objectives in the order of the rows' "losses".
        limits: Least loss of each objective trained alone.
        correlation: Rank correlation of the wanted and reached ratios, in [-1, 1].
    """
    objectives = settings[0].objectives_with("losses")
    if len(objectives) != 2:
        return None
    outcomes = []
    for setting in settings:
        if setting.name in preferences:
            losses = setting.finals("losses", objectives)  # [S, 2]
            losses = losses[np.isfinite(losses).all(axis=1)]
            if len(losses):
                outcomes.append(Outcome(setting.key, preferences[setting.name], losses))
    if not outcomes:
        return None
    first, second = objectives
    text = (
        f"A preference a : b asks that a times the loss of {first} equal b times that of {second}. "
        "All such losses lie on one ray, dotted in the first figure; the point of the same colour "
        "is the mean of the runs that asked for it, with one standard error if they are several. "
        "In the second figure a point is one run; those on the dashed line reached the ratio that "
        "they wanted."
    )
    if limits is not None:
        text += (
            " The grey region lies below the least losses of training for one objective alone, "
            "where no model is expected."
        )
    if correlation is not None:
        num_runs = sum(len(outcome.losses) for outcome in outcomes)
        text += (
            f" The rank correlation of wanted and reached ratios is "
            f"{formats.correlation(correlation, num_runs)}, with an approximate 95 % interval; it "
            "is 1 if they come in the same order."
        )
    panels = [
        preference_plane(
            "preferences", "Final losses", outcomes, objectives=objectives, limits=limits
        ),
        ratios_panel("ratios", "Ratio of the final losses", outcomes, objectives=objectives),
    ]
    legend = [outcome.key for outcome in outcomes]
    return Section("preferences", "Losses wanted and reached", text, panels, legend)


def parameter_section(
    families: Mapping[str, Mapping[float, Setting]],
    *,
    title: str,
    x_title: str,
    name: str = "parameter",
    is_log_loss: bool = False,
) -> Section | None:
    """Returns the final means over the objectives against a parameter (Figure 2 of FedCMOO).

    The settings by the parameter's value are a line for each family, in the colour of its first
    setting; a value with which a seed diverged has no point. None without two values.
    """
    panels, legend, has_gap = [], {}, False
    for field in FIELDS:
        series = [_against_parameter(family, own, field) for family, own in families.items()]
        lines = [line for line in series if line]
        if len({x for line in lines for x in line.xs.tolist()}) < 2:
            continue
        entry = quantity(field, is_log=is_log_loss)
        title_of = f"Final {entry.title}, mean over the objectives"
        panels.append(
            points_panel(
                f"{name}-{entry.title}",
                title_of,
                lines,
                x_title=x_title,
                y_title=entry.unit,
                **entry.axis,
            )
        )
        legend |= {line.key.label: line.key for line in lines}
        has_gap = has_gap or any(len(line.xs) < len(families[line.key.label]) for line in lines)
    if not panels:
        return None
    text = (
        "Where the runs with each value ended; the values stand side by side, however far apart "
        f"they are. {seeds_text([s for own in families.values() for s in own.values()])}"
        f"{' Values with which a run diverged have no point.' if has_gap else ''}"
    )
    return Section(name, title, text, panels, list(legend.values()))


def _against_parameter(family: str, settings: Mapping[float, Setting], field: str) -> Series | None:
    """Returns the final means over the objectives by rising value."""
    ends = {}
    for value, setting in sorted(settings.items()):
        if objectives := setting.objectives_with(field):
            finals = setting.finals(field, objectives).mean(axis=1)  # [S]
            if np.isfinite(finals).all():
                ends[float(value)] = mean_and_error(finals[:, None])
    if not ends:
        return None
    means, ses = np.concatenate(list(ends.values()), axis=1)
    key = replace(next(iter(settings.values())).key, label=family)
    return Series(key, np.array(list(ends)), means, ses)


# --- Over the rounds ------------------------------------------------------------------------------


def weights_section(settings: Sequence[Setting]) -> Section | None:
    """Returns the objectives' weights over the rounds, a panel for each setting that has some.

    With one objective or with more than eight there is no section.
    """
    first = settings[0]
    objectives = first.objectives_with("losses") or first.objectives_with("accuracies")
    if not 2 <= len(objectives) <= NUM_WEIGHT_LINES:
        return None
    legend = [Setting(name, place, ()).key for place, name in enumerate(objectives)]
    window = _window(settings, "weights")
    lines_by_setting = {}
    for setting in settings:
        lines = [series_of(setting, "weights", k.label, window=window, key=k) for k in legend]
        lines_by_setting[setting.name] = [line for line in lines if line]
    everything = [line for lines in lines_by_setting.values() for line in lines]
    if not everything:
        return None
    top = max((line.means + line.ses).max() for line in everything)
    span = [-0.02 * top, 1.05 * top]
    panels = [
        series_panel(f"weights-{place}", name, lines, y_title="weight λ", range=span)
        for place, (name, lines) in enumerate(lines_by_setting.items())
        if lines
    ]
    text = (
        "How much each objective counts in a round's step: weights λ that sum to 1 and that the "
        f"algorithm chooses anew every round. A colour is an objective here.{_smoothing(window)}"
    )
    return Section("weights", "Weights of the objectives", text, panels, legend)


def further_section(settings: Sequence[Setting], entry: Quantity) -> Section | None:
    """Returns a registered quantity over the rounds, a line for each setting that has it."""
    measured = [setting for setting in settings if setting.objectives_with(entry.name)]
    if not measured:
        return None
    window = _window(measured, entry.name)
    panel = quantity_panel(entry.name, measured, entry, window=window, num_bands=NUM_BANDS)
    legend = [setting.key for setting in measured]
    return Section(entry.name, entry.title, f"{entry.help}{_smoothing(window)}", [panel], legend)


def progress_section(settings: Sequence[Setting]) -> Section | None:
    """Returns how far a local training of each setting lowers the losses, from the same models.

    Figure 11 of FedCMOO (Askin et al.), Appendix E.4. Each setting that measured "progress" is a
    panel: by setting and objective, the loss before a local training from the round's global model
    less that after it, averaged over the clients.
    """
    names = {setting.name: setting.quantities("progress/") for setting in settings}
    measured = [name for own in names.values() for name in own]
    if not measured:
        return None
    window = max(_window(settings, name) for name in measured)
    labels = dict.fromkeys([*names, *(name.removeprefix("progress/") for name in measured)])
    keys = {label: Setting(label, index, ()).key for index, label in enumerate(labels)}
    keys |= {setting.name: setting.key for setting in settings}
    panels, legend = [], {}
    for place, source in enumerate(settings):
        lines = []
        for name in names[source.name]:
            key = keys[name.removeprefix("progress/")]
            if line := series_of(source, name, window=window, key=key):
                legend[key.label] = key
                lines.append(line)
        if lines:
            title = f"From the models of {source.name}"
            y_axis: Any = {"y_title": "fall of the loss", "rangemode": "tozero"}
            panels.append(series_panel(f"progress-{place}", title, lines, **y_axis))
    text = (
        "By how much one round's local training lowers the losses on the client's own samples, "
        "mean over clients and objectives. All settings start from the same global models, those "
        f"of the run that the figure names.{_smoothing(window)}"
    )
    return Section("progress", "Progress of a local training", text, panels, list(legend.values()))


def _window(settings: Sequence[Setting], name: str) -> int:
    """Returns over how many measured rounds the lines of a quantity are averaged."""
    counts = [setting.values(name).query("seed == 0")["round"].nunique() for setting in settings]
    return max(1, max(counts) // NUM_WINDOWS)


def _smoothing(window: int) -> str:
    if window == 1:
        return ""
    return f" Each point is the mean of the last {window} values measured."
