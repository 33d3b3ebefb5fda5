"""Writes the page of a sweep over preferences: the fronts of its methods and their training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from firm.fronts.dominance import non_dominated
from firm.fronts.front import Front, Point, by_preference, check_comparable
from firm.report import formats
from firm.report import front_tables as tables
from firm.report import settings_sections as sections
from firm.report.drawing import (
    LegendEntry,
    Panel,
    Series,
    Trace,
    axis,
    error_bars,
    figure,
    nonempty,
    scatter,
    series_panel,
)
from firm.report.front_tables import Runs
from firm.report.page import (
    Block,
    Choice,
    Page,
    Provenance,
    Section,
    drawn_block,
    drawn_part,
    left_out_notes,
    prose,
    write_page,
)
from firm.report.plane import KL, Cloud, Spot, clouds_of, planes
from firm.report.record import Record
from firm.report.settings_tables import ledger_table
from firm.report.static import PaperFigure, plane_figure
from firm.report.tables import Frame, Setting, mean_and_error, settings_of
from firm.run.errors import UserError

NUM_SHOWN = 6
"""Number of preferences whose training curves are shown at first; the reader can choose others."""
METHOD = (
    "Every point is a run with its own folder, which holds its configuration, every row of "
    "its metrics, its samples and its adapter. Rewards are mapped to [0, 1] by one calibration, "
    "frozen before training. The fronts are saved beside the page as METHOD.front.json."
)


def write_front_page(path: Path, fronts: Mapping[str, Front], **options: Any) -> Path:
    """Writes the page of a sweep atomically and returns its path.

    Write it into the folder of the fronts' files: adapters' paths are relative to it, and the page
    loads plotly.min.js from there, like the pages of the points. See `front_page` for the options.

    Raises:
        UserError: There are no points, or the fronts are not comparable; nothing is written.
    """
    return write_page(path, front_page(fronts, **options), shared=path.parent)


def front_page(
    fronts: Mapping[str, Front],
    *,
    runs: Runs,
    row_rewards: Mapping[str, tuple[ArrayLike, ArrayLike | None]] | None = None,
    config: str = "",
    title: str = "A sweep over preferences",
    notes: Sequence[str] = (),
) -> Page:
    """Returns the page of a sweep.

    Args:
        fronts: The front of each method, by its name.
        runs: The runs behind the points.
        row_rewards: Rewards of each method's points by row of the test data, shape [N, R, M], and
            the number of each row's prompt, [R], or None if every row is another prompt. Without
            them, the hypervolume's interval is omitted.
        config: The sweep's configuration as YAML.
        title: Heading.
        notes: Sentences on what the page does not show.
    """
    _check(fronts)
    notices = list(notes)
    remarks: list[str] = []
    part = partial(drawn_part, notices)
    rewards = row_rewards or {}
    objectives = next(iter(fronts.values())).objectives
    settings = part("The trainings", lambda: _settings(fronts, runs), [])
    draws: dict[str, Callable[[], Block]] = {
        "trade-off": lambda: plane_section(fronts),
        "hypervolume": lambda: _hypervolume_section(fronts, runs),
        "preference": lambda: preference_section(fronts),
        "volumes": lambda: tables.hypervolumes(fronts, rewards, remarks),
        "steering": lambda: tables.steering(fronts),
        "models": lambda: tables.models(fronts),
        "costs": lambda: tables.costs(fronts, runs),
    }
    if settings:
        draws |= {
            "ledger": lambda: ledger_table(settings),
            "samples": lambda: sections.shared_samples(settings),
            "weights": lambda: sections.weights_section(settings, objectives, "weights"),
        }
    blocks = [drawn_block(name, draw) for name, draw in draws.items()]
    blocks += sections.training_blocks(settings, objectives) if settings else []
    # the trainings' figures have a line and a button for each method and preference
    keys = [setting.key for setting in [*_methods(fronts), *settings]]
    records = {record.path: record for own in runs.values() for record in own.values()}
    return Page(
        product="FIRM · sweep over preferences",
        title=title,
        summary=[*part("The summary", lambda: _summary(fronts), []), *remarks],
        facts=_page_facts(fronts),
        notices=[*notices, *left_out_notes(records.values())],
        blocks=[*blocks, Provenance(METHOD, {formats.CONFIG: config})],
        choice=Choice(
            keys,
            frozenset(key.label for key in keys[: len(fronts) + NUM_SHOWN]),
            {"show all": [key.label for key in keys]},
        ),
    )


def _page_facts(fronts: Mapping[str, Front]) -> dict[str, str]:
    first = next(iter(fronts.values()))
    points = [point for front in fronts.values() for point in front.points]
    return {
        "Methods": ", ".join(fronts),
        "Objectives": ", ".join(first.objectives),
        "Models": str(len(points)),
        "Seeds": ", ".join(map(str, sorted({point.seed for point in points}))),
        "Test prompts": first.prompts(),
        "Reference point": formats.vector(first.reference),
        "Base model": formats.vector([first.base[name] for name in first.objectives]),
    }


def front_clouds(fronts: Mapping[str, Front]) -> list[Cloud]:
    """Returns the models of each front and their means over the seeds, as points of the plane.

    A model is dominated if another model of any front is at least as good in all rewards and better
    in one; likewise for means. The path joins the means that no mean of their own front dominates,
    by rising first reward.
    """
    beaten = tables.beaten_by(fronts)
    groups, singles = {}, []
    for setting, front in zip(_methods(fronts), fronts.values(), strict=True):
        method = setting.name
        spots = {
            # several fronts' labels would overlap
            point.name: replace(
                _spot(method, point, beaten[method, point.name], has_label=len(fronts) == 1),
                errors=tables.errors(front, point),
            )
            for point in front.points
        }
        groups[setting] = [
            (_facts(method, preference, points), [spots[point.name] for point in points])
            for preference, points in by_preference(front).items()
        ]
        singles.append([spots[point.name] for point in front.points if point.preference is None])
    objectives = next(iter(fronts.values())).objectives
    clouds = clouds_of(groups, objectives)
    paths = [_path(cloud.means, objectives) for cloud in clouds]
    return [
        replace(cloud, models=[*cloud.models, *own], path=path)
        for cloud, own, path in zip(clouds, singles, paths, strict=True)
    ]


def front_figure(fronts: Mapping[str, Front]) -> PaperFigure:
    """Returns the plane of comparable fronts as a figure for a paper."""
    first = next(iter(fronts.values()))
    return plane_figure(front_clouds(fronts), first.objectives, base={KL: 0.0, **first.base})


def _check(fronts: Mapping[str, Front]) -> None:
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


def _methods(fronts: Mapping[str, Front]) -> list[Setting]:
    """Returns the methods as settings, which carry a colour and a symbol."""
    return [Setting(method, index, ()) for index, method in enumerate(fronts)]


def _spot(method: str, point: Point, dominators: Sequence[str], *, has_label: bool) -> Spot:
    has_kl = isfinite(point.kl)  # held-out pairs measure none
    facts = {
        "method": method,
        "preference": formats.shares(point.preference),
        "seed": str(point.seed),
        **({"KL": f"{formats.number(point.kl)} nats"} if has_kl else {}),
        "adapter": point.adapter,
        **({"collapsed": point.collapse} if point.collapse else {}),
    }
    place = point.rewards | ({KL: point.kl} if has_kl else {})
    label = formats.shares(point.preference) if has_label else ""
    return Spot(place, {}, facts, is_dominated=bool(dominators), label=label)


def _facts(method: str, preference: Sequence[float], points: Sequence[Point]) -> dict[str, str]:
    """Returns the facts in a mean's tooltip beyond the measured ones."""
    facts = {"method": method, "preference": formats.shares(preference)}
    if num_collapsed := sum(point.collapse is not None for point in points):
        facts["collapsed"] = f"{num_collapsed} of {len(points)}"
    return facts


