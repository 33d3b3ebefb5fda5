"""The numbers of a sweep over preferences: hypervolumes, steering, models and costs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike

from firm.fronts.correlation import monotone_violations, preference_correlations
from firm.fronts.dominance import dominators, non_dominated
from firm.fronts.front import Front, Point, seed_hypervolumes
from firm.fronts.hypervolume import volumes
from firm.fronts.uncertainty import bootstrap_hypervolume
from firm.report import formats
from firm.report.drawing import Error
from firm.report.ledger import total_bytes
from firm.report.page import Table, prose
from firm.report.plane import ACCURACY, REWARD
from firm.report.record import Record, rewards_of, share_error
from firm.run.comparison import Measure, score_label, score_notes

NUM_RESAMPLES = 1000
BOOTSTRAP_SEED = 0

Runs = Mapping[str, Mapping[str, Record]]
"""Records by method and name of the point."""


def beaten_by(fronts: Mapping[str, Front]) -> dict[tuple[str, str], list[str]]:
    """Returns the names of the points of all fronts that dominate a point, by method and name."""
    places = [(method, point.name) for method, front in fronts.items() for point in front.points]
    scores = np.concatenate([front.rewards() for front in fronts.values()])
    return {
        place: [places[index][1] for index in above]
        for place, above in zip(places, dominators(scores), strict=True)
    }


def hypervolumes(
    fronts: Mapping[str, Front],
    row_rewards: Mapping[str, tuple[ArrayLike, ArrayLike | None]],
    notes: list[str],
) -> Table:
    """Returns the table of hypervolumes; reasons for missing ones are added to the notes."""
    rows = []
    for method, front in fronts.items():
        volume, by_seed = (
            _or_note(partial(text, front), method, notes)
            for text in (lambda front: f"{front.hypervolume:.4f}", _seed_volumes)
        )
        interval = formats.MISSING
        if volume != formats.MISSING and method in row_rewards:
            interval = _interval(front, *row_rewards[method])
        num_seeds = len({point.seed for point in front.points})
        kept = f"{int(non_dominated(front.rewards()).sum())} of {len(front.points)}"
        rows.append([method, volume, interval, by_seed, str(num_seeds), kept])
    first = next(iter(fronts.values()))
    headings = ["method", "all", "interval over prompts", "by seed", "seeds"]
    return Table(
        *prose(
            "hypervolumes", reference=formats.vector(first.reference), num_resamples=NUM_RESAMPLES
        ),
        [*headings, "not dominated in its front"],
        rows,
    )


def _or_note(value: Callable[[], str], method: str, notes: list[str]) -> str:
    """Returns the cell, or a dash after adding the reason to the notes."""
    try:
        return value()
    except ValueError as error:
        note = f"A hypervolume of {method} is missing: {error}"
        if note not in notes:
            notes.append(note)
        return formats.MISSING


def _seed_volumes(front: Front) -> str:
    seeds = seed_hypervolumes(front)
    return formats.measure(Measure(seeds.mean, seeds.sd))


def _interval(front: Front, rewards: ArrayLike, groups: ArrayLike | None) -> str:
    # one seed for all methods and pages, so that rewriting a page does not change its figures
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    low, high = bootstrap_hypervolume(
        rewards,
        front.reference,
        generator=generator,
        groups=groups,
        num_resamples=NUM_RESAMPLES,
    )
    return f"{low:.4f} to {high:.4f}"


def unit(fronts: Mapping[str, Front]) -> str:
    """Returns the unit of the objectives: rewards, or accuracies on pairs."""
    maps = next(iter(fronts.values())).calibrations.values()
    return ACCURACY if all(own.get("method", "pairs") == "pairs" for own in maps) else REWARD


def errors(front: Front, point: Point) -> dict[str, Error]:
    """Returns the error bars of a point: standard errors, or exact 95 % intervals of accuracies."""
    if unit({"": front}) == REWARD:
        return {**point.errors}
    counts = {name: front.num_scored.get(name, front.num_prompts) for name in front.objectives}
    return {name: share_error(point.rewards[name], count) for name, count in counts.items()}


def num_collapsed(front: Front) -> int:
    """Counts the models of a front that collapsed."""
    return sum(point.collapse is not None for point in front.points)


def steering(fronts: Mapping[str, Front]) -> Table:
    """Returns the table on how well preferences steer, with the number of collapsed models."""
    objectives = next(iter(fronts.values())).objectives
    rows = []
    for method, front in fronts.items():
        own = correlations(front)
        falls = [
            f"{fall.objective} from share {fall.lower:.3g} to {fall.higher:.3g} "
            f"by {formats.number(fall.fall)}"
            for fall in monotone_violations(front)
        ]
        collapsed = f"{num_collapsed(front)} of {len(front.points)}"
        signed = [own[name] for name in objectives]
        rows.append([method, *signed, collapsed, "; ".join(falls) or "none"])
    return Table(
        *prose("steering"),
        ["method", *(f"ρ {name}" for name in objectives), "collapsed", "falls"],
        rows,
        words=frozenset({len(objectives) + 2}),
    )


def correlations(front: Front) -> dict[str, str]:
    """Returns the rank correlation of preference and reward by objective, with its interval."""
    num_points = sum(point.preference is not None for point in front.points)
    values = preference_correlations(front)
    return {name: formats.correlation(value, num_points) for name, value in values.items()}


def models(fronts: Mapping[str, Front]) -> Table:
    """Returns the table of all models, with the models that dominate each."""
    objectives = next(iter(fronts.values())).objectives
    beaten = beaten_by(fronts)
    points = [(method, point) for method, front in fronts.items() for point in front.points]
    everyone = [point for _, point in points]
    columns: dict[str, list[str]] = {"model": [point.name for point in everyone]}
    if len(fronts) > 1:
        columns["method"] = [method for method, _ in points]
    columns["preference"] = [formats.shares(point.preference) for point in everyone]
    for name in objectives:
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
    return Table.of(
        "Models",
        f"{_model_text(fronts)} The dominating models may belong to any method. "
        f"{score_notes(extras)}".strip(),
        columns,
        words=frozenset(words),
    )


def _measure(mean: float, error: Error) -> Measure:
    if isinstance(error, tuple):
        return Measure(mean, interval=(mean - error[0], mean + error[1]))
    return Measure(mean, error)


def _model_text(fronts: Mapping[str, Front]) -> str:
    if unit(fronts) == ACCURACY:
        return f"On the test pairs: {ACCURACY}, with its exact 95 % interval, counted by prompts."
    return (
        "On the test prompts: rewards in [0, 1] ± standard error over the prompts, further raw "
        "scores, and KL from the base model in nats per reply."
    )


def _names(names: Sequence[str]) -> str:
    if len(names) > 2:
        return f"{names[0]} and {len(names) - 1} more"
    return ", ".join(names) or "none"


def costs(fronts: Mapping[str, Front], runs: Runs) -> Table:
    """Returns the bytes that each method's runs sent and their training time."""
    rows = []
    for method, front in fronts.items():
        records = [runs[method][p.name] for p in front.points if p.name in runs.get(method, {})]
        sent = [sum(total_bytes(r, key) for r in records) for key in ("bytes_up", "bytes_down")]
        seconds = sum(row.get("seconds") or 0 for record in records for row in record.rounds)
        counts = len(front.points), sum(bool(record.rounds) for record in records)
        sizes = [*map(formats.size, sent), formats.duration(seconds)]
        rows.append([method, *map(str, counts), *sizes])
    return Table(
        *prose("front-costs"),
        ["method", "models", "trainings", "up", "down", "time in rounds"],
        rows,
    )


def volumes_by_round(front: Front, records: Mapping[str, Record]) -> dict[int, list[float]]:
    """Returns each seed's hypervolume on the validation prompts after every round.

    Values [S] are given for rounds in which every run was evaluated; if a run has no rounds, the
    result is empty.
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
    # `volumes` measures from the origin
    corner = np.array(front.reference)
    return {
        at: [
            float(volumes(np.array([rewards[at] for rewards in rows]) - corner))
            for _, rows in sorted(by_seed.items())
        ]
        for at in rounds
    }
