"""The page that compares settings over seeds, for language models or classic algorithms.

A comparison is a set of settings, each with the run directories of its seeds. Settings with
differently calibrated rewards cannot be compared and are shown in separate groups. A section or
column appears if the runs logged its quantities.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from firm.report import formats
from firm.report import settings_sections as sections
from firm.report import settings_tables as tables
from firm.report.criteria import Column, Criterion, comparable_groups, criteria_of
from firm.report.page import (
    Block,
    Choice,
    Page,
    Provenance,
    Section,
    Table,
    alarms,
    draw_blocks,
    drawn_part,
    left_out_notes,
    prose,
    untrained_notes,
    write_page,
)
from firm.report.plane import KL, Cloud, PlanePoint, Spot, clouds_of, planes
from firm.report.record import Record, final_row, main_error
from firm.report.static import PaperFigure, curves_figure, plane_figure
from firm.report.tables import (
    COLORS,
    Setting,
    seeds_text,
    settings_of,
    span_text,
)
from firm.run.guard import drawing

NUM_SHOWN = len(COLORS)
"""Number of settings that the figures show at first, one per colour; readers can choose others."""
NUM_ALARMS = 20
"""Maximum number of warnings listed, since those of a large study would hide its figures."""
NUM_PLANE_OBJECTIVES = 5
"""Maximum number of objectives with planes; more would have over ten pairs."""
METHOD = prose("origin-study")[1]


def write_settings_page(path: Path, runs: Mapping[str, Sequence[Record]], **options: Any) -> Path:
    """Writes the page that compares runs by setting, atomically, and returns its path.

    It loads plotly.min.js from its folder, like the pages of the runs.

    Args:
        path: File of the page; adapters' paths on it are relative to its folder.
        runs: The runs of each setting, by its name; settings without runs are omitted.
        options: As for `settings_page`.

    Raises:
        UserError: There are no runs with metrics, or the values of a setting's runs have different
            meanings; nothing is written.
    """
    page = settings_page(settings_of(runs), folder=path.parent, **options)
    return write_page(path, page, shared=path.parent)


def settings_page(
    settings: Sequence[Setting],
    *,
    folder: Path = Path(),
    title: str = "A study",
    config: str = "",
    method: str = METHOD,
    facts: Mapping[str, str] | None = None,
    sets: Mapping[str, Sequence[str]] | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """Returns the page that compares settings.

    Args:
        settings: In the order of the legend.
        folder: Folder that adapters' paths are relative to.
        title: Heading.
        config: The study's configuration as YAML.
        method: Sentences on how the runs were made.
        facts: Facts that the runs do not log; they replace facts with the same label.
        sets: Settings shown together, by the name of their button. The first set is shown at first.
        notes: Sentences on what the page does not show.

    Raises:
        UserError: No run can be compared.
    """
    records = [record for setting in settings for record in setting.records]
    notices = [*notes, *untrained_notes(records), *left_out_notes(records)]
    groups, left_out = comparable_groups(settings)
    notices += left_out
    settings = [setting for group in groups for setting in group]
    warnings = alarms_of(settings)
    if num_hidden := len(warnings[NUM_ALARMS:]):
        notices.append(f"{formats.count(num_hidden, 'more warning')} in the logs of the runs.")
    part = partial(drawn_part, notices)
    # sets name all settings of the study, of which some may have no runs yet
    names = [setting.name for setting in settings]
    known = {
        name: [label for label in labels if label in names] for name, labels in (sets or {}).items()
    }
    shown = next(filter(None, known.values()), names[:NUM_SHOWN])
    found = part("The list of facts", lambda: _facts(settings), {})
    return Page(
        product="FIRM · comparison of settings",
        title=title,
        summary=part("The summary", lambda: _summary(groups), []),
        facts=found | dict(facts or {}),
        alarms=warnings[:NUM_ALARMS],
        blocks=[*_blocks(groups, settings, folder), Provenance(method, {formats.CONFIG: config})],
        notices=notices,
        choice=Choice(
            [setting.key for setting in settings],
            frozenset(shown),
            {"show all": names, "show none": [], **known},
        ),
    )


def _blocks(
    groups: Sequence[Sequence[Setting]], settings: Sequence[Setting], folder: Path
) -> list[Block]:
    """Returns all sections and tables that have content, in order."""
    blocks: list[Block] = []
    for place, group in enumerate(groups, start=1):
        own = draw_blocks(_sections(group, folder))
        if len(groups) > 1:
            own = [_renamed(block, place, scale_name(group, place)) for block in own]
        blocks += own
    objectives = criteria_of(settings)[0].objectives
    rest = sections.training_sections(settings, objectives, sampled=groups[0])
    return [*blocks, *draw_blocks(rest)]


def _sections(group: Sequence[Setting], folder: Path) -> dict[str, Callable[[], Block | None]]:
    """Returns the functions that draw the sections of one group of settings, by name."""
    criteria = criteria_of(group)
    main, losses = criteria[0], next((c for c in criteria if c.quantity.name == "losses"), None)
    clouds = partial(setting_clouds, folder=folder)
    swept = sections.swept_parameters(group)
    return {
        "trade-off": lambda: _plane_section(group, main, folder),
        **{c.quantity.name: partial(sections.curve_section, group, c) for c in criteria},
        "final": lambda: tables.final_table(group, main, tables.further_texts(group, criteria)),
        "differences": lambda: tables.difference_table(group, main),
        "objectives": lambda: sections.objectives_section(group, criteria),
        **{
            f"setting-{place}": partial(sections.parameter_section, key, families, criteria)
            for place, (key, families) in enumerate(swept.items())
        },
        "preferences": lambda: losses and sections.preference_section(group, losses, clouds),
        "users": lambda: sections.user_section(group, main),
        "progress": lambda: sections.progress_section(group, main),
        "weights": lambda: sections.quantities_section(group, main.objectives, "weights"),
    }


def _renamed(block: Block, place: int, scale: str) -> Block:
    """Returns a block of one of several groups, with names that are unique on the page."""
    if isinstance(block, Section):
        panels = [replace(panel, name=f"{panel.name}-{place}") for panel in block.panels]
        block = replace(block, panels=panels)
    if isinstance(block, Section | Table):
        block = replace(block, title=f"{block.title}, {scale}")
    return replace(block, name=f"{block.name}-{place}")


# --- The plane ------------------------------------------------------------------------------------


def setting_clouds(
    settings: Sequence[Setting], criterion: Criterion | None = None, *, folder: Path
) -> list[Cloud]:
    """Returns the final models of each setting and their means over the seeds, as points.

    Args:
        settings: Settings of one scale; runs that lack values of the criterion are omitted.
        criterion: The main one by default.
        folder: Folder that adapters' paths are relative to.
    """
    criterion = criterion or criteria_of(settings)[0]
    groups = {}
    for setting in settings:
        if spots := _spots(setting, criterion, folder):
            groups[setting] = [({"setting": setting.name}, spots)]
    return clouds_of(groups, criterion.objectives, sign=criterion.sign)


def base_place(settings: Sequence[Setting]) -> PlanePoint | None:
    """Returns the initial model's values; None if no run measured them all."""
    main = criteria_of(settings)[0]
    place = {KL: 0.0}
    for name in main.objectives:
        value = Column(name, main.final, [name]).start(settings)
        if value is None:
            return None
        place[name] = value
    return place


