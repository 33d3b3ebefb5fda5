"""Writes the page of a sweep over preferences: its methods' fronts and how they came about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from numpy.typing import ArrayLike

from firm.fronts import (
    Front,
    Point,
    bootstrap_hypervolume,
    by_preference,
    check_comparable,
    dominators,
    mean_front,
    monotone_violations,
    non_dominated,
    preference_correlations,
    seed_hypervolumes,
)
from firm.fronts.hypervolume import volumes
from firm.report import formats
from firm.report.cloud_plane import KL, Cloud, Spot, cloud_planes
from firm.report.comparison import Measure
from firm.report.drawing import Key, Panel, axis_title, error_bars, nonempty, style_layout
from firm.report.fmoo_figures import AlgorithmRuns, Series, mean_and_error, series_panel
from firm.report.ledger import total_bytes
from firm.report.page import (
    Section,
    drawn_part,
    drawn_section,
    left_out_notes,
    replace_file,
)
from firm.report.paper import PaperFigure, plane_figure
from firm.report.record import Record, rewards_of
from firm.report.settings import (
    Setting,
    cost_section,
    drift_section,
    ledger_table,
    settings_of,
    shared_samples,
    weights_section,
)
from firm.report.study_page import Choice, Study, Table, drawn_table, render_study
from firm.run.errors import UserError

NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 0
NUM_SHOWN = 6
"""Preferences whose trainings the figures show at first; the reader chooses others."""
METHOD = (
    "Every point is a run with a folder of its own, which holds its configuration, every row of "
    "its metrics, its samples and its adapter. Rewards are mapped to [0, 1] by one calibration, "
    "frozen before training. The fronts lie beside the page as METHOD.front.json."
)

TRAINING_SECTIONS = {"weights": weights_section, "drift": drift_section, "cost": cost_section}
"""How the models came about."""

Runs = Mapping[str, Mapping[str, Record]]
"""Records by method and name of the point."""


def write_front_page(
    path: Path,
    fronts: Mapping[str, Front],
    *,
    runs: Runs,
    prompt_rewards: Mapping[str, ArrayLike] | None = None,
    config: str = "",
    title: str = "A sweep over preferences",
) -> Path:
    """Writes the page of a sweep, in one step, and returns its path.

    Args:
        path: The page to be, in the folder of the fronts' files, so that the adapters' paths on it
            hold.
        fronts: The front of each method, by its name.
        runs: The runs behind the points.
        prompt_rewards: Rewards of each method's points by test prompt, shape [N, P, M], for the
            hypervolume's interval; without them there is none.
        config: The sweep's configuration as YAML.
        title: Heading.

    Raises:
        UserError: There are no points, or the fronts are not comparable; nothing is written then.
    """
    study = front_study(
        fronts, runs=runs, prompt_rewards=prompt_rewards or {}, config=config, title=title
    )
    replace_file(path, render_study(study))
    return path


def front_study(
    fronts: Mapping[str, Front],
    *,
    runs: Runs,
    prompt_rewards: Mapping[str, ArrayLike],
    config: str,
    title: str,
) -> Study:
    """Returns what the page of a sweep says; the arguments are those of `write_front_page`."""
    _check(fronts)
    first = next(iter(fronts.values()))
    keys = {name: _key(fronts, name) for name in fronts}
    notices: list[str] = []
    part = partial(drawn_part, notices)
    settings = part("The trainings", lambda: _settings(fronts, runs), [])
    own = [
        drawn_section("The trade-off", lambda: _plane_section(fronts), name="trade-off"),
        drawn_section(
            "The hypervolume", lambda: _hypervolume_section(fronts, runs), name="hypervolume"
        ),
        drawn_section("The preference", lambda: _preference_section(fronts), name="preference"),
    ]
    made = [
        drawn_section(name.capitalize(), partial(draw, settings), name=name)
        for name, draw in TRAINING_SECTIONS.items()
        if settings
    ]
    # the trainings' figures have a line and a button for each method and preference
    choice_keys = [*keys.values(), *(setting.key for setting in settings)]
    samples, sample_names = part("The samples", lambda: shared_samples(settings), ([], []))
    notes: list[str] = []
    volume_table = drawn_table(
        "Hypervolume", lambda: _hypervolume_table(fronts, prompt_rewards, notes)
    )
    return Study(
        product="FIRM · sweep over preferences",
        title=title,
        summary=[*part("The summary", lambda: _summary(fronts), []), *notes],
        facts={
            "Methods": ", ".join(fronts),
            "Objectives": ", ".join(first.objectives),
            "Models": str(sum(len(front.points) for front in fronts.values())),
            "Seeds": ", ".join(
                map(str, sorted({p.seed for front in fronts.values() for p in front.points}))
            ),
            "Test prompts": str(first.num_prompts),
            "Reference point": _vector(first.reference),
            "Base model": _vector([first.base[name] for name in first.objectives]),
        },
        sections=[section for section in own if section.is_shown],
        details=[section for section in made if section.is_shown],
        table=volume_table,
        tables=[
            drawn_table("Preference and outcome", lambda: _steering_table(fronts)),
            drawn_table("Models", lambda: _point_table(fronts)),
            drawn_table("Cost of a front", lambda: _cost_table(fronts, runs)),
            *([drawn_table("Communication", lambda: ledger_table(settings))] if settings else []),
        ],
        method=METHOD,
        config=config,
        choice=Choice(
            choice_keys,
            frozenset(key.label for key in choice_keys[: len(keys) + NUM_SHOWN]),
            {"show all": [key.label for key in choice_keys]},
        ),
        samples=samples,
        sample_names=sample_names,
        notices=[*notices, *left_out_notes(*_records(runs))],
    )


def front_clouds(fronts: Mapping[str, Front]) -> list[Cloud]:
    """Returns where the models of each front are, and their means over the seeds.

    A model or mean is dominated where one of its kind, of any front, is at least as good in all
    rewards and better in one. The path joins the means that no mean of their own front dominates,
    by rising first reward.
    """
    beaten = _dominators(fronts)
    rows = {
        (method, preference): mean
        for method, front in fronts.items()
        for preference, mean in mean_front(front).items()
    }
    kept = dict(zip(rows, non_dominated(list(rows.values())), strict=True)) if rows else {}
    clouds = []
    for index, (method, front) in enumerate(fronts.items()):
        models, means = [], []
        for preference, points in by_preference(front).items():
            spots = [
                _spot(method, point, is_dominated=bool(beaten[method, point.name]))
                for point in points
            ]
            if len(spots) > 1:
                models += spots
            mean = _mean_spot(method, preference, front, points, spots)
            means.append(replace(mean, is_dominated=not kept[method, preference]))
        models += [
            _spot(method, point, is_dominated=bool(beaten[method, point.name]))
            for point in front.points
            if point.preference is None
        ]
        path = _path(front) if len(front.objectives) == 2 else []
        clouds.append(Cloud(_key(fronts, method), index, models, means, path))
    return clouds


def front_figure(fronts: Mapping[str, Front]) -> PaperFigure:
    """Returns the plane of comparable fronts as a figure for a paper."""
    first = next(iter(fronts.values()))
    return plane_figure(front_clouds(fronts), first.objectives, base=base_place(first))


def base_place(front: Front) -> dict[str, float]:
    """Returns where the base model is."""
    return {KL: 0.0, **front.base}


def reference_place(front: Front) -> dict[str, float]:
    """Returns where hypervolumes begin."""
    return dict(zip(front.objectives, front.reference, strict=True))


def _records(runs: Runs) -> list[Record]:
    """The runs, each once: methods may share some."""
    found = {record.path: record for records in runs.values() for record in records.values()}
    return list(found.values())


def _check(fronts: Mapping[str, Front]) -> None:
    empty = [name for name, front in fronts.items() if not front.points]
    if not fronts or empty:
        raise UserError(
            f"a sweep's page needs points of every method, got none of "
            f"{', '.join(empty) or 'any'}; run them first."
        )
    (first_name, first), *others = fronts.items()
    for name, front in others:
        try:
            check_comparable(first, front)
        except ValueError as error:
            raise UserError(f"{first_name} and {name}: {error}") from None


def _key(fronts: Mapping[str, Front], method: str) -> Key:
    return AlgorithmRuns(method, list(fronts).index(method), ()).key


def _dominators(fronts: Mapping[str, Front]) -> dict[tuple[str, str], list[str]]:
    """By method and point the points of all fronts that dominate it."""
    places = [(method, point.name) for method, front in fronts.items() for point in front.points]
    scores = np.concatenate([front.scores() for front in fronts.values()])
    return {
        place: [places[index][1] for index in above]
        for place, above in zip(places, dominators(scores), strict=True)
    }


def _spot(method: str, point: Point, *, is_dominated: bool) -> Spot:
    facts = {
        "method": method,
        "preference": _shares(point.preference),
        "seed": str(point.seed),
        "KL": f"{formats.number(point.kl)} nats",
        "adapter": point.adapter,
        **({"collapsed": point.collapse} if point.collapse else {}),
    }
    return Spot({**point.rewards, KL: point.kl}, point.errors, facts, is_dominated=is_dominated)


def _mean_spot(
    method: str,
    preference: Sequence[float],
    front: Front,
    points: Sequence[Point],
    spots: Sequence[Spot],
) -> Spot:
    if len(points) == 1:
        return spots[0]
    values = {name: [point.rewards[name] for point in points] for name in front.objectives}
    collapsed = [point for point in points if point.collapse]
    facts = {
        "method": method,
        "preference": _shares(preference),
        "mean over": f"{len(points)} seeds, ± standard error",
        "KL": f"{formats.number(fmean(point.kl for point in points))} nats",
        **({"collapsed": f"{len(collapsed)} of {len(points)}"} if collapsed else {}),
    }
    return Spot(
        {name: fmean(entries) for name, entries in values.items()}
        | {KL: fmean(point.kl for point in points)},
        {name: stdev(entries) / len(entries) ** 0.5 for name, entries in values.items()},
        facts,
    )


def _path(front: Front) -> list[int]:
    """The means that no mean of this front dominates, by rising first reward."""
    means = np.array(list(mean_front(front).values()))
    if not len(means):
        return []
    kept = np.flatnonzero(non_dominated(means))
    return kept[np.argsort(means[kept, 0])].tolist()


def _settings(fronts: Mapping[str, Front], runs: Runs) -> list[Setting]:
    """The runs that trained, by method and preference."""
    grouped: dict[str, list[Record]] = {}
    for method, front in fronts.items():
        for preference, points in by_preference(front).items():
            records = [runs[method][p.name] for p in points if p.name in runs.get(method, {})]
            trained = [record for record in records if record.rounds]
            if trained:
                grouped[f"{method} ({_shares(preference)})"] = trained
    # colours of their own, after those of the methods
    return settings_of(grouped, first=len(fronts)) if grouped else []


# --- Sections -------------------------------------------------------------------------------------


def _plane_section(fronts: Mapping[str, Front]) -> Section:
    first = next(iter(fronts.values()))
    panels = cloud_planes(
        "front",
        front_clouds(fronts),
        first.objectives,
        base=base_place(first),
        reference=reference_place(first),
    )
    joined = (
        " A line joins a method's means that none of its own means beats."
        if len(first.objectives) == 2
        else ""
    )
    return Section(
        "trade-off",
        "The trade-off",
        "Models on the test prompts, one method in each colour. Up and to the right is better. "
        "Large: the mean over the seeds of a preference with one standard error, over the prompts "
        f"where there is one seed; small: the seeds.{joined} Hollow: another one of its kind, of "
        "any method, is better in all rewards. The star is the base model.",
        panels,
        [],
    )


def _hypervolume_section(fronts: Mapping[str, Front], runs: Runs) -> Section:
    """The hypervolume of each method on the validation prompts after every round."""
    series = []
    for method, front in fronts.items():
        try:
            table = volumes_by_round(front, runs.get(method, {}))
        except ValueError:  # more than three objectives without moocore; the table says so
            table = {}
        if table:
            means, errors = mean_and_error(np.array(list(table.values())).T)
            xs = np.array(list(table), dtype=float)
            series.append(Series(_key(fronts, method), xs, means, errors))
    panel = series_panel(
        "hypervolume",
        "Hypervolume on the validation prompts",
        series,
        y_title="hypervolume",
        num_bands=len(series),
    )
    return Section(
        "hypervolume",
        "The hypervolume over the rounds",
        "What the models of all preferences dominate together after a round, measured from the "
        "reference point; round 0 is the base model. Mean over the seeds, with one standard error "
        "where there are several. A method whose models are in part means of others, which have "
        "no rounds, is left out.",
        nonempty([panel]),
        [],
    )


def volumes_by_round(front: Front, records: Mapping[str, Record]) -> dict[int, list[float]]:
    """Returns each seed's hypervolume on the validation prompts after every round.

    Args:
        front: Whose objectives and reference point these are; points without a preference are
            left out.
        records: The runs by the points' names.

    Returns:
        Values [S] by round, where every run was evaluated; empty where a run has no rounds.
    """
    by_seed: dict[int, list[dict[int, list[float]]]] = {}
    for point in front.points:
        record = records.get(point.name)
        if record is None or not record.rounds:
            return {}
        rewards = {
            row["round"]: means
            for row in record.evaluations.get("validation", [])
            if (means := rewards_of(row, front.objectives)) is not None
        }
        by_seed.setdefault(point.seed, []).append(rewards)
    everyone = [rewards for rows in by_seed.values() for rewards in rows]
    rounds = sorted(set.intersection(*(set(rewards) for rewards in everyone)))
    corner = np.array(front.reference)
    return {
        at: [
            float(volumes(np.array([rewards[at] for rewards in rows]) - corner))
            for _, rows in sorted(by_seed.items())
        ]
        for at in rounds
    }


def _preference_section(fronts: Mapping[str, Front]) -> Section:
    """Each objective's reward against its share of the preference."""
    objectives = next(iter(fronts.values())).objectives
    panels = []
    for index, objective in enumerate(objectives):
        traces = []
        for method, front in fronts.items():
            groups = by_preference(front)
            traces += _share_traces(
                _key(fronts, method).label,
                _key(fronts, method).color,
                [(preference[index], points) for preference, points in groups.items()],
                objective,
            )
        layout = style_layout(
            300,
            {
                "title": axis_title(f"share of the preference for {objective}"),
                "range": [-0.04, 1.04],
            },
            {"title": axis_title("mean reward in [0, 1]")},
        )
        panels.append(Panel(f"share-{objective}", objective, {"data": traces, "layout": layout}))
    return Section(
        "preference",
        "Does the preference steer?",
        "Reward on the test prompts against the share that the preference gives the objective. "
        "Large: mean over all models with this share; small: the models. A method that steers "
        "rises from left to right.",
        panels,
        [],
    )


