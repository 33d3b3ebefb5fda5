"""Coroutines that stop where their work can be done together, and are else as if alone."""

import random
import time

import numpy as np
import pytest
import torch

from firm.federation.lockstep import clock, lockstep, together


class Squares:
    """A work that notes which arguments it got at once."""

    def __init__(self):
        self.calls = []

    def __call__(self, arguments):
        self.calls.append(list(arguments))
        return [ValueError("no square of 13") if a == 13 else a * a for a in arguments]


def test_what_waits_for_the_same_work_is_done_at_once_and_each_gets_its_own():
    squares = Squares()
    results = lockstep([lambda a=a: together(squares, together(squares, a)) for a in (2, 3, 4)])
    assert results == [16, 81, 256]
    assert squares.calls == [[2, 3, 4], [4, 9, 16]]


def test_alone_a_work_is_done_at_once():
    squares = Squares()
    assert together(squares, 5) == 25
    with pytest.raises(ValueError, match="no square of 13"):
        together(squares, 13)
    assert squares.calls == [[5], [13]]


def test_functions_of_unequal_length_end_when_they_are_done():
    squares = Squares()

    def powers(value, count):
        for _ in range(count):
            value = together(squares, value)
        return value

    assert lockstep([lambda n=n: powers(2, n) for n in (0, 3, 1)]) == [2, 256, 4]
    assert squares.calls == [[2, 2], [4], [16]]
    assert lockstep([]) == []


def test_those_who_were_served_least_go_first_and_are_joined_by_the_others():
    large, small = Squares(), Squares()

    def function(value):
        return together(small, together(large, value, size=2))

    results = lockstep([lambda v=v: function(v) for v in (1, 2, 3)], max_size=3)
    assert results == [1, 16, 81]
    assert large.calls == [[1], [2], [3]]
    assert small.calls == [[1, 4, 9]]


def test_other_keys_and_other_works_are_not_joined_and_what_is_urgent_goes_first():
    first, second = Squares(), Squares()
    functions = [
        lambda: together(first, 1, key="a"),
        lambda: together(first, 2, key="b"),
        lambda: together(first, 3, key="a"),
        lambda: together(second, 4, is_urgent=True),
    ]
    order = []
    for work in (first, second):
        work.calls = order
    assert lockstep(functions) == [1, 4, 9, 16]
    assert order == [[4], [1, 3], [2]]


def test_no_more_than_the_largest_size_is_done_at_once_but_one_always_is():
    squares = Squares()
    sizes = {1: 2, 2: 2, 3: 9, 4: 1}
    functions = [lambda a=a: together(squares, a, size=sizes[a]) for a in sizes]
    assert lockstep(functions, max_size=5) == [1, 4, 9, 16]
    assert squares.calls == [[1, 2, 4], [3]]


def test_an_error_of_one_is_its_own_and_may_be_handled_there():
    squares, seen = Squares(), []

    def careful():
        try:
            return together(squares, 13)
        except ValueError as error:
            seen.append(str(error))
            return together(squares, 1)

    assert lockstep([careful, lambda: together(squares, 2)]) == [1, 4]
    assert seen == ["no square of 13"]


def test_an_error_of_the_work_itself_is_everybody_s():
    def broken(arguments):
        raise RuntimeError("out of memory")

    def careful():
        with pytest.raises(RuntimeError, match="out of memory"):
            together(broken, 1)
        return "went on"

    assert lockstep([careful, careful]) == ["went on", "went on"]


def test_what_one_raises_ends_all_in_order():
    squares, left = Squares(), []

    def stopped():
        try:
            together(squares, 1, key="never done")
        finally:
            left.append(True)

    def failing():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lockstep([stopped, stopped, failing])
    assert left == [True, True]
    assert squares.calls == []


def test_random_numbers_and_the_gradient_mode_are_each_one_s_own():
    squares = Squares()

    def draws():
        return torch.rand(1).item(), np.random.rand(), random.random()

    def numbers(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        first = draws()
        with torch.no_grad():
            together(squares, 1)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
        return first, draws()

    alone = [numbers(seed) for seed in (1, 2)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert lockstep([lambda seed=seed: numbers(seed) for seed in (1, 2)]) == alone
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_the_clock_stands_still_while_others_run_and_shares_what_is_done_together(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    def slow(arguments):
        spend(8.0)
        return arguments

    def seconds(size, own):
        start = clock()
        spend(own)
        together(slow, None, size=size)
        spend(own)
        return clock() - start

    assert lockstep([lambda: seconds(3, 0.0), lambda: seconds(1, 5.0)]) == [6.0, 12.0]
    assert clock() == now[0] == 118.0
