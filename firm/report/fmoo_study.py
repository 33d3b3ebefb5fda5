"""The page that compares algorithms of the classic wing: curves, radar charts and one table."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from firm.report.comparison import Measure
from firm.report.drawing import Key, Panel, nonempty
from firm.report.fmoo_figures import (
    NBSP,
    NUM_BANDS,
    AlgorithmRuns,
    Field,
    curves_panel,
    mean_and_error,
    mean_of,
    of_objective,
    radar_panel,
    uploaded,
    worst_of,
)
from firm.report.formats import MISSING, measure, number
from firm.report.page import Section, drawn_part, drawn_section
from firm.report.study_page import Study, Table, drawn_table

NUM_OWN_PANELS = 4
"""Up to so many objectives have panels of their own; of more, mean and worst are shown."""
NUM_COLUMNS = 10
"""Up to so many quantities are columns of the table; more become its rows."""
CLEAR = 2.0
"""Standard errors from which a difference is called one."""
AXES: dict[Field, tuple[str, dict[str, Any]]] = {
    "accuracies": ("accuracy", {"tickformat": "~%"}),
    "losses": ("loss", {}),
}


def comparison_study(
    runs: Sequence[AlgorithmRuns],
    *,
    title: str,
    facts: Mapping[str, str],
    method: str,
    config: str,
    summary: Sequence[str] = (),
    columns: Mapping[str, Mapping[str, str]] | None = None,
    sections: Sequence[Section | None] = (),
    split: str = "test",
    is_log_loss: bool = False,
    alarms: Sequence[tuple[str, str]] = (),
    notices: Sequence[str] = (),
) -> Study:
    """Returns the page that sets algorithms side by side, from the rows of their runs.

    Args:
        runs: The algorithms, in the order of the legend. They have the same objectives.
        title: Heading.
        facts: Data, clients, local steps and so on: label to text.
        method: How the runs were made, in sentences.
        config: The configuration as YAML.
        summary: Sentences that follow the page's own, which name the best algorithms.
        columns: Further columns of the table, such as Δ_M: heading -> algorithm -> cell.
        sections: Further sections, shown after the page's own; None stands for one that has
            nothing to show.
        split: Of which data the losses and accuracies are.
        is_log_loss: Whether the axes of the losses are logarithmic.
        alarms: What the runs warned of: which of them and when, and the text.
        notices: What was left out, in sentences.

    Raises:
        ValueError: Without algorithms, without runs or values of one, on two of the same name, on
            objectives that differ, or on an accuracy outside [0, 1].
    """
    objectives_of = _checked(runs)
    main: Field = "accuracies" if objectives_of["accuracies"] else "losses"
    legend = [one.key for one in runs]
    notes = list(notices)

    def own_section(name: str, draw: Callable[..., Section], *arguments: Any) -> Section:
        drawing = partial(draw, runs, *arguments)
        return drawn_section(name.capitalize(), drawing, name=name)

    own = [
        own_section(field, partial(_curves, is_log=is_log_loss), field, objectives, legend, split)
        for field, objectives in objectives_of.items()
        if objectives
    ]
    own.append(own_section("upload", partial(_uploads, is_log=is_log_loss), objectives_of, legend))
    own.append(own_section("objectives", _radars, objectives_of, legend))
    headlines = drawn_part(
        notes, "The summary", lambda: _headlines(runs, main, objectives_of[main]), []
    )
    return Study(
        product="FIRM · federated multi-objective learning",
        title=title,
        summary=[*headlines, *summary],
        facts=facts,
        sections=[section for section in [*own, *sections] if section and section.is_shown],
        table=drawn_table(
            f"Final {AXES[main][0]}",
            lambda: _table(runs, main, objectives_of[main], split, columns or {}),
        ),
        method=method,
        config=config,
        alarms=alarms,
        notices=notes,
    )


def final_values(runs: AlgorithmRuns, field: Field, objectives: Sequence[str]) -> np.ndarray:
    """Returns each seed's last losses or accuracies, shape [S, M]; not finite where it diverged."""
    finals = []
    for rows in runs.seeds:
        last = max((row for row in rows if row.get(field)), key=lambda row: row["round"])
        finals.append([last[field][name] for name in objectives])
    return np.array(finals, dtype=float)


