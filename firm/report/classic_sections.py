"""Sections of the classic page for what only some runs measure: users, preferences, parameters.

Each function returns None where the rows have nothing to show; `comparison_page` skips that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from firm.report.classic_figures import (
    Outcome,
    Users,
    points_panel,
    preference_plane,
    ratios_panel,
    user_histograms,
)
from firm.report.classic_page import FIELDS, quantity
from firm.report.drawing import NUM_BANDS, Key, series_panel
from firm.report.page import Section
from firm.report.tables import (
    Series,
    Setting,
    mean_and_error,
    quantity_panel,
    seeds_text,
    series_of,
)
from firm.run.quantities import QUANTITIES, Quantity

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

    Args:
        settings: Their quantity "users" has accuracies in [0, 1] by user; the last of each seed
            count, of the users that all seeds of a setting name.

    Returns:
        None with ten users or fewer, for whom the table has room.
    """
    finals = [Users(setting.key, _user_accuracies(setting)) for setting in settings]
    users = [own for own in finals if own.accuracies.shape[1] > NUM_TABLE_USERS]
    if not users:
        return None
    text = (
        "Final accuracy of the global model on each user's own samples, of "
        f"{users[0].accuracies.shape[1]} users, those of all seeds together. The dashed line "
        "marks the mean; SD is the standard deviation over the users, in percentage points. "
        "Of two settings with the same mean, the narrower one treats its users more alike."
    )
    return Section("users", "Accuracy, user by user", text, user_histograms("users", users))