def _spots(setting: Setting, criterion: Criterion, folder: Path) -> list[Spot]:
    """Returns the final models of the runs that have one."""
    ends = setting.ends(criterion.final, criterion.objectives).dropna()
    kls = setting.ends(criterion.beside("kl"))[""].to_dict()
    spots = []
    for place, seed in enumerate(setting.seeds):
        if seed not in ends.index:
            continue
        facts, errors = {"setting": setting.name, "seed": str(seed)}, {}
        if setting.records and (preference := setting.records[place].preference):
            facts["preference"] = formats.shares(preference)
        values = ends.loc[seed].to_dict()
        # only language models have a base model and an adapter
        if seed in kls:
            values[KL] = kls[seed]
            facts["KL"] = f"{formats.number(kls[seed])} nats"
        if seed in kls and setting.records:
            path = setting.records[place].path / "adapter"
            facts["adapter"] = os.path.relpath(path, folder)
        for name in criterion.objectives:
            own = setting.errors(criterion.final, name, seed=place)
            errors[name] = own[max(own)]
            if setting.records and setting.records[place].learns_from_pairs:
                record = setting.records[place]
                errors[name] = main_error(record, final_row(record) or {"round": 0}, name)
        spots.append(Spot(values, errors, facts))
    return spots


def _has_kl(clouds: Sequence[Cloud]) -> bool:
    return any(KL in spot.place for cloud in clouds for spot in cloud.spots)


