"""Clients needed to keep a share of the gain, from shares that are known."""

from math import inf, sqrt

import numpy as np
import pytest

from benchmarks.private import by_adapter, needed_clients, needed_table


def levels(**shares):
    """Gains of one seed, 2 without noise: `levels(n100=0.5)` keeps half of it with 100 clients."""
    kept = {float(name.removeprefix("n")): np.array([2 * share]) for name, share in shares.items()}
    return {inf: np.array([2.0]), **kept}


def test_between_two_levels_the_share_is_linear_in_the_logarithm():
    assert needed_clients(levels(n100=0.8, n1000=1.0), 0.9) == pytest.approx(100 * sqrt(10))


def test_a_level_that_keeps_the_gain_by_luck_below_one_that_does_not_is_no_answer():
    lucky = levels(n10=1.0, n100=0.8, n1000=1.0)
    assert needed_clients(lucky, 0.9) == pytest.approx(100 * sqrt(10))


def test_the_levels_bound_what_can_be_said():
    assert needed_clients(levels(n100=0.95, n1000=0.97), 0.9) == 100
    assert needed_clients(levels(n100=0.1, n1000=0.2), 0.9) == 1000


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
            ["large", "794 [794, 794]", "1,589 [1,589, 1,589]", "1 [1, 1]"],
            ["small", "79 [79, 79]", "159 [159, 159]", "10 [10, 10]"],
        ]


def test_a_ratio_is_a_bound_where_one_side_is():
    paired = {
        "large, no noise": gains(1.0),
        "large, 1000 clients": gains(1.0),
        "large, 100 clients": gains(0.8),
        "small, no noise": gains(1.0),
        "small, 10 clients": gains(1.0),
    }
    _, rows = needed_table(by_adapter(paired), "rewards", 0.9, "large", (8, 2), 2.0)
    assert rows[1] == ["small", "< 10 [< 10, < 10]", "< 20 [< 20, < 20]", "> 31.6 [31.6, 31.6]"]
    _, rows = needed_table(by_adapter(paired), "rewards", 0.9, "small", (8, 2), 2.0)
    assert rows[0][-1] == "< 0.0316 [0.0316, 0.0316]"