def _user_accuracies(setting: Setting) -> np.ndarray:
    """The last accuracies of each seed and user, shape [S, C]."""
    names = list(dict.fromkeys(setting.values("users")["objective"]))
    finals = setting.finals("users", names)  # [S', C]
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

    Args:
        settings: One without a preference, and seeds that diverged, are left out.
        preferences: r, positive, by setting: it asks for r₁F₁ = r₂F₂ (Figure 4 of FedCMOO), with
            the objectives in the order of the rows' "losses".
        limits: Least loss of each objective trained alone.
        correlation: Rank correlation of the wanted and reached ratios, in [-1, 1].

    Returns:
        None unless the losses have two objectives, and a setting that did not diverge a preference.

    Raises:
        ValueError: On a preference that is not positive.
    """
    objectives = settings[0].objectives_with("losses")
    if len(objectives) != 2:
        return None
    first, second = objectives
    outcomes = []
    for setting in settings:
        if setting.name in preferences:
            losses = setting.finals("losses", objectives)  # [S, 2]
            losses = losses[np.isfinite(losses).all(axis=1)]
            if len(losses):
                outcomes.append(Outcome(setting.key, preferences[setting.name], losses))
    if not outcomes:
        return None
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
        text += (
            f" The rank correlation of wanted and reached ratios is {correlation:.2f}; it is 1 if "
            "they come in the same order."
        )
    both = (first, second)
    panels = [
        preference_plane("preferences", "Final losses", outcomes, objectives=both, limits=limits),
        ratios_panel("ratios", "Ratio of the final losses", outcomes, objectives=both),
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

    Args:
        families: Settings by the parameter's value, of each line. A line has the colour of its
            first setting; a value with which a seed diverged has no point.
        title: Heading.
        x_title: The parameter.
        name: Of the section, unique on its page.
        is_log_loss: Whether the axis of the losses is logarithmic.

    Returns:
        None without two values.
    """
    panels, legend, has_gap = [], {}, False
    for field in FIELDS:
        series = [_against_parameter(family, own, field) for family, own in families.items()]
        lines = [line for line in series if line]
        if len({x for line in lines for x in line.xs.tolist()}) < 2:
            continue
        entry = quantity(field, is_log=is_log_loss)
        panels.append(
            points_panel(
                f"{name}-{entry.title}",
                f"Final {entry.title}, mean over the objectives",
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
    """The final means over the objectives by rising value."""
    values, ends = [], []
    for value, setting in sorted(settings.items()):
        if objectives := setting.objectives_with(field):
            finals = setting.finals(field, objectives).mean(axis=1)  # [S]
            if np.isfinite(finals).all():
                values.append(float(value))
                ends.append(mean_and_error(finals[:, None]))
    if not ends:
        return None
    means, ses = np.concatenate(ends, axis=1)
    key = replace(next(iter(settings.values())).key, label=family)
    return Series(key, np.array(values), means, ses)


# --- Over the rounds ------------------------------------------------------------------------------


def weights_section(settings: Sequence[Setting]) -> Section | None:
    """Returns the objectives' weights over the rounds, a panel for each setting that has some.

    Args:
        settings: Their quantity "weights" is in [0, 1] by objective; weights by client are left
            out.

    Returns:
        None with one objective, with more than eight, or where no setting weighs objectives.
    """
    first = settings[0]
    objectives = first.objectives_with("losses") or first.objectives_with("accuracies")
    if not 2 <= len(objectives) <= NUM_WEIGHT_LINES:
        return None
    legend = [Setting(name, place, ()).key for place, name in enumerate(objectives)]
    window = _window(settings, "weights")
    lines_by_place: dict[int, list[Series]] = {}
    for place, setting in enumerate(settings):
        for key in legend:
            if line := series_of(setting, "weights", key.label, window=window):
                lines_by_place.setdefault(place, []).append(replace(line, key=key))
    if not lines_by_place:
        return None
    top = max((line.means + line.ses).max() for lines in lines_by_place.values() for line in lines)
    span = [-0.02 * top, 1.05 * top]
    panels = [
        series_panel(
            f"weights-{place}", settings[place].name, lines, y_title="weight λ", range=span
        )
        for place, lines in lines_by_place.items()
    ]
    text = (
        "How much each objective counts in a round's step: weights λ that sum to 1 and that the "
        f"algorithm chooses anew every round. A colour is an objective here.{_smoothing(window)}"
    )
    return Section("weights", "Weights of the objectives", text, panels, legend)


def further_section(settings: Sequence[Setting], entry: Quantity) -> Section | None:
    """Returns a registered quantity over the rounds, a line for each setting that has it."""
    shown = [setting for setting in settings if not setting.values(entry.name).empty]
    if not shown:
        return None
    window = _window(shown, entry.name)
    panel = quantity_panel(entry.name, shown, entry, window=window, num_bands=NUM_BANDS)
    legend = [setting.key for setting in shown]
    text = f"{entry.help}{_smoothing(window)}"
    return Section(entry.name, entry.title, text, [panel], legend)


def progress_section(settings: Sequence[Setting]) -> Section | None:
    """Returns how far a local training of each setting lowers the losses, from the same models.

    Figure 11 of FedCMOO (Askin et al.), Appendix E.4.

    Args:
        settings: Each that measured "progress" is a panel: by setting and objective, the loss
            before a local training from the round's global model less that after it, averaged over
            the clients.
    """
    indices = {setting.name: setting.index for setting in settings}
    names = {setting.name: _progress_names(setting) for setting in settings}
    sources = [setting for setting in settings if names[setting.name]]
    if not sources:
        return None
    all_names = dict.fromkeys(name for source in sources for name in names[source.name])
    window = max(_window(sources, f"progress/{name}") for name in all_names)
    panels: list = []
    legend: dict[str, Key] = {}
    for place, source in enumerate(settings):
        lines = []
        for name in names[source.name]:
            index = indices.setdefault(name, len(indices))
            if line := series_of(source, f"progress/{name}", window=window):
                legend[name] = Setting(name, index, ()).key
                lines.append(replace(line, key=legend[name]))
        if lines:
            panel = series_panel(
                f"progress-{place}",
                f"From the models of {source.name}",
                lines,
                y_title="fall of the loss",
                rangemode="tozero",
            )
            panels.append(panel)
    text = (
        "By how much one round's local training lowers the losses on the client's own samples, "
        "mean over clients and objectives. All settings start from the same global models, those "
        f"of the run that the figure names.{_smoothing(window)}"
    )
    return Section("progress", "Progress of a local training", text, panels, list(legend.values()))


def _progress_names(setting: Setting) -> list[str]:
    """The settings whose local trainings were measured from the models of one."""
    quantities = dict.fromkeys(setting.table["quantity"])
    return [name.removeprefix("progress/") for name in quantities if name.startswith("progress/")]


def _window(settings: Sequence[Setting], name: str) -> int:
    """Over how many measured rounds the lines of a quantity are averaged."""
    values = [setting.values(name) for setting in settings]
    counts = [own.loc[own["seed"] == 0, "round"].nunique() for own in values]
    return max(1, max(counts) // NUM_WINDOWS)


def _smoothing(window: int) -> str:
    if window == 1:
        return ""
    return f" Each point is the mean of the last {window} values measured."
