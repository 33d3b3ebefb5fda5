"""Lockstep: functions that run as coroutines and stop where their work can be done together.

A function says ``together(work, argument)`` where it would call ``work([argument])``: it stops,
others run until they stop or end, and then one call of the work serves all who wait for the same.
The result comes back as if the function had been alone, and the code between stays as it is.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import greenlet
import numpy as np
import torch

T = TypeVar("T")
Work = Callable[[list[Any]], Sequence[Any]]
"""From the arguments of all who wait to their results, in the same order. A result that is an
exception is raised where it was asked for."""


@dataclass(frozen=True)
class _Request:
    work: Work
    argument: Any
    key: Any
    size: int
    is_urgent: bool


class _Member(greenlet.greenlet):
    """One function on its way, with the surroundings that others must not see."""

    result: Any = None
    outcome: tuple[str, Any] = ("run", None)
    """What it goes on with: a value, or an exception."""
    request: _Request | None = None
    num_served: int = 0
    seconds: float = 0.0
    """Those of its own so far, and its share of those that were spent together."""
    since: float = 0.0
    """When it went on last."""


def clock() -> float:
    """Returns seconds that pass as they would for a function that was alone, for differences.

    In ``lockstep`` they stand still while others run; what is done together counts by sizes.
    """
    member = greenlet.getcurrent()
    now = time.perf_counter()
    return member.seconds + now - member.since if isinstance(member, _Member) else now


def together(
    work: Work, argument: Any, *, key: Any = None, size: int = 1, is_urgent: bool = False
) -> Any:
    """Returns what a work gives for this argument, done together with those of others.

    Outside of ``lockstep`` it is done at once, for this argument alone.

    Args:
        work: What is done; that of others joins in if it is equal.
        argument: What for.
        key: Works with different keys are not joined.
        size: Of the argument, such as rows, of which only so many are taken at a time; positive.
        is_urgent: Whether it goes first, because it frees memory.
    """
    member = greenlet.getcurrent()
    if isinstance(member, _Member):
        member.request = _Request(work, argument, key, size, is_urgent)
        assert member.parent is not None
        return member.parent.switch()
    (result,) = work([argument])
    if isinstance(result, BaseException):
        raise result
    return result


def outcome_of(function: Callable[..., T], *arguments: Any) -> T | ValueError:
    """Returns what a function returns, or its ``ValueError``: a work's result for one of many."""
    try:
        return function(*arguments)
    except ValueError as error:
        return error


def lockstep(functions: Sequence[Callable[[], T]], *, max_size: int | None = None) -> list[T]:
    """Returns the results of all functions, which run as coroutines in this thread.

    Each sees torch's, numpy's and Python's global random numbers and torch's gradient mode as if it
    were alone. What one raises ends all.

    Args:
        functions: What is run; the order of equal works is theirs.
        max_size: The largest sum of sizes that is done together; one argument is done however large
            it is. None sets no limit.
    """
    members = [_Member(_keeping_result(function)) for function in functions]
    surroundings = dict.fromkeys(members, _surroundings())
    running = list(members)
    try:
        while running:
            _each(running, _go_on, surroundings)
            waiting = [member for member in members if member.request is not None]
            running = _served(waiting, max_size) if waiting else []
    finally:
        stopped = [member for member in members if member]  # on their way
        _each(stopped, _Member.throw, surroundings)  # their blocks are left in order
    return [member.result for member in members]


def _keeping_result(function: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        member = greenlet.getcurrent()
        assert isinstance(member, _Member)
        member.result = function()

    return run


def _go_on(member: _Member) -> None:
    how, value = member.outcome
    member.outcome = ("run", None)  # results may be large
    member.request, member.since = None, time.perf_counter()
    if how == "raise":
        member.throw(value)
    elif how == "run":
        member.switch()
    else:
        member.switch(value)
    member.seconds += time.perf_counter() - member.since


def _served(waiting: list[_Member], max_size: int | None) -> list[_Member]:
    """Does the work that the most urgent waits for, of all who wait for the same.

    Where no work is urgent, those who were served least go first, so that the others' next work
    can be joined with theirs.
    """
    requests = {member: member.request for member in waiting if member.request is not None}
    first = requests[min(requests, key=lambda m: (not requests[m].is_urgent, m.num_served))]
    chosen, total = [], 0
    for member, request in requests.items():
        is_same = request.work == first.work and request.key == first.key
        fits = max_size is None or not chosen or total + request.size <= max_size
        if is_same and fits:
            chosen.append(member)
            total += request.size
    start = time.perf_counter()
    try:
        results = first.work([requests[member].argument for member in chosen])
    except Exception as error:  # the work's own error is everybody's
        results = [error] * len(chosen)
    seconds = time.perf_counter() - start
    for member, result in zip(chosen, results, strict=True):
        member.num_served += 1
        member.seconds += seconds * requests[member].size / total
        member.outcome = ("raise" if isinstance(result, BaseException) else "return", result)
    return chosen


def _each(
    members: list[_Member],
    act: Callable[[_Member], object],
    surroundings: dict[_Member, tuple[Any, ...]],
) -> None:
    """Acts on every member among the global state that it left."""
    outer = _surroundings()
    try:
        for member in members:
            _surround(surroundings[member])
            act(member)
            surroundings[member] = _surroundings()
    finally:
        _surround(outer)


def _surroundings() -> tuple[Any, ...]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return (
        torch.is_grad_enabled(),
        torch.get_rng_state(),
        [torch.cuda.get_rng_state(device) for device in devices],
        np.random.get_state(),
        random.getstate(),
    )


def _surround(surroundings: tuple[Any, ...]) -> None:
    has_gradients, torch_state, cuda_states, numpy_state, python_state = surroundings
    torch.set_grad_enabled(has_gradients)
    torch.set_rng_state(torch_state)
    for device, state in enumerate(cuda_states):
        torch.cuda.set_rng_state(state, device)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
