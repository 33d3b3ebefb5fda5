"""Thresholds, neighbours and keys of secure sums."""

from dataclasses import replace
from itertools import combinations

import pytest
from scipy.stats import hypergeom

from firm.federation.options.secure.protocol import (
    SECURITY_BITS,
    KeyRing,
    PrivateKeys,
    assumed_colluders,
    check_keys,
    plan_sum,
    session_of,
    sparse_graph,
    threshold,
)


def _keys(names, run="run", round_number=1):
    ring = KeyRing.generate(names)
    return {name: PrivateKeys().public(name, run, round_number, ring) for name in names}, ring


@pytest.mark.parametrize("count", range(2, 9))
def test_two_sets_that_open_sums_share_a_client_that_does_not_collude(count):
    for colluders in range(count - 1):
        fewest = threshold(count, colluders)
        assert fewest <= count
        assert 2 * fewest > count + colluders  # both secrets of a client take as many shares
        sets = list(combinations(range(count), fewest))
        assert min(len(set(a) & set(b)) for a in sets for b in sets) > colluders


@pytest.mark.parametrize(("count", "colluders"), [(2, 1), (3, 2), (3, 5)])
def test_a_sum_that_hides_nothing_is_refused(count, colluders):
    with pytest.raises(ValueError, match="hides nothing from"):
        threshold(count, colluders)


@pytest.mark.parametrize(
    ("count", "fewest", "honest"), [(2, 2, 2), (3, 3, 2), (10, 7, 4), (100, 67, 34)]
)
def test_by_default_a_third_may_collude(count, fewest, honest):
    keys, _ = _keys([f"c{index}" for index in range(count)])
    plan = plan_sum(1, keys, num_colluders=assumed_colluders(None, count))
    assert (plan.threshold, plan.num_honest, plan.share_threshold) == (fewest, honest, fewest)
    assert all(len(near) == count - 1 for near in plan.neighbours.values())


@pytest.mark.parametrize(("count", "colluders"), [(100, 5), (200, 20), (1000, 100)])
def test_few_neighbours_are_drawn_anew_and_hold_few_enough_colluders(count, colluders):
    degree, shares = sparse_graph(count, colluders)
    assert degree < count - 1
    # a server with f colluders has both secrets of a client if 2 t' <= k + 1 + those near it
    near = 2 * shares - (degree + 1)
    failure = hypergeom.sf(near - 1, count - 1, colluders, degree)
    assert count * failure <= 2.0**-SECURITY_BITS
    plans = []
    for _ in range(2):
        keys, _ = _keys([f"c{index}" for index in range(count)])
        plans.append(plan_sum(1, keys, num_colluders=colluders, neighbours="few"))
    for plan in plans:
        assert {len(near) for near in plan.neighbours.values()} == {degree}
        assert all(
            name in plan.neighbours[other]
            for name, near in plan.neighbours.items()
            for other in near
        )
        assert plan.share_threshold == shares
    assert plans[0].neighbours != plans[1].neighbours


def test_few_neighbours_are_all_where_a_third_of_a_hundred_collude():
    assert sparse_graph(100, 33) is None
    keys, _ = _keys(list("abcdefgh"))
    plans = [plan_sum(1, keys, num_colluders=2, neighbours=near) for near in ("few", "all")]
    assert plans[0].neighbours == plans[1].neighbours


def test_a_session_is_of_one_round_and_of_all_keys():
    keys, _ = _keys(list("abc"))
    others, _ = _keys(list("abc"))
    sessions = {
        session_of(1, keys),
        session_of(2, keys),
        session_of(1, {**keys, "c": others["c"]}),
        session_of(1, {**keys, "c": replace(keys["c"], signature=others["c"].signature)}),
        session_of(1, {name: keys[name] for name in "ab"}),
    }
    assert len(sessions) == 5
    assert session_of(1, dict(reversed(keys.items()))) in sessions


def test_keys_are_checked_for_their_signatures_and_for_being_different():
    keys, ring = _keys(list("abc"))
    check_keys(keys, "run", 1, ring)
    for run, number in (("run", 2), ("other", 1)):
        with pytest.raises(ValueError, match="not signed by its site"):
            check_keys(keys, run, number, ring)

    class SameKeys:
        """Lets another client's keys pass as signed."""

        def check(self, client, statement, signature):
            pass

    with pytest.raises(ValueError, match="two clients of a sum have the same key"):
        check_keys({**keys, "c": keys["b"]}, "run", 1, SameKeys())
