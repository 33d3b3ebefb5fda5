"""The chosen model meets the requirements, and no other one that does has larger rewards."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.fronts import Front, Point
from firm.fronts.certificate import Certificate
from firm.fronts.confidence import half_width, lower_bound
from firm.fronts.nearest import sound
from firm.fronts.requirements import (
    Requirement,
    best_meeting,
    certify,
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
            errors={name: draw.uniform(0.005, 0.05) for name in (*NAMES, "kl")},
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


def margin(parts, requirements, count=5):
    """The smallest margin by Student's bounds that hold for all requirements and models at once."""
    widths = half_width(1, 8, 1 - 0.05 / count / len(requirements))

    def own(point, each):
        value = {**point.rewards, "kl": point.kl}[each.name]
        error = widths * point.errors[each.name]
        return each.margin(value - error if each.is_minimum else value + error)

    return min(sum(s * own(p, r) for p, s in parts) for r in requirements)


def value(parts, weights):
    shares = np.array(weights) / sum(weights)
    return sum(s * shares @ [p.rewards[n] for n in NAMES] for p, s in parts)


@pytest.mark.slow
@given(seeds, st.floats(0.1, 0.8), st.sampled_from([(0, 1), (1, 1), (1, 3)]), st.booleans())
def test_no_mixture_that_meets_the_requirements_is_better(seed, bound, weights, is_mixed):
    front = make_front(seed)
    requirements = [Requirement("a", True, bound), Requirement("kl", False, 5.5)]
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


def certificate(front, text, parts, confidence=0.95):
    return certify(front, parts, parse_requirements(text, front), confidence=confidence)


def alone(front, at=0):
    return [(front.points[at], 1.0)]


def test_a_bound_is_one_sided_and_student_s_for_all_models_at_once():
    front = make_front(0)
    point = front.points[0]
    width = half_width(1, 8, 1 - 0.05 / 5)
    low, high = (certificate(front, f"a{sign}=0.5", alone(front)).bounds[0] for sign in "><")
    assert low.bound == pytest.approx(point.rewards["a"] - width * point.errors["a"])
    assert high.bound == pytest.approx(point.rewards["a"] + width * point.errors["a"])
    assert (low.mean, low.num_prompts) == (pytest.approx(point.rewards["a"]), 8)
    assert certificate(front, "a>=0.5", alone(front)).num_models == 5


def test_five_successes_of_five_are_no_certainty():
    front = make_front(0, count=1)
    point = replace(front.points[0], rewards={"a": 1.0, "b": 0.5})
    maps = {name: {"method": "sigmoid"} for name in NAMES}
    errors = replace(point, errors={"a": 0.0, "b": 0.1})
    front = replace(front, points=(errors,), calibrations=maps, num_prompts=5)
    (bound,) = certificate(front, "a>=0.5", alone(front)).bounds
    assert bound.bound == pytest.approx(0.05 ** (1 / 5), abs=1e-6)  # Clopper and Pearson, 0.549
    kl = replace(front, points=(replace(errors, errors={**errors.errors, "kl": 0.0}),))
    assert not certificate(kl, "kl<=100", alone(kl)).passes  # not bounded, and no spread
    with pytest.raises(ValueError, match="nothing is known about kl <= 100"):
        meeting(kl, parse_requirements("kl<=100", kl), confidence=0.95, is_mixed=False)


@pytest.mark.parametrize("confidence", [0.1, 0.5, 1.0, float("nan")])
def test_a_confidence_that_is_none_is_refused(confidence):
    front = make_front(1)
    requirements = parse_requirements("a>=0.1", front)
    with pytest.raises(ValueError, match=r"confidence must be greater than 0\.5 and less than 1"):
        best_meeting(front, requirements, [1, 1], confidence=confidence, is_mixed=True)
    with pytest.raises(ValueError, match="confidence must be greater"):
        certify(front, alone(front), requirements, confidence=confidence)