def _has_plane(clouds: Sequence[Cloud], objectives: Sequence[str]) -> bool:
    """Returns whether there is a plane: two or a few more objectives, or one and KL."""
    return bool(clouds) and (_has_kl(clouds) or 1 < len(objectives) <= NUM_PLANE_OBJECTIVES)


def _plane_section(
    settings: Sequence[Setting], criterion: Criterion, folder: Path
) -> Section | None:
    clouds, objectives = setting_clouds(settings, criterion, folder=folder), criterion.objectives
    if not _has_plane(clouds, objectives):
        return None
    has_kl = _has_kl(clouds)
    better = "Up and to the right" if len(objectives) > 1 else "Up"
    if criterion.sign < 0:
        better = "Down and to the left"
    start = tables.initial_name(settings, criterion)
    single = ", over the prompts if there is one seed" if has_kl else ""  # classic runs have none
    if any(record.learns_from_pairs for setting in settings for record in setting.records):
        single = ", or exact 95 % intervals, counted by prompts, if there is one seed"
    title, text = prose("settings-plane", better=better, start=start, single=single)
    if len(objectives) == 1:
        title = f"{criterion.quantity.title} against KL"
    unit, base = criterion.quantity.unit, base_place(settings)
    panels = planes("trade-off", clouds, objectives, unit=unit, base=base, base_name=start)
    return Section("trade-off", title, text, panels)


# --- Figures for a paper --------------------------------------------------------------------------


def study_figures(
    runs: Mapping[str, Sequence[Record]],
    *,
    sets: Mapping[str, Sequence[str]] | None = None,
    half_life: float | None = None,
    folder: Path,
) -> dict[str, PaperFigure]:
    """Returns figures for a paper, by name: curves and the plane of each set of settings.

    There are curves of the criteria, the weights and every further registered quantity.

    Args:
        runs: The runs of each setting.
        sets: Settings drawn together, by the prefix of the figures' names; by default all settings.
            Settings with differently calibrated rewards have separate figures.
        half_life: Half-life in rounds of the running average of the curves; None: no averaging.
        folder: Folder that adapters' paths in the data are relative to.

    Raises:
        UserError: As `write_settings_page`.
    """
    figures = {}
    for name, labels in (sets or {"": list(runs)}).items():
        # a set may name settings without finished runs
        known = [label for label in labels if any(record.rows for record in runs.get(label, ()))]
        if not known:
            continue
        groups, _ = comparable_groups(settings_of({label: runs[label] for label in known}))
        for place, group in enumerate(groups, start=1):
            stem = [name, str(place) if len(groups) > 1 else ""]
            for kind, figure in _figures(group, half_life, folder).items():
                figures["-".join(filter(None, [*stem, kind]))] = figure
    return figures


