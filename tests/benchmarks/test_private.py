"""Clients needed to keep a share of the gain, from shares that are known."""

from math import inf

import numpy as np
import pytest

from benchmarks.private import by_adapter, needed_clients, needed_table, next_levels


def levels(**shares):
    """Gains of one seed, 2 without noise: `levels(n100=0.5)` keeps half of it with 100 clients."""
    kept = {float(name.removeprefix("n")): np.array([2 * share]) for name, share in shares.items()}
    return {inf: np.array([2.0]), **kept}


@pytest.mark.parametrize("share", [-1.8, 0.0, 0.8])
def test_between_two_levels_nothing_is_told_apart(share):
    assert needed_clients(levels(n100=share, n1000=1.0), 0.9) == (100, 1000)


def test_a_level_that_keeps_the_gain_by_luck_below_one_that_does_not_is_no_answer():
    lucky = levels(n10=1.0, n100=0.8, n1000=1.0)
    assert needed_clients(lucky, 0.9) == (100, 1000)


def test_the_levels_bound_what_can_be_said():
    assert needed_clients(levels(n100=0.95, n1000=0.97), 0.9) == (0, 100)
    assert needed_clients(levels(n100=0.1, n1000=0.2), 0.9) == (1000, inf)


def gains(share):
    """The same gain with two seeds."""
    return [{"rewards": share}] * 2


def test_adapters_are_compared_at_both_epsilons_whatever_their_order():
    paired = {
        "large, 100 clients": gains(0.0),
        "large, 1000 clients": gains(1.0),
        "large, no noise": gains(1.0),
        "small, no noise": gains(0.5),
        "small, 10 clients": gains(0.0),
        "small, 100 clients": gains(0.5),
    }
    reverse = dict(reversed(paired.items()))
    for order in (paired, reverse):
        _, rows = needed_table(by_adapter(order), "rewards", 0.9, "large", (8, 2), 2.0)
        assert sorted(rows) == [
            ["large", "100 to 1,000 [100, 1,000]", "200 to 2,000 [200, 2,000]", "1"],
            ["small", "10 to 100 [10, 100]", "20 to 200 [20, 200]", "1 to 100 [1, 100]"],
        ]


@pytest.mark.parametrize(("true_number", "levels"), [(37, (10, 30, 100)), (640, (300, 1000, 3000))])
def test_bisecting_finds_a_cliff_wherever_it_lies_between_the_levels(true_number, levels):
    """Of true numbers whose ratio is 17 the levels that were run first tell 3 to 100 times."""
    paired = {"small, no noise": gains(1.0)}
    paired |= {f"small, {n} clients": gains(float(n >= true_number)) for n in levels}
    runs = 0
    while level := next_levels(by_adapter(paired), 0.5, 1.25).get("small"):
        paired[f"small, {level} clients"] = gains(float(level >= true_number))
        runs += 1
    _, rows = needed_table(by_adapter(paired), "rewards", 0.5, "small", (8, 2), 1.0)
    low, high = (float(n) for n in rows[0][1].split(" [")[0].split(" to "))
    assert low < true_number <= high <= 1.25 * low
    assert runs <= 4


def test_an_open_bracket_is_extended():
    paired = {"a, no noise": gains(1.0), "a, 100 clients": gains(0.0)}
    assert next_levels(by_adapter(paired), 0.5, 1.25) == {"a": 300}
    paired = {"a, no noise": gains(1.0), "a, 100 clients": gains(1.0)}
    assert next_levels(by_adapter(paired), 0.5, 1.25) == {"a": 33}


def test_a_ratio_is_a_bound_where_one_side_is():
    paired = {
        "large, no noise": gains(1.0),
        "large, 1000 clients": gains(1.0),
        "large, 100 clients": gains(0.8),
        "small, no noise": gains(1.0),
        "small, 10 clients": gains(1.0),
    }
    _, rows = needed_table(by_adapter(paired), "rewards", 0.9, "large", (8, 2), 2.0)
    assert rows[1] == ["small", "at most 10 [0, 10]", "at most 20 [0, 20]", "above 10 [10, ∞]"]
    _, rows = needed_table(by_adapter(paired), "rewards", 0.9, "small", (8, 2), 2.0)
    assert rows[0][-1] == "at most 0.1 [0, 0.1]"


def test_seeds_that_differ_widen_the_brackets():
    paired = {
        "large, no noise": gains(1.0),
        "large, 1000 clients": [{"rewards": 1.0}, {"rewards": 0.85}],
        "large, 100 clients": gains(0.0),
        "small, no noise": gains(1.0),
        "small, 100 clients": gains(1.0),
        "small, 10 clients": gains(0.0),
    }
    _, rows = needed_table(by_adapter(paired), "rewards", 0.9, "large", (8, 2), 1.0)
    assert rows[0][1] == "100 to 1,000 [100, ∞]"
    assert rows[1][-1] == "1 to 100 [1, ∞]"