def measured(rng, means, *, num=60):
    """A front of models with true means of "a", each measured on validation and test prompts."""
    points, values = [], {"test": {}, "validation": {}}
    for at, mean in enumerate(means):
        share = at / max(1, len(means) - 1)
        for split in values:
            own = rng.beta(4 * mean, 4 * (1 - mean), num)
            values[split][f"p{at}"] = {"a": tuple(own.tolist()), "b": (0.5 - 0.1 * share,) * num}
        rewards = {"a": float(np.mean(values["test"][f"p{at}"]["a"])), "b": 0.5 - 0.1 * share}
        errors = {"a": 0.02, "b": 0.02}
        points.append(Point(f"p{at}", (share, 1 - share), 0, rewards, errors, {}, 1.0, "x"))
    maps = {name: {"method": "sigmoid"} for name in NAMES}
    base = dict.fromkeys(NAMES, 0.1)
    return Front(
        NAMES, tuple(points), (0.0, 0.0), maps, base, "FIRM", num,
        test_values=values["test"], validation_values=values["validation"],
    )  # fmt: skip


def test_a_model_is_chosen_on_validation_prompts_and_certified_on_test_prompts():
    front = measured(np.random.default_rng(0), [0.2, 0.5, 0.8])
    requirements = parse_requirements("a>=0.6", front)
    parts = meeting(front, requirements, confidence=0.95, is_mixed=False)
    found = certificate(front, "a>=0.6", parts)
    (bound,) = found.bounds
    values = np.array(front.test_values[parts[0][0].name]["a"])
    assert bound.bound == pytest.approx(lower_bound(values, 0.95, is_bounded=True))
    assert found.num_models == 1
    assert found.passes
    # the test prompts chose nothing: others of them do not change the choice, but the verdict
    worse = {name: {"a": (0.5,) * 60, "b": (0.5,) * 60} for name in front.test_values}
    other = replace(front, test_values=worse)
    assert meeting(other, requirements, confidence=0.95, is_mixed=False) == parts
    assert not certificate(other, "a>=0.6", parts).passes
    assert "fail: a >= 0.6 (bound 0." in certificate(other, "a>=0.6", parts).describe()


def test_shares_of_several_replies_have_a_bound_and_other_scores_say_that_they_have_none():
    front = measured(np.random.default_rng(0), [0.5])
    (point,) = front.points
    point = replace(point, scores={"parse": 59.5 / 60, "worst": 59.5 / 60})
    splits = {}
    for split, own in (("validation", (1.0,) * 60), ("test", (1.0,) * 59 + (0.5,))):
        known = getattr(front, f"{split}_values")["p0"]
        splits[f"{split}_values"] = {"p0": {**known, "parse": own, "worst": own}}
    front = replace(front, points=(point,), **splits)
    found = certificate(front, "parse>=0.9", alone(front))
    assert found.passes
    assert 0.9 < found.bounds[0].bound < 0.95  # Clopper and Pearson's of 60 successes is 0.951
    unknown = certificate(front, "worst>=0.9", alone(front))
    assert "fail: worst >= 0.9 (no bound: too few values differ)," in unknown.describe()
    # a score of the user's under the name of a share
    scaled = replace(front, points=(replace(point, scores={"parse": 7.0}),))
    assert not scaled.is_bounded("parse")


@pytest.mark.slow
def test_rewards_of_a_conditioned_model_are_not_interpolated_across_one_that_was_measured():
    front = replace(measured(np.random.default_rng(0), [0.9, 0.05, 0.1]), is_conditioned=True)
    pairs = zip(front.points, (0.2, 0.1, 0.8), strict=True)
    rewards = {point.name: {**point.rewards, "b": b} for point, b in pairs}
    points = [replace(p, rewards=rewards[p.name]) for p in front.points]
    values = {
        name: {**own, "b": (rewards[name]["b"],) * 60} for name, own in front.test_values.items()
    }
    front = replace(front, points=tuple(points), test_values=values, validation_values=values)
    requirements = parse_requirements("a>=0.3", front)
    for collapse in (None, "one reply"):
        middle = replace(points[1], collapse=collapse)
        own = replace(front, points=(points[0], middle, points[2]))
        parts = meeting(own, requirements, [0, 1], confidence=0.95, is_mixed=True)
        assert points[2] not in [point for point, _ in parts]  # 0.35 of it would meet it, and gain
        runs = replace(own, is_conditioned=False)
        merged = meeting(runs, requirements, [0, 1], confidence=0.95, is_mixed=True)
        assert points[2] in [point for point, _ in merged]


