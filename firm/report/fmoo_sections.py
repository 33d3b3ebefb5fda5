"""Sections of the comparison page for what only some runs measure: users, preferences, settings.

Each function returns None where the rows have nothing to show; ``comparison_study`` skips that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from firm.report.fmoo_figures import (
    AlgorithmRuns,
    Field,
    Outcome,
    Series,
    Users,
    Value,
    mean_and_error,
    points_panel,
    preference_plane,
    ratios_panel,
    series_of,
    series_panel,
    user_histograms,
)
from firm.report.fmoo_study import axis_of, final_values, objectives_with, seeds_text
from firm.report.page import Section
from firm.run.directory import Row

NUM_TABLE_USERS = 10
"""Up to so many users fit the table; of more, the spread is shown."""
NUM_WEIGHT_LINES = 8
"""Up to so many objectives have lines that one can tell apart."""
NUM_WINDOWS = 12
"""Noisy lines are running means over this part of their values: a shape, and not a thicket."""


# --- Final values ---------------------------------------------------------------------------------


def users_section(runs: Sequence[AlgorithmRuns]) -> Section | None:
    """Returns how the users' final accuracies are spread, a histogram for each algorithm.

    Args:
        runs: The algorithms. A row's "users" are accuracies in [0, 1] by user; those of each seed's
            last such row count, of the users whom all its algorithm's seeds name.

    Returns:
        None with ten users or fewer, for whom the table has room.
    """
    found = [Users(one.key, _user_accuracies(one)) for one in runs]
    users = [one for one in found if one.accuracies.shape[1] > NUM_TABLE_USERS]
    if not users:
        return None
    text = (
        "Final accuracy of the global model on each user's own samples, of "
        f"{users[0].accuracies.shape[1]} users, those of all seeds together. The dashed line "
        "marks the mean; SD is the standard deviation over the users, in percentage points. "
        "Of two algorithms with the same mean, the narrower one treats its users more alike."
    )
    return Section("users", "Accuracy, user by user", text, user_histograms("users", users), [])


def preferences_section(
    runs: Sequence[AlgorithmRuns],
    preferences: Mapping[str, tuple[float, float]],
    *,
    limits: tuple[float, float] | None = None,
    correlation: float | None = None,
) -> Section | None:
    """Returns which ratio of two losses the preferences asked for, and where the losses ended.

    Args:
        runs: The algorithms; one without a preference, and seeds that diverged, are left out.
        preferences: r, positive, by algorithm: it asks for r₁F₁ = r₂F₂ (Figure 4 of FedCMOO), with
            the objectives in the order of the rows' "losses".
        limits: Least loss of each objective trained alone.
        correlation: Rank correlation of the wanted and reached ratios, in [-1, 1].

    Returns:
        None unless the losses have two objectives, and an algorithm that did not diverge a
        preference.

    Raises:
        ValueError: On a preference that is not positive.
    """
    objectives = objectives_with(runs[0], "losses")
    if len(objectives) != 2:
        return None
    first, second = objectives
    outcomes = []
    for one in runs:
        if one.name in preferences:
            losses = final_values(one, "losses", objectives)  # [S, 2]
            losses = losses[np.isfinite(losses).all(axis=1)]
            if len(losses):
                outcomes.append(Outcome(one.key, preferences[one.name], losses))
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
    families: Mapping[str, Mapping[float, AlgorithmRuns]],
    *,
    title: str,
    x_title: str,
    name: str = "parameter",
    is_log_loss: bool = False,
) -> Section | None:
    """Returns the final means over the objectives against a setting (Figure 2 of FedCMOO).

    Args:
        families: Runs by setting, of each line. A line has the colour of its first runs; a setting
            with which a seed diverged has no point.
        title: Heading.
        x_title: The setting.
        name: Of the section, unique on its page.
        is_log_loss: Whether the axis of the losses is logarithmic.

    Returns:
        None without two settings.
    """
    fields: tuple[Field, ...] = ("accuracies", "losses")
    panels, legend, has_gap = [], {}, False
    for field in fields:
        found = [_against_setting(family, runs, field) for family, runs in families.items()]
        lines = [line for line in found if line]
        if len({x for line in lines for x in line.xs.tolist()}) < 2:
            continue
        word, axis = axis_of(field, is_log=is_log_loss)
        panels.append(
            points_panel(
                f"{name}-{word}",
                f"Final {word}, mean over the objectives",
                lines,
                x_title=x_title,
                y_title=word,
                **axis,
            )
        )
        legend |= {line.key.label: line.key for line in lines}
        has_gap = has_gap or any(len(line.xs) < len(families[line.key.label]) for line in lines)
    if not panels:
        return None
    text = (
        "Where the runs with each setting ended; the settings stand side by side, however far "
        "apart they are. "
        f"{seeds_text([one for runs in families.values() for one in runs.values()])}"
        f"{' Settings with which a run diverged have no point.' if has_gap else ''}"
    )
    return Section(name, title, text, panels, list(legend.values()))


def _user_accuracies(runs: AlgorithmRuns) -> np.ndarray:
    """The last accuracies of each seed and user, shape [S, C]."""
    finals = []
    for rows in runs.seeds:
        measured = [row for row in rows if row.get("users")]
        finals.append(max(measured, key=lambda row: row["round"])["users"] if measured else {})
    names = [n for n in finals[0] if all(final.get(n) is not None for final in finals)]
    return np.array([[final[name] for name in names] for final in finals])


def _against_setting(
    family: str, runs: Mapping[float, AlgorithmRuns], field: Field
) -> Series | None:
    """The final means over the objectives by rising setting."""
    settings, ends = [], []
    for setting, one in sorted(runs.items()):
        if objectives := objectives_with(one, field):
            values = final_values(one, field, objectives).mean(axis=1)  # [S]
            if np.isfinite(values).all():
                settings.append(float(setting))
                ends.append(mean_and_error(values[:, None]))
    if not ends:
        return None
    means, ses = np.concatenate(ends, axis=1)
    key = replace(next(iter(runs.values())).key, label=family)
    return Series(key, np.array(settings), means, ses)


# --- Over the rounds ------------------------------------------------------------------------------


def weights_section(runs: Sequence[AlgorithmRuns]) -> Section | None:
    """Returns the objectives' weights over the rounds, a panel for each algorithm that has some.

    Args:
        runs: The algorithms. A row's "weights" are in [0, 1] by objective; weights by client are
            left out.

    Returns:
        None with one objective, with more than eight, or where no algorithm weighs objectives.
    """
    objectives = objectives_with(runs[0], "losses") or objectives_with(runs[0], "accuracies")
    if not 2 <= len(objectives) <= NUM_WEIGHT_LINES:
        return None
    legend = [AlgorithmRuns(name, place, ()).key for place, name in enumerate(objectives)]
    window = _window(runs, "weights")
    lines_by_place = {}
    for place, one in enumerate(runs):
        found = {key: series_of(one, _weight_of(key.label), window=window) for key in legend}
        lines = [replace(line, key=key) for key, line in found.items() if line]
        if lines:
            lines_by_place[place] = lines
    if not lines_by_place:
        return None
    top = max((line.means + line.ses).max() for lines in lines_by_place.values() for line in lines)
    span = [-0.02 * top, 1.05 * top]
    panels = [
        series_panel(f"weights-{place}", runs[place].name, lines, y_title="weight λ", range=span)
        for place, lines in lines_by_place.items()
    ]
    text = (
        "How much each objective counts in a round's step: weights λ that sum to 1 and that the "
        f"algorithm chooses anew every round. A colour is an objective here.{_smoothing(window)}"
    )
    return Section("weights", "Weights of the objectives", text, panels, legend)


def improved_section(runs: Sequence[AlgorithmRuns]) -> Section | None:
    """Returns the share of participants that a round did not make worse (Figure 4 of FedMGDA+).

    Args:
        runs: The algorithms. A row's "improved" is the share in [0, 1] of the round's participants
            whose training losses did not rise.
    """
    return _one_panel(
        "improved",
        "Whom a round makes no worse",
        "Participants that improved or stayed",
        "Share of the clients taking part in a round whose own training losses fell, or stayed as "
        "they were, by the server's step. Below 100\N{NO-BREAK SPACE}% the round cost some of them "
        "something.",
        runs,
        y_title="share of participants",
        tickformat="~%",
    )


def stationarity_section(runs: Sequence[AlgorithmRuns]) -> Section | None:
    """Returns how near the server saw the models to Pareto stationarity, on a log axis.

    Args:
        runs: The algorithms. A row's "stationarity" is min_λ λᵀGλ over the simplex for the server's
            estimate of the Gram matrix G of the objectives' gradients.
    """
    return _one_panel(
        "stationarity",
        "Nearness to Pareto stationarity",
        "Smallest squared norm of a weighted mean of the gradients",
        "Where it is 0, no step lowers the losses of all objectives at once. It comes from the "
        "gradients as each algorithm's server estimates them, noise of the batches included: "
        "compare how the lines change rather than how high they lie. Gradients that are small "
        "because learning has not begun look the same.",
        runs,
        y_title="squared norm",
        type="log",
        tickformat="~g",
        nticks=6,
    )


def progress_section(runs: Sequence[AlgorithmRuns]) -> Section | None:
    """Returns how far a local training of each algorithm lowers the losses, from the same models.

    Figure 11 of FedCMOO (Askin et al.), Appendix E.4.

    Args:
        runs: The algorithms; each whose rows have "progress" is a panel. A row's "progress" is, by
            algorithm and objective, the loss before a local training from the round's global model
            less that after it, averaged over the clients.
    """
    colors = {one.name: one.color for one in runs}
    window = _window(runs, "progress")
    panels, legend = [], {}
    for place, source in enumerate(runs):
        rows = [row for seed in source.seeds for row in seed if row.get("progress")]
        lines = []
        for name in dict.fromkeys(name for row in rows for name in row["progress"]):
            traced = replace(source, name=name, color=colors.setdefault(name, len(colors)))
            if line := series_of(traced, _progress_of(name), window=window):
                lines.append(line)
                legend[name] = line.key
        if lines:
            panel = series_panel(
                f"progress-{place}",
                f"From the models of {source.name}",
                lines,
                y_title="fall of the loss",
                rangemode="tozero",
            )
            panels.append(panel)
    if not panels:
        return None
    text = (
        "By how much one round's local training lowers the losses on the client's own samples, "
        "mean over clients and objectives. All algorithms start from the same global models, those "
        f"of the run that the figure names.{_smoothing(window)}"
    )
    return Section("progress", "Progress of a local training", text, panels, list(legend.values()))


def _one_panel(
    name: str,
    title: str,
    heading: str,
    text: str,
    runs: Sequence[AlgorithmRuns],
    *,
    y_title: str,
    **y_axis: Any,
) -> Section | None:
    """A quantity that rows have under the section's own name, of all algorithms in one figure."""
    window = _window(runs, name)
    found = [series_of(one, lambda row: row.get(name), window=window) for one in runs]
    series = [line for line in found if line]
    if not series:
        return None
    panel = series_panel(name, heading, series, y_title=y_title, **y_axis)
    legend = [line.key for line in series]
    return Section(name, title, f"{text}{_smoothing(window)}", [panel], legend)


def _weight_of(objective: str) -> Value:
    """Takes an objective's weight."""
    return lambda row: (row.get("weights") or {}).get(objective)


def _progress_of(name: str) -> Value:
    """Takes an algorithm's progress, mean over the objectives."""

    def value(row: Row) -> float | None:
        losses = (row.get("progress") or {}).get(name)
        return float(np.mean(np.array(list(losses.values()), dtype=float))) if losses else None

    return value


def _window(runs: Sequence[AlgorithmRuns], field: str) -> int:
    """Over how many measured rounds the lines of a field are averaged."""
    counts = [sum(row.get(field) is not None for row in one.seeds[0]) for one in runs]
    return max(1, max(counts) // NUM_WINDOWS)


def _smoothing(window: int) -> str:
    if window == 1:
        return ""
    return f" Each point is the mean of the last {window} values measured."