def _checked(runs: Sequence[AlgorithmRuns]) -> dict[Field, list[str]]:
    """The objectives that have accuracies, and those that have losses, the same in every row."""
    if not runs:
        raise ValueError("A comparison needs at least one algorithm.")
    names = [one.name for one in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"Each algorithm must have a name of its own, got {names}.")
    found: dict[Field, list[str]] = {}
    for field in AXES:
        seen = {one.name: objectives_with(one, field) for one in runs}
        first = seen[names[0]]
        for name, objectives in seen.items():
            if set(objectives) != set(first):
                raise ValueError(
                    f"All algorithms must have the same {field}: {names[0]} has {first}, "
                    f"{name} has {objectives}."
                )
        found[field] = first
    if not any(found.values()):
        raise ValueError(
            f"No rows of {names[0]} have losses or accuracies; evaluate at least once."
        )
    for one in runs:
        values = [y for rows in one.seeds for row in rows for y in _values(row, "accuracies")]
        outside = [y for y in values if y < 0 or y > 1]
        if outside:
            raise ValueError(f"Accuracies must be in [0, 1], got {outside[0]:g} from {one.name}.")
    return found


def objectives_with(runs: AlgorithmRuns, field: Field) -> list[str]:
    """Returns the objectives with losses or accuracies in every seed; none if no row has any.

    Raises:
        ValueError: Without runs, or when rows or seeds name different objectives.
    """
    if not runs.seeds:
        raise ValueError(f"{runs.name} has no runs.")
    sets = [[list(row[field]) for row in rows if row.get(field)] for rows in runs.seeds]
    if not any(sets):
        return []
    if not all(sets):
        raise ValueError(f"Some seeds of {runs.name} have {field} and others none.")
    first = sets[0][0]
    for objectives in (objectives for rows in sets for objectives in rows):
        if set(objectives) != set(first):
            raise ValueError(f"The {field} of {runs.name} name once {first}, once {objectives}.")
    return first


def _values(row: Mapping[str, Any], field: Field) -> list[float]:
    return [y for y in (row.get(field) or {}).values() if y is not None]


# --- Sections -------------------------------------------------------------------------------------


def _curves(
    runs: Sequence[AlgorithmRuns],
    field: Field,
    objectives: Sequence[str],
    legend: list[Key],
    split: str,
    *,
    is_log: bool,
) -> Section:
    """Mean, single objectives or worst one over the rounds."""
    word, axis = axis_of(field, is_log=is_log)
    quantities = [(name, of_objective(field, name)) for name in objectives]
    if len(objectives) > NUM_OWN_PANELS:
        quantities = [("Worst objective of each round", worst_of(field))]
    if len(objectives) > 1:
        quantities.insert(0, ("Mean over the objectives", mean_of(field)))
    panels = [
        curves_panel(f"{word}-{place}", heading, runs, value, y_title=word, **axis)
        for place, (heading, value) in enumerate(quantities)
    ]
    return Section(
        field,
        f"{split.capitalize()} {word} over the rounds",
        f"Of the global model. {seeds_text(runs, has_errors=len(runs) <= NUM_BANDS)}",
        nonempty(panels),
        legend,
    )


def _uploads(
    runs: Sequence[AlgorithmRuns],
    objectives_of: Mapping[Field, Sequence[str]],
    legend: list[Key],
    *,
    is_log: bool,
) -> Section:
    """The means over the uploaded megabytes."""
    panels = []
    for field, objectives in objectives_of.items():
        if objectives:
            word, axis = axis_of(field, is_log=is_log)
            panel = curves_panel(
                f"upload-{word}",
                f"{'Mean ' if len(objectives) > 1 else ''}{word}".capitalize(),
                runs,
                mean_of(field),
                y_title=word,
                over="megabytes",
                **axis,
            )
            panels.append(panel)
    return Section(
        "upload",
        "The same over uploaded data",
        "What all clients together sent to the server, in megabytes of 10⁶ bytes: an algorithm "
        "that sends one update per objective uses up its budget in fewer rounds.",
        nonempty(panels),
        legend,
    )