def _share_traces(
    label: str,
    color: str,
    groups: Sequence[tuple[float, Sequence[Point]]],
    objective: str,
) -> list[dict]:
    levels: dict[float, list[float]] = {}
    for share, points in groups:
        levels.setdefault(share, []).extend(point.rewards[objective] for point in points)
    shares = sorted(levels)
    singles = [(share, y) for share in shares for y in levels[share] if len(levels[share]) > 1]
    errors = [
        stdev(levels[s]) / len(levels[s]) ** 0.5 if len(levels[s]) > 1 else None for s in shares
    ]
    common = {"type": "scatter", "legendgroup": escape(label)}
    hover = "share %{x:.3~g}: %{y:.3f}<extra></extra>"
    traces = [
        common
        | {
            "mode": "lines+markers",
            "x": shares,
            "y": [fmean(levels[share]) for share in shares],
            "name": escape(label),
            "error_y": error_bars(errors, color),
            "line": {"color": color, "width": 2},
            "marker": {"color": color, "size": 8},
            "hovertemplate": f"{escape(label)}<br>{hover}",
        },
        common
        | {
            "mode": "markers",
            "x": [share for share, _ in singles],
            "y": [y for _, y in singles],
            "name": escape(f"{label}, models"),
            "marker": {"color": color, "size": 5, "opacity": 0.6},
            "showlegend": False,
            "hovertemplate": f"{escape(label)}<br>{hover}",
        },
    ]
    return [trace for trace in traces if trace["x"]]