def test_a_mixture_of_models_at_the_largest_reward_is_certified_whatever_its_shares_sum_to():
    front = measured(np.random.default_rng(0), [0.2, 0.5, 0.8])
    saturated = {name: {"a": (1.0,) * 59 + (0.5,), "b": (0.5,) * 60} for name in front.test_values}
    shares = [0.38325826103393995, 0.2660520505885787, 0.35068968837748143]
    assert np.array(shares) @ np.ones(3) > 1  # by rounding
    parts = list(zip(front.points, shares, strict=True))
    assert certificate(replace(front, test_values=saturated), "a>=0.6", parts).passes


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("has_validation", [False, True])
def test_wrong_passes_are_rare_although_the_best_of_many_was_taken(has_validation, is_mixed):
    """Nine models just below the requirement: one of them nearly always looks good enough."""
    rng, wrong, num_trials = np.random.default_rng(3), 0, 60
    for _ in range(num_trials):
        front = measured(rng, [0.595] * 9, num=40)
        if not has_validation:
            front = replace(front, validation_values={})
        requirements = parse_requirements("a>=0.6", front)
        try:
            parts = meeting(front, requirements, confidence=0.95, is_mixed=is_mixed)
        except ValueError:
            continue
        wrong += certify(front, parts, requirements, confidence=0.95).passes
    assert wrong / num_trials <= 0.05


def test_a_certificate_is_read_back_as_it_was(tmp_path):
    front = make_front(2)
    found = certificate(front, "a>=0.1, kl<=9", alone(front))
    found.save(tmp_path)
    assert Certificate.load(tmp_path) == found
    assert Certificate.load(tmp_path / "nowhere") is None


@pytest.mark.parametrize("changes", [{"bounds": []}, {"passes": False}])
def test_a_certificate_that_contradicts_its_bounds_is_refused(tmp_path, changes):
    front = make_front(2)
    certificate(front, "a>=0.01", alone(front, 4)).save(tmp_path)
    file = tmp_path / "certificate.json"
    content = json.loads(file.read_text())
    assert content["passes"]
    file.write_text(json.dumps({**content, **changes}))
    with pytest.raises(ValueError, match="must have bounds, and pass if all of them do"):
        Certificate.load(tmp_path)


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


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_model_of_low_kl_is_found_behind_one_of_larger_rewards(is_mixed):
    front = make_front(0, count=3)
    rewards = [{"a": 0.9, "b": 0.1}, {"a": 0.6, "b": 0.6}, {"a": 0.55, "b": 0.58}]
    points = [
        replace(point, rewards=own, errors={"a": 0.01, "b": 0.01, "kl": 0.1}, kl=kl)
        for point, own, kl in zip(front.points, rewards, (18.0, 20.0, 2.0), strict=True)
    ]
    front = replace(front, points=tuple(points))
    kept = {"confidence": 0.9, "is_mixed": is_mixed}
    parts = meeting(front, parse_requirements("kl<=5", front), (1, 0), **kept)
    assert points[2] in [point for point, _ in parts]
    assert sum(share * point.kl for point, share in parts) <= 5
    ((chosen, _),) = meeting(front, parse_requirements("b>=0.3", front), (0, 1), **kept)
    assert chosen == points[1]  # without a limit the dominated one is out
    # of equal rewards and less KL, but with wider bounds
    alike = [points[1], replace(points[1], name="alike", preference=(0.4, 0.6), kl=19.9)]
    alike[1] = replace(alike[1], errors={"a": 0.05, "b": 0.05, "kl": 0.1})
    both = replace(front, points=tuple(alike))
    (found, _), *_ = meeting(both, parse_requirements("a>=0.5, kl<=25", both), (0, 1), **kept)
    assert found.name == points[1].name
    without = replace(front, points=tuple(replace(p, kl=float("nan")) for p in points))
    with pytest.raises(ValueError, match="unknown 'kl'; choose from a, b, parse"):
        parse_requirements("kl<=5", without)


def test_weights_default_to_the_objectives_without_a_requirement():
    front = make_front(3)
    requirements = parse_requirements("a>=0.2", front)
    assert free_weights(front, requirements) == [0.0, 1.0]
    assert free_weights(front, parse_requirements("a>=0.2,b>=0.2", front)) == [1.0, 1.0]
    options = {"confidence": 0.95, "is_mixed": True}
    parts, _ = best_meeting(front, requirements, [0, 1], **options)
    assert meeting(front, requirements, **options) == parts
    with pytest.raises(ValueError, match=r"no mixture meets a >= 5 on test prompts .* misses by"):
        meeting(front, parse_requirements("a>=5", front), **options)