def _figures(
    settings: Sequence[Setting], half_life: float | None, folder: Path
) -> dict[str, PaperFigure]:
    criteria = criteria_of(settings)
    objectives = criteria[0].objectives
    figures = {}
    with drawing("The figures over the rounds"):
        draw = partial(sections.quantities_section, settings, objectives, half_life=half_life)
        drawn = [
            *(sections.curve_section(settings, c, half_life=half_life) for c in criteria),
            *map(draw, ("weights", "drift", "further")),
        ]
        for section in filter(None, drawn):
            panels = [panel for panel in section.panels if not panel.name.endswith(".upload")]
            if panels:
                figures[section.name] = curves_figure(panels)
    with drawing("The figure plane"):
        clouds = setting_clouds(settings, folder=folder)
        if _has_plane(clouds, objectives):
            unit = criteria[0].quantity.unit
            figures["plane"] = plane_figure(
                clouds, objectives, unit=unit, base=base_place(settings)
            )
    return figures


# --- Words ----------------------------------------------------------------------------------------


def alarms_of(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Returns the warnings of the runs: setting, seed and rounds, and the text."""
    return [
        (f"{setting.name}, seed {seed}, {alarm.when.lower()}", alarm.text)
        for setting in settings
        for place, (seed, rows) in enumerate(zip(setting.seeds, setting.runs, strict=True))
        for alarm in alarms([*(own.header for own in setting.records[place : place + 1]), *rows])
    ]


def scale_name(group: Sequence[Setting], place: int) -> str:
    """Returns the name of a group: the common prefix before a colon, or a number."""
    heads = {setting.name.partition(":")[0] for setting in group if ":" in setting.name}
    if len(heads) == 1 and all(":" in setting.name for setting in group):
        return heads.pop()
    return f"calibration {place}"


def scales_text(num_groups: int) -> str:
    """Returns a sentence on groups of settings that cannot be compared."""
    return (
        f"Values of {num_groups} groups of settings cannot be compared with each other, since "
        "their reward models or calibrations differ; each group has its own figures and tables."
    )


def _summary(groups: Sequence[Sequence[Setting]]) -> list[str]:
    sentences = []
    for place, group in enumerate(groups, start=1):
        opening = f"{scale_name(group, place)}: " if len(groups) > 1 else ""
        sentences += [f"{opening}{text}" for text in tables.headlines(group, criteria_of(group)[0])]
    if len(groups) > 1:
        sentences.append(scales_text(len(groups)))
    settings = [setting for group in groups for setting in group]
    main = criteria_of(settings)[0]
    unfinished = [s.name for s in settings if not len(main.finals(s))]
    if unfinished:
        sentences.append(f"Without a final evaluation so far: {', '.join(unfinished)}.")
    counts = [len(setting.runs) for setting in settings]
    if max(counts) == 1:
        return [*sentences, seeds_text(settings)]
    errors = (
        f"Here: means ± standard deviations over {span_text(counts)} seeds; figures have errors."
    )
    return [*sentences, errors]


def _facts(settings: Sequence[Setting]) -> dict[str, str]:
    records = [record for setting in settings for record in setting.records]
    if not records:
        return {}
    models = dict.fromkeys((r.settings.get("policy") or {}).get("path") for r in records)
    objectives = dict.fromkeys(", ".join(record.objectives) for record in records)
    facts = {
        "Model": "; ".join(map(str, filter(None, models))),
        "Objectives": "; ".join(filter(None, objectives)),
        "Settings": len(settings),
        "Seeds": ", ".join(map(str, dict.fromkeys(record.seed for record in records))),
        "Runs": f"{len(records)}, {sum(record.is_finished for record in records)} finished",
        "Clients": span_text([len(record.clients) for record in records]),
        "Rounds": span_text([record.num_rounds or record.last_round for record in records]),
    }
    return {label: str(value) for label, value in facts.items() if value not in ("", "0")}