# --- Tables ---------------------------------------------------------------------------------------


def _hypervolume_table(
    fronts: Mapping[str, Front], prompt_rewards: Mapping[str, ArrayLike], notes: list[str]
) -> Table:
    """The hypervolumes; why one is missing is put into the notes."""
    rows = []
    for method, front in fronts.items():
        told = [
            _or_note(value, method, notes)
            for value in (
                lambda front=front: f"{front.hypervolume:.4f}",
                lambda front=front: _seed_volumes(front),
            )
        ]
        has_interval = told[0] != formats.MISSING and method in prompt_rewards
        interval = _interval(front, prompt_rewards[method]) if has_interval else formats.MISSING
        num_seeds = len({point.seed for point in front.points})
        num_kept = int(non_dominated(front.scores()).sum())
        kept = f"{num_kept} of {len(front.points)}"
        rows.append([method, told[0], interval, told[1], str(num_seeds), kept])
    first = next(iter(fronts.values()))
    return Table(
        "Hypervolume",
        f"What the models on the test prompts dominate, measured from the reference point "
        f"{_vector(first.reference)}. All: every point of every seed together. The interval, 95 % "
        f"of {NUM_RESAMPLES} resamples of the prompts for these very models, says nothing on other "
        "seeds. By seed: mean ± standard deviation of each seed's own front.",
        [
            "method",
            "all",
            "interval over prompts",
            "by seed",
            "seeds",
            "not dominated in its front",
        ],
        rows,
    )


