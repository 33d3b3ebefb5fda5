"""The page that compares settings of the classic wing: curves, radar charts and one table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from firm.quantities import QUANTITIES, Quantity
from firm.report.classic_figures import LOG_TICKS, radar_panel
from firm.report.drawing import NUM_BANDS, Panel, nonempty
from firm.report.formats import CONFIG, MISSING, NBSP, measure, number
from firm.report.page import Block, Origin, Page, Section, Table, drawn_block, drawn_part
from firm.report.tables import How, Setting, measure_of, quantity_panel, seeds_text, span_text
from firm.run.comparison import CLEAR_Z, Measure

NUM_OWN_PANELS = 4
"""Up to so many objectives have panels of their own; of more, mean and worst are shown."""
NUM_COLUMNS = 10
"""Up to so many quantities are columns of the table; more become its rows."""
FIELDS = ("accuracies", "losses")


def comparison_page(
    settings: Sequence[Setting],
    *,
    method: str,
    config: str,
    columns: Mapping[str, Mapping[str, str]] | None = None,
    sections: Sequence[Block] = (),
    split: str = "test",
    is_log_loss: bool = False,
    notices: Sequence[str] = (),
    **head: Any,
) -> Page:
    """Returns the page that sets settings side by side, from the rows of their runs.

    Args:
        settings: In the order of the legend, one or more, each with runs of the same objectives.
        method: How the runs were made, in sentences.
        config: The configuration as YAML.
        columns: Further columns of the table, such as Δ_M: heading -> setting -> cell.
        sections: Further sections, shown after the page's own.
        split: Of which data the losses and accuracies are.
        is_log_loss: Whether the axes of the losses are logarithmic.
        notices: What was left out, in sentences.
        head: Title, facts and alarms of the page.
    """
    objectives_of = {field: settings[0].objectives_with(field) for field in FIELDS}
    main = "accuracies" if objectives_of["accuracies"] else "losses"
    quantity_of = {field: quantity(field, is_log=is_log_loss) for field in FIELDS}
    notes = list(notices)
    draws: dict[str, Callable[[], Section]] = {
        field: partial(_curves, settings, quantity_of[field], objectives, split)
        for field, objectives in objectives_of.items()
        if objectives
    }
    draws["upload"] = partial(_uploads, settings, quantity_of, objectives_of)
    draws["objectives"] = partial(_radars, settings, objectives_of)
    own = [drawn_block(name, draw) for name, draw in draws.items()]
    objectives = objectives_of[main]
    table = drawn_block("table", lambda: _table(settings, main, objectives, split, columns or {}))
    headlines = drawn_part(notes, "The summary", lambda: _headlines(settings, main, objectives), [])
    return Page(
        product="FIRM · federated multi-objective learning",
        summary=headlines,
        notices=notes,
        blocks=[*own, *sections, table, Origin(method, {CONFIG: config})],
        **head,
    )


def quantity(field: str, *, is_log: bool = False) -> Quantity:
    """Returns the entry of losses or accuracies.

    Args:
        field: Its name.
        is_log: Whether the axis of the losses is logarithmic.
    """
    entry = QUANTITIES["evaluation", field]
    if is_log and field == "losses":
        entry = replace(entry, axis=LOG_TICKS)
    return entry


# --- Sections -------------------------------------------------------------------------------------


def _curves(
    settings: Sequence[Setting], entry: Quantity, objectives: Sequence[str], split: str
) -> Section:
    """Returns mean, single objectives or worst one over the rounds."""
    curves: list[tuple[str, str | None, How]] = [(name, name, "mean") for name in objectives]
    if len(objectives) > NUM_OWN_PANELS:
        curves = [("Worst objective of each round", None, "worst")]
    if len(objectives) > 1:
        curves.insert(0, ("Mean over the objectives", None, "mean"))
    panels = [
        quantity_panel(
            f"{entry.title}-{place}",
            settings,
            entry,
            name,
            title=title,
            how=how,
            num_bands=NUM_BANDS,
        )
        for place, (title, name, how) in enumerate(curves)
    ]
    return Section(
        entry.name,
        f"{split.capitalize()} {entry.title} over the rounds",
        f"Of the global model. {seeds_text(settings, has_errors=len(settings) <= NUM_BANDS)}",
        nonempty(panels),
        [setting.key for setting in settings],
    )


def _uploads(
    settings: Sequence[Setting],
    quantity_of: Mapping[str, Quantity],
    objectives_of: Mapping[str, Sequence[str]],
) -> Section:
    """Returns the means over the uploaded megabytes."""
    panels = []
    for field, objectives in objectives_of.items():
        if objectives:
            entry = quantity_of[field]
            title = f"{'Mean ' if len(objectives) > 1 else ''}{entry.title}".capitalize()
            options = {"title": title, "over": "megabytes", "num_bands": NUM_BANDS}
            panels.append(quantity_panel(f"upload-{entry.title}", settings, entry, **options))
    return Section(
        "upload",
        "The same over uploaded data",
        "What all clients together sent to the server, in megabytes of 10⁶ bytes: an algorithm "
        "that sends one update per objective uses up its budget in fewer rounds.",
        nonempty(panels),
        [setting.key for setting in settings],
    )


def _radars(settings: Sequence[Setting], objectives_of: Mapping[str, Sequence[str]]) -> Section:
    """Returns the final values of three or more objectives; settings that diverged are left out."""
    panels: list[Panel] = []
    for field, objectives in objectives_of.items():
        means = {s.key: s.finals(field, objectives).mean(axis=0) for s in settings if objectives}
        means = {key: radii for key, radii in means.items() if np.isfinite(radii).all()}
        if len(objectives) < 3 or not means:
            continue
        if field == "accuracies":
            center = max(np.floor(10 * np.min(list(means.values()))) - 1, 0) / 10
            heading = f"Final accuracy, from {center:.0%} at the centre"
            span, axis = (float(center), 1.0), {"tickformat": "~%"}
        else:
            largest = np.max(list(means.values()), axis=0)
            scale = np.where(largest > 0, largest, 1.0)
            means = {key: radii / scale for key, radii in means.items()}
            heading = "Final loss, over the largest of all settings"
            span, axis = (0.0, 1.0), {}
        radii_by_key = {key: radii.tolist() for key, radii in means.items()}
        panels.append(
            radar_panel(f"radar-{field}", heading, radii_by_key, objectives, span=span, **axis)
        )
    return Section(
        "objectives",
        "Objective by objective",
        "Each spoke is an objective, each line a setting, averaged over the seeds. "
        "Of accuracies the outer line is better, of losses the inner one.",
        panels,
        [setting.key for setting in settings],
    )


# --- Words and figures ----------------------------------------------------------------------------


def _headlines(settings: Sequence[Setting], field: str, objectives: Sequence[str]) -> list[str]:
    """Returns which settings end best on average and for the worst objective, one sentence each."""
    finals = {setting.name: setting.finals(field, objectives) for setting in settings}
    word = quantity(field).title
    if len(objectives) == 1:
        return [_ranking(f"{objectives[0]}: the {word}", finals, field)]
    means = {name: values.mean(axis=1) for name, values in finals.items()}
    worsts = {name: worst(values, field) for name, values in finals.items()}
    return [
        _ranking(f"The mean {word} over {len(objectives)} objectives", means, field),
        _ranking(f"The worst objective's {word}", worsts, field),
    ]


def worst(values: np.ndarray, field: str) -> np.ndarray:
    """Returns the lowest accuracy or the highest loss of each seed, [S, M] to [S]."""
    return values.min(axis=1) if field == "accuracies" else values.max(axis=1)


def _ranking(what: str, finals: Mapping[str, np.ndarray], field: str) -> str:
    """Returns who is best, who comes next, and whether the seeds tell them apart."""
    ends = {
        name: end
        for name, values in finals.items()
        if np.isfinite(values).all() and (end := measure_of(values))
    }
    if not ends:
        return f"{what} is not known: every setting diverged."
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
    is_clear = abs(first.mean - second.mean) > CLEAR_Z * np.hypot(first.se, second.se)
    return f"{sentence}{'' if is_clear else ': too near to tell them apart'}."


def _table(
    settings: Sequence[Setting],
    field: str,
    objectives: Sequence[str],
    split: str,
    columns: Mapping[str, Mapping[str, str]],
) -> Table:
    """Returns final figures; a row for each setting, or for each quantity where these are many."""
    unit = " (%)" if field == "accuracies" else ""
    headings = [f"{name}{unit}" for name in objectives]
    headings += [f"mean{unit}", f"worst{unit}"] if len(objectives) > 1 else []
    headings += [*columns, "uploaded (MB)", "rounds"]
    table = [["setting", *headings]]
    for setting in settings:
        finals = setting.finals(field, objectives)
        quantities = [*finals.T]
        if len(objectives) > 1:
            quantities += [finals.mean(axis=1), worst(finals, field)]
        cells = [_cell(values, 100 if unit else 1) for values in quantities]
        cells += [cell_by_name.get(setting.name, MISSING) for cell_by_name in columns.values()]
        rounds = setting.values(field).groupby("seed")["round"].max().tolist()
        table.append([setting.name, *cells, number(setting.megabytes_up), span_text(rounds)])
    if len(headings) > max(NUM_COLUMNS, len(settings)):
        table = [list(row) for row in zip(*table, strict=True)]
        table[0][0] = "quantity"
    word = quantity(field).title
    text = f"{split.capitalize()} {word} of the global model when last evaluated"
    if max(len(setting.runs) for setting in settings) > 1:
        text += ", mean ± standard error over the seeds"
    if len(objectives) > 1:
        which = "lowest" if field == "accuracies" else "highest"
        text += f". The worst is the {which} of the objectives, taken in each run by itself"
    return Table(f"Final {word}", f"{text}.", table[0], table[1:])


def _cell(values: np.ndarray, scale: float) -> str:
    """Returns mean and standard error over the seeds, [S]; or how many of them diverged."""
    num_lost = int((~np.isfinite(values)).sum())
    if num_lost:
        return "diverged" if len(values) == 1 else f"diverged in {num_lost} of {len(values)}"
    return _text(measure_of(values), scale)


def _text(value: Measure | None, scale: float) -> str:
    if value is None:
        return MISSING
    return measure(Measure(scale * value.mean, None if value.se is None else scale * value.se))
