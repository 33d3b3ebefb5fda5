"""Figures and tables of fronts: on the page of a sweep, and on that of one conditioned run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from firm.fronts.correlation import monotone_violations, preference_correlations
from firm.fronts.dominance import dominators, non_dominated
from firm.fronts.front import Front, Point, by_preference, seed_hypervolumes
from firm.fronts.hypervolume import bootstrap_hypervolume, volumes
from firm.report import formats
from firm.report.drawing import (
    Error,
    Panel,
    Series,
    axis,
    curve,
    figure,
    mean_and_error,
    nonempty,
    reach,
    series_panel,
)
from firm.report.ledger import total_bytes
from firm.report.page import Block, Section, Table, prose
from firm.report.plane import ACCURACY, KL, Cloud, Spot, clouds_of, planes
from firm.report.record import Record, share_error
from firm.report.tables import Setting
from firm.run.comparison import Measure, score_label, score_notes

NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 0

Fronts = Mapping[str, Front]
"""The front of each method, by its name."""
Runs = Mapping[str, Mapping[str, Record]]
"""Records by method and name of the point."""
RowRewards = Mapping[str, tuple[ArrayLike, ArrayLike | None]]
"""Rewards of each method's points by row of the test data, shape [N, R, M], and the number of each
row's prompt, [R], or None if every row is another prompt."""
Rewards = Mapping[int, Sequence[float]]
"""A model's mean rewards, [M], by round."""


def front_sections(fronts: Fronts) -> dict[str, Callable[[], Block | None]]:
    """Returns the functions that draw the plane, the steering and the models of fronts, by name."""
    return {
        "front": lambda: plane_section(fronts),
        "preference": lambda: preference_section(fronts),
        "models": lambda: models(fronts),
    }


def methods_of(fronts: Fronts) -> list[Setting]:
    """Returns the methods as settings, which carry a colour and a symbol."""
    return [Setting(method, index, ()) for index, method in enumerate(fronts)]


def objectives_of(fronts: Fronts) -> tuple[str, ...]:
    """Returns the objectives, which comparable fronts share."""
    return next(iter(fronts.values())).objectives


def unit(fronts: Fronts) -> str:
    """Returns the unit of the objectives: rewards, or accuracies on pairs."""
    measure = next(iter(fronts.values())).measure
    return ACCURACY if measure == "accuracy on pairs" else f"mean {measure}"


def errors(front: Front, point: Point) -> dict[str, Error]:
    """Returns the error bars of a point: standard errors, or exact 95 % intervals of accuracies."""
    if unit({"": front}) != ACCURACY:
        return {**point.errors}
    counts = {name: front.num_scored.get(name, front.num_prompts) for name in front.objectives}
    return {name: share_error(point.rewards[name], count) for name, count in counts.items()}


def beaten_by(fronts: Fronts) -> dict[tuple[str, str], list[str]]:
    """Returns the names of the points of all fronts that dominate a point, by method and name."""
    places = [(method, point.name) for method, front in fronts.items() for point in front.points]
    scores = np.concatenate([front.rewards() for front in fronts.values()])
    return {
        place: [places[index][1] for index in above]
        for place, above in zip(places, dominators(scores), strict=True)
    }


def data_of(fronts: Fronts) -> str:
    """Returns the name of the held-out data: prompts, or pairs."""
    return "pairs" if unit(fronts) == ACCURACY else "prompts"


def _words(fronts: Fronts) -> dict[str, str]:
    """Returns names of the held-out data and of the error bars of single models."""
    kind = data_of(fronts)
    return {"data": kind, "bars": prose(f"bars-{kind}")[1]}


# --- Figures --------------------------------------------------------------------------------------


def front_clouds(fronts: Fronts) -> list[Cloud]:
    """Returns the models of each front and their means over the seeds, as points of the plane.

    A model is dominated if another model of any front is at least as good in all rewards and better
    in one; likewise for means. The path joins the means that no mean of their own front dominates,
    by rising first reward.
    """
    beaten, objectives = beaten_by(fronts), objectives_of(fronts)
    groups, singles = {}, []
    for setting, front in zip(methods_of(fronts), fronts.values(), strict=True):
        method = setting.name
        spots = {}
        for point in front.points:
            # several fronts' labels would overlap
            spot = _spot(method, point, has_label=len(fronts) == 1)
            is_dominated = bool(beaten[method, point.name])
            spots[point.name] = replace(
                spot, errors=errors(front, point), is_dominated=is_dominated
            )
        groups[setting] = []
        for preference, points in by_preference(front).items():
            facts = {"method": method, "preference": formats.shares(preference)}
            if num_collapsed := sum(point.collapse is not None for point in points):
                facts["collapsed"] = f"{num_collapsed} of {len(points)}"
            groups[setting].append((facts, [spots[point.name] for point in points]))
        singles.append([spots[point.name] for point in front.points if point.preference is None])
    return [
        replace(cloud, models=[*cloud.models, *own], path=_path(cloud.means, objectives))
        for cloud, own in zip(clouds_of(groups, objectives), singles, strict=True)
    ]