def _or_note(value: Callable[[], str], method: str, notes: list[str]) -> str:
    """The cell, or a dash with the reason among the notes."""
    try:
        return value()
    except ValueError as error:
        note = f"{method} has no hypervolume of some kind: {error}"
        if note not in notes:
            notes.append(note)
        return formats.MISSING


def _seed_volumes(front: Front) -> str:
    found = seed_hypervolumes(front)
    return formats.measure(Measure(found.mean, found.sd))


def _interval(front: Front, rewards: ArrayLike) -> str:
    low, high = bootstrap_hypervolume(
        rewards,
        front.reference,
        generator=np.random.default_rng(BOOTSTRAP_SEED),
        num_resamples=NUM_RESAMPLES,
    )
    return f"{low:.4f} to {high:.4f}"


def _steering_table(fronts: Mapping[str, Front]) -> Table:
    """Whether preferences steer, in figures and words, and how many models collapsed."""
    objectives = next(iter(fronts.values())).objectives
    rows = []
    for method, front in fronts.items():
        correlations = preference_correlations(front)
        num_collapsed = sum(point.collapse is not None for point in front.points)
        rows.append(
            [
                method,
                *(formats.number(correlations[name], is_signed=True) for name in objectives),
                f"{num_collapsed} of {len(front.points)}",
                _violations(front),
            ]
        )
    return Table(
        "Preference and outcome",
        "Spearman's rank correlation of an objective's share of the preference and its reward, "
        "over all models; 1 is perfect steering. The falls are places where the mean reward is "
        "lower at a higher share.",
        ["method", *(f"ρ {name}" for name in objectives), "collapsed", "falls"],
        rows,
        words=frozenset({len(objectives) + 2}),
    )


