"""Writes the page of a sweep over preferences: the fronts of its methods and their training."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firm.fronts.front import by_preference, check_comparable
from firm.report import formats
from firm.report import settings_sections as sections
from firm.report.front_sections import (
    Fronts,
    Rewards,
    RowRewards,
    Runs,
    data_of,
    front_clouds,
    front_sections,
    methods_of,
    methods_table,
    objectives_of,
    unit,
    volume_section,
    volumes_by_round,
)
from firm.report.page import (
    Block,
    Choice,
    Page,
    Provenance,
    Section,
    draw_blocks,
    drawn_part,
    left_out_notes,
    prose,
    untrained_notes,
    write_page,
)
from firm.report.plane import KL
from firm.report.record import Record, rewards_of
from firm.report.static import PaperFigure, plane_figure
from firm.report.tables import Setting, settings_of
from firm.run.errors import UserError

NUM_SHOWN = 6
"""Number of preferences whose training curves are shown at first; the reader can choose others."""


def write_front_page(path: Path, fronts: Fronts, **options: Any) -> Path:
    """Writes the page of a sweep atomically and returns its path.

    Write it into the folder of the fronts' files: adapters' paths are relative to it, and the page
    loads plotly.min.js from there, like the pages of the points. See `front_page` for the options.

    Raises:
        UserError: There are no points, or the fronts are not comparable; nothing is written.
    """
    return write_page(path, front_page(fronts, **options), shared=path.parent)


def front_page(
    fronts: Fronts,
    *,
    runs: Runs,
    row_rewards: RowRewards | None = None,
    config: str = "",
    title: str = "A sweep over preferences",
    notes: Sequence[str] = (),
) -> Page:
    """Returns the page of a sweep.

    Args:
        fronts: The front of each method, by its name.
        runs: The runs behind the points.
        row_rewards: Without them, the hypervolume's interval is omitted.
        config: The sweep's configuration as YAML.
        title: Heading.
        notes: Sentences on what the page does not show.
    """
    _check(fronts)
    notices = list(notes)
    remarks: list[str] = []
    settings = drawn_part(notices, "The trainings", lambda: _settings(fronts, runs), [])
    draws: dict[str, Callable[[], Block | None]] = {
        **front_sections(fronts),
        "methods": lambda: methods_table(fronts, runs, row_rewards or {}, remarks),
        "hypervolume": lambda: _volumes(fronts, runs),
    }
    draws["models"] = draws.pop("models")  # the longest table is last
    if settings:
        objectives = objectives_of(fronts)
        draws |= {
            "weights": lambda: sections.quantities_section(settings, objectives, "weights"),
            **sections.training_sections(settings, objectives, sampled=settings),
        }
    blocks = draw_blocks(draws)
    # the trainings' figures have a line and a button for each method and preference
    keys = [setting.key for setting in [*methods_of(fronts), *settings]]
    records = {record.path: record for own in runs.values() for record in own.values()}
    first = next(iter(fronts.values()))
    points = [point for front in fronts.values() for point in front.points]
    num_collapsed = sum(point.collapse is not None for point in points)
    data = data_of(fronts)
    scale = prose("scale-raw" if first.measure == "reward" else f"scale-{data}")[1]
    facts = {
        "Methods": ", ".join(fronts),
        "Objectives": ", ".join(first.objectives),
        "Models": f"{len(points)}, {num_collapsed or 'none'} collapsed",
        "Seeds": ", ".join(map(str, sorted({point.seed for point in points}))),
        f"Test {data}": f"{'of replies to ' if data == 'pairs' else ''}{first.prompts()}",
        "Reference point": formats.shares(first.reference),
        "Base model": formats.shares([first.base[name] for name in first.objectives]),
    }
    return Page(
        product="FIRM · sweep over preferences",
        title=title,
        summary=remarks,
        facts=facts,
        notices=[*notices, *untrained_notes(records.values()), *left_out_notes(records.values())],
        blocks=[
            *blocks,
            Provenance(prose("origin-sweep", scale=scale)[1], {formats.CONFIG: config}),
        ],
        choice=Choice(
            keys,
            frozenset(key.label for key in keys[: len(fronts) + NUM_SHOWN]),
            {"show all": [key.label for key in keys]},
        ),
    )


def front_figure(fronts: Fronts) -> PaperFigure:
    """Returns the plane of comparable fronts as a figure for a paper."""
    first = next(iter(fronts.values()))
    base = {KL: 0.0, **first.base}
    return plane_figure(front_clouds(fronts), first.objectives, unit=unit(fronts), base=base)


def _check(fronts: Fronts) -> None:
    empty = [name for name, front in fronts.items() if not front.points]
    if not fronts or empty:
        raise UserError(
            f"a sweep's page needs points of every method, got none of "
            f"{', '.join(empty) or 'any method'}; run them first."
        )
    (first_name, first), *others = fronts.items()
    for name, front in others:
        try:
            check_comparable(first, front)
        except ValueError as error:
            raise UserError(f"{first_name} and {name}: {error}") from None


def _settings(fronts: Fronts, runs: Runs) -> list[Setting]:
    """Returns the runs that trained, by method and preference."""
    grouped: dict[str, list[Record]] = {}
    for method, front in fronts.items():
        for preference, points in by_preference(front).items():
            records = [runs[method][p.name] for p in points if p.name in runs.get(method, {})]
            trained = [record for record in records if record.rounds]
            if trained:
                grouped[f"{method} ({formats.shares(preference)})"] = trained
    # their colours follow the colours of the methods
    return settings_of(grouped, first=len(fronts)) if grouped else []


def _volumes(fronts: Fronts, runs: Runs) -> Section:
    """Returns the hypervolume of each method on the validation data after every round.

    Methods are omitted if a model has no rounds, being a mean of others.
    """
    found: dict[Setting, Mapping[int, Sequence[float]]] = {}
    for method in methods_of(fronts):
        front, records = fronts[method.name], runs.get(method.name, {})
        seeds: dict[int, list[Rewards]] = {}
        for point in front.points:
            record = records.get(point.name)
            rows = record.evaluations.get("validation", []) if record and record.rounds else []
            rewards = {row["round"]: rewards_of(row, front.objectives) for row in rows}
            known = {at: means for at, means in rewards.items() if means is not None}
            seeds.setdefault(point.seed, []).append(known)
        try:
            found[method] = volumes_by_round(list(seeds.values()), front.reference)
        except ValueError:  # more than three objectives without moocore; the table gives the reason
            continue
    return volume_section(found, data=data_of(fronts))
