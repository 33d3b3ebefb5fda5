"""The chosen model meets the requirements, and no other one that does has larger rewards."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.fronts import Front, Point
from firm.fronts.nearest import sound
from firm.fronts.requirements import (
    Requirement,
    best_meeting,
    free_weights,
    meeting,
    parse_requirements,
)

NAMES = ("a", "b")
seeds = st.integers(0, 10_000)


def make_front(seed, *, count=5):
    """A concave front of two objectives with errors, by rising share of the first."""
    draw = np.random.default_rng(seed)
    shares = np.linspace(0, 1, count)
    first = np.sort(draw.uniform(0.1, 0.9, count))
    second = np.sort(draw.uniform(0.1, 0.9, count))[::-1]
    points = [
        Point(
            name=f"p{at}",
            preference=(share, 1 - share),
            seed=0,
            rewards={"a": first[at], "b": second[at]},
            errors={name: draw.uniform(0.005, 0.05) for name in NAMES},
            scores={"parse": draw.uniform(0.5, 1)},
            kl=draw.uniform(0, 5),
            adapter="x",
        )
        for at, share in enumerate(shares.tolist())
    ]
    maps = {name: {} for name in NAMES}
    base = dict.fromkeys(NAMES, 0.1)
    return Front(NAMES, tuple(points), (0.0, 0.0), maps, base, "FIRM", 8)


def mixtures(front, *, is_mixed):
    points = sound(front).points
    pairs = [[(p, 1.0)] for p in points]
    if is_mixed:
        ordered = sorted(points, key=lambda point: point.preference)
        grid = np.linspace(0, 1, 201)[1:-1].tolist()
        pairs += [[(low, 1 - s), (high, s)] for low, high in pairwise(ordered) for s in grid]
    return pairs


def margin(parts, requirements):
    return min(sum(s * r.margin(p, 0.95) for p, s in parts) for r in requirements)


def value(parts, weights):
    shares = np.array(weights) / sum(weights)
    return sum(s * shares @ [p.rewards[n] for n in NAMES] for p, s in parts)


@given(seeds, st.floats(0.1, 0.8), st.sampled_from([(0, 1), (1, 1), (1, 3)]), st.booleans())
def test_no_mixture_that_meets_the_requirements_is_better(seed, bound, weights, is_mixed):
    front = make_front(seed)
    requirements = [Requirement("a", True, bound), Requirement("kl", False, 4.5)]
    parts, found = best_meeting(front, requirements, weights, confidence=0.95, is_mixed=is_mixed)
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert found == pytest.approx(margin(parts, requirements), abs=1e-6)
    others = mixtures(front, is_mixed=is_mixed)
    if found < 0:  # the nearest
        assert max(margin(each, requirements) for each in others) <= found + 1e-7
        return
    met = [each for each in others if margin(each, requirements) >= 0]
    assert all(value(each, weights) <= value(parts, weights) + 1e-7 for each in met)


@given(seeds)
def test_more_confidence_never_gains_reward(seed):
    front, requirement = make_front(seed), [Requirement("a", True, 0.3)]
    values = []
    for confidence in (0.6, 0.9, 0.99):
        parts, found = best_meeting(
            front, requirement, (0, 1), confidence=confidence, is_mixed=True
        )
        values.append(value(parts, (0, 1)) if found >= 0 else -np.inf)
    assert values == sorted(values, reverse=True) or np.allclose(values, sorted(values)[::-1])


def test_a_bound_is_one_sided():
    (point, *_) = make_front(0).points
    low = Requirement("a", True, 0.0).margin(point, 0.95)
    assert low == pytest.approx(point.rewards["a"] - 1.6449 * point.errors["a"], abs=1e-4)
    high = Requirement("a", False, 1.0).margin(point, 0.95)
    assert 1 - high == pytest.approx(point.rewards["a"] + 1.6449 * point.errors["a"], abs=1e-4)
    kl = Requirement("kl", False, 5.0)
    assert kl.margin(point, 0.95) == 5 - point.kl  # no standard error
    known = replace(point, errors={**point.errors, "kl": 0.1, "parse": 0.01})
    assert kl.margin(known, 0.95) == pytest.approx(5 - point.kl - 0.16449, abs=1e-4)
    parse = Requirement("parse", True, 0.0).margin(known, 0.95)
    assert parse == pytest.approx(point.scores["parse"] - 0.016449, abs=1e-5)


def test_requirements_are_read_as_they_are_written():
    front = make_front(1)
    text = "a>=0.6,kl <= 3, parse>= .9"
    assert list(map(str, parse_requirements(text, front))) == [
        "a >= 0.6",
        "kl <= 3",
        "parse >= 0.9",
    ]
    for wrong in ("c>=1", "a>0.5", "a>=", "a>=nan", ""):
        with pytest.raises(ValueError, match="require"):
            parse_requirements(wrong, front)


def test_weights_default_to_the_objectives_without_a_requirement():
    front = make_front(3)
    requirements = parse_requirements("a>=0.2", front)
    assert free_weights(front, requirements) == [0.0, 1.0]
    assert free_weights(front, parse_requirements("a>=0.2,b>=0.2", front)) == [1.0, 1.0]
    options = {"confidence": 0.95, "is_mixed": True}
    parts, _ = best_meeting(front, requirements, [0, 1], **options)
    assert meeting(front, requirements, **options) == parts
    with pytest.raises(ValueError, match=r"no mixture meets a >= 5 with 95% .* misses by \d\.\d+"):
        meeting(front, parse_requirements("a>=5", front), **options)