def _violations(front: Front) -> str:
    falls = [
        f"{fall.objective} from share {fall.lower:.3g} to {fall.higher:.3g} "
        f"by {formats.number(fall.fall)}"
        for fall in monotone_violations(front)
    ]
    return "; ".join(falls) or "none"


def _point_table(fronts: Mapping[str, Front]) -> Table:
    """Every model."""
    objectives = next(iter(fronts.values())).objectives
    beaten = _dominators(fronts)
    extras = dict.fromkeys(
        name for front in fronts.values() for point in front.points for name in point.scores
    )
    labels = ["parse rate" if n == "parse" else n.replace("true_", "true ", 1) for n in extras]
    points = [(method, point) for method, front in fronts.items() for point in front.points]
    columns = [("model", [point.name for _, point in points])]
    if len(fronts) > 1:
        columns.append(("method", [method for method, _ in points]))
    columns.append(("preference", [_shares(point.preference) for _, point in points]))
    for name in objectives:
        measures = [Measure(point.rewards[name], point.errors[name]) for _, point in points]
        columns.append((name, [formats.measure(measure) for measure in measures]))
    for name, label in zip(extras, labels, strict=True):
        columns.append((label, [formats.number(point.scores.get(name)) for _, point in points]))
    columns.append(("KL", [formats.number(point.kl) for _, point in points]))
    if any(point.collapse for _, point in points):
        columns.append(("collapsed", [point.collapse or "no" for _, point in points]))
    columns.append(("dominated by", [_names(beaten[method, p.name]) for method, p in points]))
    return Table(
        "Models",
        "On the test prompts: rewards in [0, 1] ± standard error over the prompts, raw scores "
        "beside them, KL from the base model in nats per reply. Dominated by models of any "
        "method.",
        [label for label, _ in columns],
        [list(row) for row in zip(*(cells for _, cells in columns), strict=True)],
        words=frozenset({1, len(columns) - 1} if len(fronts) > 1 else {len(columns) - 1}),
    )