def _radars(
    runs: Sequence[AlgorithmRuns], objectives_of: Mapping[Field, Sequence[str]], legend: list[Key]
) -> Section:
    """The final values of three or more objectives; algorithms that diverged are left out."""
    panels: list[Panel] = []
    for field, objectives in objectives_of.items():
        if len(objectives) < 3:
            continue
        means = {one.key: final_values(one, field, objectives).mean(axis=0) for one in runs}
        means = {key: radii for key, radii in means.items() if np.isfinite(radii).all()}
        if not means:
            continue
        if field == "accuracies":
            center = max(np.floor(10 * np.min(list(means.values()))) - 1, 0) / 10
            heading = f"Final accuracy, from {center:.0%} at the centre"
            span, axis = (float(center), 1.0), {"tickformat": "~%"}
        else:
            largest = np.max(list(means.values()), axis=0)
            scale = np.where(largest > 0, largest, 1.0)
            means = {key: radii / scale for key, radii in means.items()}
            heading = "Final loss, over the largest of all algorithms"
            span, axis = (0.0, 1.0), {}
        radii_by_key = {key: radii.tolist() for key, radii in means.items()}
        panels.append(
            radar_panel(f"radar-{field}", heading, radii_by_key, objectives, span=span, **axis)
        )
    return Section(
        "objectives",
        "Objective by objective",
        "Each spoke is an objective, each line an algorithm, averaged over the seeds. "
        "Of accuracies the outer line is better, of losses the inner one.",
        panels,
        legend,
    )


def axis_of(field: Field, *, is_log: bool = False) -> tuple[str, dict[str, Any]]:
    """Returns a field's name in figures and the attributes of its axis.

    Args:
        field: Losses or accuracies.
        is_log: Whether the axis of the losses is logarithmic.
    """
    word, axis = AXES[field]
    if is_log and field == "losses":
        axis = axis | {"type": "log", "tickformat": "~g", "dtick": "D2"}  # ticks at 1, 2, 5
    return word, axis


def seeds_text(runs: Sequence[AlgorithmRuns], *, has_errors: bool = True) -> str:
    """Returns a sentence on the means over the seeds, and on the errors that a figure shows."""
    counts = [len(one.seeds) for one in runs]
    if max(counts) == 1:
        return "One run each: nothing here tells of the noise between seeds."
    seeds = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    errors = ", with one standard error to both sides" if has_errors else ""
    return f"Means over {seeds} seeds{errors}."


# --- Words and figures ----------------------------------------------------------------------------


def _headlines(runs: Sequence[AlgorithmRuns], field: Field, objectives: Sequence[str]) -> list[str]:
    """Which algorithms end best on average and for the worst objective, one sentence each."""
    finals = {one.name: final_values(one, field, objectives) for one in runs}
    word, worst = (AXES[field][0], "min" if field == "accuracies" else "max")
    if len(objectives) == 1:
        return [_ranking(f"{objectives[0]}: the {word}", finals, field)]
    means = {name: values.mean(axis=1) for name, values in finals.items()}
    worsts = {name: getattr(values, worst)(axis=1) for name, values in finals.items()}
    return [
        _ranking(f"The mean {word} over {len(objectives)} objectives", means, field),
        _ranking(f"The worst objective's {word}", worsts, field),
    ]