def _path(means: Sequence[Spot], objectives: Sequence[str]) -> list[int]:
    """Returns the means that no mean of this front dominates, by rising first reward; M = 2."""
    if not means or len(objectives) != 2:
        return []
    scores = np.array([[mean.place[name] for name in objectives] for mean in means])
    kept = np.flatnonzero(non_dominated(scores))
    return kept[np.argsort(scores[kept, 0])].tolist()


def _settings(fronts: Mapping[str, Front], runs: Runs) -> list[Setting]:
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


# --- Sections -------------------------------------------------------------------------------------


def plane_section(fronts: Mapping[str, Front]) -> Section:
    """Returns the models of all fronts in the plane of two rewards."""
    first = next(iter(fronts.values()))
    panels = planes(
        "front",
        front_clouds(fronts),
        first.objectives,
        unit=tables.unit(fronts),
        base={KL: 0.0, **first.base},
        reference=dict(zip(first.objectives, first.reference, strict=True)),
    )
    joined = " A line joins the means of a method that none of its other means dominates."
    joined = joined if len(first.objectives) == 2 else ""
    return Section(
        "trade-off",
        *prose("front", joined=joined),
        panels,
    )


def _hypervolume_section(fronts: Mapping[str, Front], runs: Runs) -> Section:
    """Returns the hypervolume of each method on the validation prompts after every round."""
    series = []
    for method in _methods(fronts):
        try:
            table = tables.volumes_by_round(fronts[method.name], runs.get(method.name, {}))
        except ValueError:  # more than three objectives without moocore; the table gives the reason
            table = {}
        if table:
            means, errors = mean_and_error(np.array(list(table.values())).T)
            series.append(Series(method.key, np.array(list(table), dtype=float), means, errors))
    name, title = "hypervolume", "Hypervolume on the validation prompts"
    panel = series_panel(name, title, series, y_title=name, num_bands=len(series))
    return Section(
        name,
        *prose("hypervolume"),
        nonempty([panel]),
    )