def _names(names: Sequence[str]) -> str:
    if len(names) > 2:
        return f"{names[0]} and {len(names) - 1} more"
    return ", ".join(names) or "none"


def _cost_table(fronts: Mapping[str, Front], runs: Runs) -> Table:
    """What each method's runs sent and how long they trained."""
    rows = []
    for method, front in fronts.items():
        records = [runs[method][p.name] for p in front.points if p.name in runs.get(method, {})]
        up, down = (sum(total_bytes(r, key) for r in records) for key in ("bytes_up", "bytes_down"))
        seconds = sum(row.get("seconds") or 0 for record in records for row in record.rounds)
        trained = sum(bool(record.rounds) for record in records)
        rows.append(
            [
                method,
                str(len(front.points)),
                str(trained),
                formats.size(up),
                formats.size(down),
                formats.duration(seconds),
            ]
        )
    return Table(
        "Cost of a front",
        "Measured bytes and the time spent in rounds, of all runs of a method together. Means of "
        "adapters are models that need no training.",
        ["method", "models", "trainings", "up", "down", "time in rounds"],
        rows,
    )


# --- Words ----------------------------------------------------------------------------------------


def _summary(fronts: Mapping[str, Front]) -> list[str]:
    sentences = []
    for method, front in fronts.items():
        preferences = by_preference(front)
        steer = [
            f"{name} {formats.number(value, is_signed=True)}"
            for name, value in preference_correlations(front).items()
            if value is not None
        ]
        text = f"{method}: {len(front.points)} models of {len(preferences)} preferences"
        if steer:
            text += f", rank correlation of preference and reward {', '.join(steer)}"
        num_collapsed = sum(point.collapse is not None for point in front.points)
        sentences.append(f"{text}; {num_collapsed or 'none'} collapsed.")
    return sentences


def _shares(preference: Sequence[float] | None) -> str:
    if preference is None:
        return "none"
    return ", ".join(f"{share:.3g}" for share in preference)


def _vector(values: Sequence[float]) -> str:
    return f"({', '.join(f'{value:.3g}' for value in values)})"