def _ranking(what: str, finals: Mapping[str, np.ndarray], field: Field) -> str:
    """Who is best, who comes next, and whether the seeds tell them apart."""
    ends = {name: _measure(values) for name, values in finals.items() if np.isfinite(values).all()}
    if not ends:
        return f"{what} is not known: every algorithm diverged."
    superlative, sign, unit = (
        ("highest", -1, f"{NBSP}%") if field == "accuracies" else ("lowest", 1, "")
    )
    scale = 100 if unit else 1
    ranked = sorted(ends, key=lambda name: sign * ends[name].mean)

    def quote(name: str) -> str:
        return f"{name} ({_text(ends[name], scale)}{unit})"

    sentence = f"{what} ends {superlative} with {quote(ranked[0])}"
    if len(ranked) == 1:
        return f"{sentence}."
    first, second = ends[ranked[0]], ends[ranked[1]]
    sentence += f", before {quote(ranked[1])}"
    if first.se is None or second.se is None:
        return f"{sentence}."
    is_clear = abs(first.mean - second.mean) > CLEAR * np.hypot(first.se, second.se)
    return f"{sentence}{'' if is_clear else ': too near to tell them apart'}."


def _table(
    runs: Sequence[AlgorithmRuns],
    field: Field,
    objectives: Sequence[str],
    split: str,
    columns: Mapping[str, Mapping[str, str]],
) -> Table:
    """Final figures; a row for each algorithm, or for each quantity where these are many."""
    unit = " (%)" if field == "accuracies" else ""
    headings = [f"{name}{unit}" for name in objectives]
    headings += [f"mean{unit}", f"worst{unit}"] if len(objectives) > 1 else []
    headings += [*columns, "uploaded (MB)", "rounds"]
    table = [["algorithm", *headings]]
    for one in runs:
        finals = final_values(one, field, objectives)
        quantities = [*finals.T]
        if len(objectives) > 1:
            worst = finals.min(axis=1) if field == "accuracies" else finals.max(axis=1)
            quantities += [finals.mean(axis=1), worst]
        cells = [_cell(values, 100 if unit else 1) for values in quantities]
        cells += [cell_by_name.get(one.name, MISSING) for cell_by_name in columns.values()]
        table.append([one.name, *cells, _total_upload(one), _last_round(one, field)])
    if len(headings) > max(NUM_COLUMNS, len(runs)):
        table = [list(row) for row in zip(*table, strict=True)]
        table[0][0] = "quantity"
    words = AXES[field][0]
    text = f"{split.capitalize()} {words} of the global model when last evaluated"
    if max(len(one.seeds) for one in runs) > 1:
        text += ", mean ± standard error over the seeds"
    if len(objectives) > 1:
        which = "lowest" if field == "accuracies" else "highest"
        text += f". The worst is the {which} of the objectives, taken in each run by itself"
    return Table(f"Final {words}", f"{text}.", table[0], table[1:])


def _cell(values: np.ndarray, scale: float) -> str:
    """Mean and standard error over the seeds, [S]; or how many of them diverged."""
    num_lost = int((~np.isfinite(values)).sum())
    if num_lost:
        return "diverged" if len(values) == 1 else f"diverged in {num_lost} of {len(values)}"
    return _text(_measure(values), scale)


def _measure(values: np.ndarray) -> Measure:
    """Mean over the seeds and, of several, its standard error."""
    values = values.ravel()
    means, ses = mean_and_error(values[:, None])
    return Measure(float(means[0]), float(ses[0]) if len(values) > 1 else None)


def _text(value: Measure, scale: float) -> str:
    return measure(Measure(scale * value.mean, None if value.se is None else scale * value.se))


def _total_upload(runs: AlgorithmRuns) -> str:
    totals = [list(uploaded(rows).values())[-1:] for rows in runs.seeds]
    return number(float(np.mean(totals)) / 1e6) if all(totals) else MISSING


def _last_round(runs: AlgorithmRuns, field: Field) -> str:
    lasts = sorted({max(row["round"] for row in rows if row.get(field)) for rows in runs.seeds})
    return " to ".join(f"{at}" for at in dict.fromkeys([lasts[0], lasts[-1]]))