def _spot(method: str, point: Point, *, has_label: bool) -> Spot:
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
    return Spot(place, {}, facts, label=formats.shares(point.preference) if has_label else "")


def _path(means: Sequence[Spot], objectives: Sequence[str]) -> list[int]:
    """Returns the means that no mean of this front dominates, by rising first reward; M = 2."""
    if not means or len(objectives) != 2:
        return []
    scores = np.array([[mean.place[name] for name in objectives] for mean in means])
    kept = np.flatnonzero(non_dominated(scores))
    return kept[np.argsort(scores[kept, 0])].tolist()


def plane_section(fronts: Fronts) -> Section:
    """Returns the models of all fronts in the plane of two rewards."""
    first = next(iter(fronts.values()))
    panels = planes(
        "front",
        front_clouds(fronts),
        first.objectives,
        unit=unit(fronts),
        base={KL: 0.0, **first.base},
    )
    joined = prose("front-path")[1] if len(first.objectives) == 2 else ""
    return Section("front", *prose("front", joined=joined, **_words(fronts)), panels)


def preference_section(fronts: Fronts) -> Section:
    """Returns each objective's reward against its share of the preference.

    Points are means over the models of a share. Their errors are over these models or, for a single
    model or seed, means of the models' own errors over the prompts, which all of them answered.
    """
    panels = []
    for index, objective in enumerate(objectives_of(fronts)):
        traces = []
        for method in methods_of(fronts):
            front, by_share = fronts[method.name], dict[float, list[Point]]()
            for preference, points in by_preference(front).items():
                by_share.setdefault(preference[index], []).extend(points)
            levels, bars, has_seeds = [], list[Error](), len({p.seed for p in front.points}) > 1
            for share, points in sorted(by_share.items()):
                means, ses = mean_and_error([[p.rewards[objective]] for p in points])
                levels.append((share, float(means[0])))
                if len(points) > 1 and has_seeds:
                    bars.append(float(ses[0]))
                else:
                    own = zip(*(reach(errors(front, p)[objective]) for p in points), strict=True)
                    below, above = (fmean(side or 0.0 for side in each) for each in own)
                    bars.append(below if below == above else (below, above))
            line = curve(method.key, levels, size=8, ses=bars)
            line["hovertemplate"] = "%{fullData.name}<br>share %{x:.3~g}: %{y:.3f}<extra></extra>"
            traces += [line | {"legendgroup": line["name"]}] if levels else []
        x_axis = axis(f"share of the preference for {objective}")
        made = figure(traces, x_axis, axis(unit(fronts)), height=300)
        panels.append(Panel(f"share-{objective}", objective, made))
    return Section("preference", *prose("preference", **_words(fronts)), panels)


def volumes_by_round(
    seeds: Sequence[Sequence[Rewards]], reference: Sequence[float]
) -> dict[int, list[float]]:
    """Returns each seed's hypervolume, [S], in the rounds in which all models were evaluated.

    Args:
        seeds: The models of each seed.
        reference: The reference point, [M].
    """
    rounds = [set(model) for models in seeds for model in models]
    corner = np.array(reference)  # `volumes` measures from the origin
    return {
        at: [float(volumes(np.array([model[at] for model in own]) - corner)) for own in seeds]
        for at in sorted(set.intersection(*rounds) if rounds else ())
    }


def volume_section(
    volumes: Mapping[Setting, Mapping[int, Sequence[float]]], *, data: str
) -> Section:
    """Returns the hypervolumes on the validation data over the rounds, by seed."""
    series = [
        Series.of(method.key, list(own), np.array(list(own.values())).T)
        for method, own in volumes.items()
        if own
    ]
    name, title = "hypervolume", f"Hypervolume on the validation {data}"
    panel = series_panel(name, title, series, y_title=name)
    return Section(name, *prose(name, data=data), nonempty([panel]))


# --- Tables ---------------------------------------------------------------------------------------