def preference_section(fronts: Mapping[str, Front]) -> Section:
    """Returns each objective's reward against its share of the preference."""
    panels = []
    for index, objective in enumerate(next(iter(fronts.values())).objectives):
        traces = []
        for method in _methods(fronts):
            front = fronts[method.name]
            points = by_preference(front).items()
            rows = [
                (p[index], point.rewards[objective], tables.errors(front, point)[objective])
                for p, own in points
                for point in own
            ]
            traces += _share_traces(method.key, pd.DataFrame(rows, columns=["x", "y", "se"]))
        x_axis = axis(f"share of the preference for {objective}")
        made = figure(traces, x_axis, axis(tables.unit(fronts)), height=300)
        panels.append(Panel(f"share-{objective}", objective, made))
    return Section(
        "preference",
        *prose("preference"),
        panels,
    )


def _share_traces(key: LegendEntry, models: Frame) -> list[Trace]:
    """Returns traces of the mean over the models of each share, and of the models.

    A single model has its own error bar.
    """
    levels = models.groupby("x")["y"].agg(["mean", "sem", "count"])
    own_bars = models.groupby("x")["se"].first()
    errors = [
        own_bars[x] if level["count"] == 1 else level["sem"] for x, level in levels.iterrows()
    ]
    singles = models[models["x"].map(levels["count"]) > 1].sort_values("x", kind="stable")
    label = escape(key.label)
    hover = f"{label}<br>share %{{x:.3~g}}: %{{y:.3f}}"
    shared: dict[str, Any] = {"hover": hover, "legendgroup": label}
    line: dict[str, Any] = {"mode": "lines+markers", "size": 8, **shared}
    bars = error_bars(errors, key.color)
    marker = {"color": key.color, "size": 5, "opacity": 0.6}
    own = replace(key, label=f"{key.label}, models")
    traces = [
        scatter(key, levels.index, levels["mean"], error_y=bars, **line),
        scatter(own, singles["x"], singles["y"], marker=marker, showlegend=False, **shared),
    ]
    return [trace for trace in traces if trace["x"]]


# --- Words ----------------------------------------------------------------------------------------


def _summary(fronts: Mapping[str, Front]) -> list[str]:
    sentences = []
    for method, front in fronts.items():
        steer = [
            f"{name} {text}"
            for name, text in tables.correlations(front).items()
            if text != formats.MISSING
        ]
        text = f"{method}: {len(front.points)} models of {len(by_preference(front))} preferences"
        if steer:
            text += f", rank correlation of preference and reward {', '.join(steer)}"
        sentences.append(f"{text}; {tables.num_collapsed(front) or 'none'} collapsed.")
    return sentences
