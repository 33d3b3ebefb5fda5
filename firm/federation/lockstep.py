"""Lockstep: functions that run as coroutines and pause where their work can be batched.

A function calls ``together(work, argument)`` instead of ``work([argument])``: it pauses, the other
functions run until they pause or return, and then a single call of ``work`` computes the results of
all functions that wait for it. Each function receives its result as if it had run alone, so the
rest of its code does not change.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import greenlet
import torch

from firm.base.randomness import GeneratorStates, global_states, set_global_states

T = TypeVar("T")
Work = Callable[[list[Any]], Sequence[Any]]
"""Maps the arguments of all waiting functions to their results, in the same order. A result that is
an exception is raised in the function that requested it."""


@dataclass(frozen=True)
class _Request:
    work: Work
    argument: Any
    key: Any
    size: int
    is_urgent: bool


class _Member(greenlet.greenlet):
    """A running function, with its own copy of the global state (``_surroundings``)."""

    result: Any = None
    outcome: tuple[str, Any] = ("run", None)
    """Way to resume the function: with a value or by raising an exception."""
    request: _Request | None = None
    num_served: int = 0
    seconds: float = 0.0
    """Time of the function itself so far, plus its share of batched work."""
    since: float = 0.0
    """When the function was last resumed."""


def clock() -> float:
    """Returns a clock reading in seconds, to measure a function's time as if it ran alone.

    Only differences are meaningful. In ``lockstep`` the clock stops while other functions run, and
    the time of batched work is divided by the sizes of the arguments.
    """
    member = greenlet.getcurrent()
    now = time.perf_counter()
    return member.seconds + now - member.since if isinstance(member, _Member) else now


def together(
    work: Work, argument: Any, *, key: Any = None, size: int = 1, is_urgent: bool = False
) -> Any:
    """Returns the result of ``work`` for this argument, batched with other functions' arguments.

    Outside of ``lockstep`` the work is done immediately, for this argument alone.

    Args:
        work: Function of a list of arguments; equal ones of several functions share a call.
        argument: This function's argument.
        key: Arguments with different keys are not batched.
        size: Size of the argument, such as its number of rows; positive. ``lockstep`` limits the
            total size of a call.
        is_urgent: Whether the work goes first, because it frees memory.
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
    """Returns the function's result, or its ``ValueError``, as one result of batched work."""
    try:
        return function(*arguments)
    except ValueError as error:
        return error


def lockstep(functions: Sequence[Callable[[], T]], *, max_size: int | None = None) -> list[T]:
    """Runs functions as coroutines in this thread, and returns their results.

    Each function sees torch's, numpy's and Python's global random numbers and torch's gradient mode
    as if it ran alone. An exception in one function ends all of them.

    Args:
        functions: Functions to run; batched arguments keep their order.
        max_size: Maximum total size of the arguments in one call of the work; a single argument may
            exceed it. None sets no limit.
    """
    members = [_Member(_result_keeper(function)) for function in functions]
    surroundings = dict.fromkeys(members, _surroundings())
    running = list(members)
    try:
        while running:
            _each(running, _resume, surroundings)
            waiting = [member for member in members if member.request is not None]
            running = _serve_most_urgent(waiting, max_size) if waiting else []
    finally:
        stopped = [member for member in members if member]  # not finished yet
        _each(stopped, _Member.throw, surroundings)  # runs their finally blocks
    return [member.result for member in members]


def _result_keeper(function: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        member = greenlet.getcurrent()
        assert isinstance(member, _Member)
        member.result = function()

    return run


def _resume(member: _Member) -> None:
    how, value = member.outcome
    member.outcome = ("run", None)  # frees the result, which may be large
    member.request, member.since = None, time.perf_counter()
    if how == "raise":
        member.throw(value)
    elif how == "run":
        member.switch()
    else:
        member.switch(value)
    member.seconds += time.perf_counter() - member.since


def _serve_most_urgent(waiting: list[_Member], max_size: int | None) -> list[_Member]:
    """Executes the most urgent work for all members waiting for it, and returns these members.

    If no work is urgent, the members served least often go first, so that the next work of the
    others can be batched with theirs.
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
    except Exception as error:  # an error of the whole call is raised in every member
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
    surroundings: dict[_Member, tuple[bool, GeneratorStates]],
) -> None:
    """Calls ``act`` on every member, with the member's own global state restored."""
    outer = _surroundings()
    try:
        for member in members:
            _surround(surroundings[member])
            act(member)
            surroundings[member] = _surroundings()
    finally:
        _surround(outer)


def _surroundings() -> tuple[bool, GeneratorStates]:
    return torch.is_grad_enabled(), global_states()


def _surround(surroundings: tuple[bool, GeneratorStates]) -> None:
    has_gradients, states = surroundings
    torch.set_grad_enabled(has_gradients)
    set_global_states(states)