def methods_table(fronts: Fronts, runs: Runs, row_rewards: RowRewards, notes: list[str]) -> Table:
    """Returns the figures of all methods: hypervolume, steering and cost, a column for each.

    Reasons for missing hypervolumes are added to the notes.
    """
    columns = {}
    for method, front in fronts.items():
        records = [runs[method][p.name] for p in front.points if p.name in runs.get(method, {})]
        seconds = sum(row.get("seconds") or 0 for record in records for row in record.rounds)
        up, down = (sum(total_bytes(r, f"bytes_{way}") for r in records) for way in ("up", "down"))
        falls = [
            f"{fall.objective} from share {fall.lower:.3g} to {fall.higher:.3g} "
            f"by {formats.number(fall.fall)}"
            for fall in monotone_violations(front)
        ]
        collapsed = sum(point.collapse is not None for point in front.points)
        columns[method] = {
            "models": str(len(front.points)),
            "seeds": str(len({point.seed for point in front.points})),
            **_hypervolumes(method, front, row_rewards, notes),
            "not dominated in its front": str(int(non_dominated(front.rewards()).sum())),
            **{f"ρ {name}": text for name, text in correlations(front).items()},
            "falls": "; ".join(falls) or "none",
            "collapsed": str(collapsed),
            "trainings": str(sum(bool(record.rounds) for record in records)),
            "up": formats.size(up),
            "down": formats.size(down),
            "time in rounds": formats.duration(seconds),
        }
    first = next(iter(fronts.values()))
    reference = formats.shares(first.reference)
    sizes = {"reference": reference, "num_resamples": NUM_RESAMPLES}
    title, text = prose("methods", **sizes, unit=unit(fronts), **_words(fronts))
    cells = {method: list(own.values()) for method, own in columns.items()}
    names = {"figure": list(next(iter(columns.values())))}
    return Table.of(title, text, names | cells, words=frozenset(range(1, len(cells) + 1)))


def _hypervolumes(
    method: str, front: Front, row_rewards: RowRewards, notes: list[str]
) -> dict[str, str]:
    """Returns the hypervolume of all points, its interval over prompts, and that of each seed."""
    volume = interval = by_seed = formats.MISSING
    try:
        volume = f"{front.hypervolume:.4f}"
        seeds = seed_hypervolumes(front)
        by_seed = formats.measure(Measure(seeds.mean, seeds.sd))
        if method in row_rewards:
            rewards, groups = row_rewards[method]
            # one seed for all methods and pages, so that rewriting a page changes no figure
            generator = np.random.default_rng(BOOTSTRAP_SEED)
            sampling: dict[str, Any] = {"generator": generator, "num_resamples": NUM_RESAMPLES}
            ends = bootstrap_hypervolume(rewards, front.reference, groups=groups, **sampling)
            interval = "{:.4f} to {:.4f}".format(*ends)
    except ValueError as error:
        notes.append(f"A hypervolume of {method} is missing: {error}")
    names = "hypervolume", "interval over prompts", "hypervolume by seed"
    return dict(zip(names, (volume, interval, by_seed), strict=True))


def correlations(front: Front) -> dict[str, str]:
    """Returns the rank correlation of preference and reward by objective, with its interval."""
    num_points = sum(point.preference is not None for point in front.points)
    values = preference_correlations(front)
    return {name: formats.correlation(values[name], num_points) for name in front.objectives}


def models(fronts: Fronts) -> Table:
    """Returns the table of all models, with the models that dominate each."""
    beaten = beaten_by(fronts)
    points = [(method, point) for method, front in fronts.items() for point in front.points]
    everyone = [point for _, point in points]
    columns: dict[str, list[str]] = {"model": [point.name for point in everyone]}
    if len(fronts) > 1:
        columns["method"] = [method for method, _ in points]
    columns["preference"] = [formats.shares(point.preference) for point in everyone]
    for name in objectives_of(fronts):
        columns[name] = [
            formats.measure(_measure(point.rewards[name], errors(fronts[method], point)[name]))
            for method, point in points
        ]
    extras = list(dict.fromkeys(name for point in everyone for name in point.scores))
    for name in extras:
        columns[score_label(name)] = [formats.number(p.scores.get(name)) for p in everyone]
    if any(isfinite(point.kl) for point in everyone):  # held-out pairs measure none
        columns["KL"] = [formats.number(point.kl) for point in everyone]
    if any(point.collapse for point in everyone):
        columns["collapsed"] = [point.collapse or "no" for point in everyone]
    columns["dominated by"] = [_names(beaten[method, point.name]) for method, point in points]
    words = (place for place, name in enumerate(columns) if name in ("method", "dominated by"))
    title, text = prose("models", notes=score_notes(extras), unit=unit(fronts), **_words(fronts))
    return Table.of(title, text, columns, words=frozenset(words))


def _measure(mean: float, error: Error) -> Measure:
    if isinstance(error, tuple):
        return Measure(mean, interval=(mean - error[0], mean + error[1]))
    return Measure(mean, error)


def _names(names: Sequence[str]) -> str:
    if len(names) > 2:
        return f"{names[0]} and {len(names) - 1} more"
    return ", ".join(names) or "none"
