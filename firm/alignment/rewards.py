"""Stage 3 of a local step: scores [M, B] of texts, and their calibration to rewards in [0, 1].

A reward function is any callable with TRL's signature; this module depends on no model. The
calibration to [0, 1] is fitted once to replies of the base model, frozen and shared by all clients:
with statistics per client, rewards would not be comparable across clients.
"""

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from itertools import combinations
from numbers import Real
from typing import Any, cast

import torch
from transformers import TrainerState

from firm.alignment.calibration import Calibration, Method
from firm.alignment.event_loop import start_coroutines
from firm.alignment.prompts import ChatMessage, Prompt, prompt_of
from firm.base.sanitize import printable
from firm.base.user_code import user_code

Values = Sequence[float | None] | Mapping[str, Sequence[float | None]]
RewardFn = Callable[..., Values | Awaitable[Values]]
"""Called with TRL's keyword arguments, such as `prompts`, `completions` and `completion_ids`, and
with the data's further fields. Returns a list of one number per completion, or None where the
reward does not apply; or a dict of such lists, from which an objective selects the one with its
name, or with the name in the function's attribute `output`."""

LOW_QUANTILE, HIGH_QUANTILE = 0.05, 0.95

_REMEDY = "repair the reward function"

logger = logging.getLogger(__name__)


def score(
    reward_fns: Mapping[str, RewardFn],
    prompts: Sequence[Prompt | str | Sequence[ChatMessage]],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    trainer_state: TrainerState | None = None,
) -> torch.Tensor:
    """Returns the scores of every objective, shape [M, B], float32 on the CPU.

    Scores are NaN where a reward function returned None because it does not apply. As in TRL,
    functions receive text prompts and their replies as strings, and chats and their replies as
    lists of messages; a batch with both takes two calls. The prompts' columns are passed by name,
    as lists with None for rows without them. Functions with a true attribute `reads_prompts`
    receive `Prompt` objects, and replies as strings. Objectives with the same function and equal
    options share a call; coroutine functions are awaited concurrently.

    Args:
        reward_fns: Reward functions by objective, in the order of the rows.
        prompts: B prompts, or texts or messages, which are converted by `prompt_of`.
        completions: B replies, cut before stop strings.
        completion_ids: Token ids of the B replies.
        trainer_state: Progress of training; by default the beginning.

    Raises:
        ValueError: When a reward function raises, or does not return one finite number or None per
            completion. The message names the objective and the index, and quotes only the error's
            text.
    """
    if len(prompts) != len(completions):
        raise ValueError(
            f"prompts and completions must have the same length, got {len(prompts)} and "
            f"{len(completions)}."
        )
    given = [prompt_of(prompt) for prompt in prompts]
    request = ScoringRequest(
        Judges(reward_fns), list(reward_fns), given, completions, completion_ids, trainer_state
    )
    return scored(request)().scores


Arguments = dict[str, Any]


@dataclass(frozen=True)
class _RewardCall:
    """A call of a reward function, which several objectives and requests may share."""

    objectives: list[tuple[str, RewardFn]]
    """Names and reward functions with the same source; messages name the first."""
    places: dict[int, list[int]]
    """Indices of the replies to score, by the index of their request."""
    arguments: Arguments

    @property
    def num_replies(self) -> int:
        return len(self.arguments["completions"])


def _plan_calls(requests: Sequence["ScoringRequest"]) -> list[_RewardCall]:
    """Returns the calls that score the requests; objectives with the same function share them."""
    groups: list[list[tuple[int, str, RewardFn]]] = []
    for at, request in enumerate(requests):
        for name, reward_fn in request.reward_fns.items():
            for group in groups:
                other, _, known = group[0]
                # the training progress is an argument, so that only clients at the same may share
                is_as_far = requests[other].trainer_state == request.trainer_state
                if is_as_far and _is_same_call(known, reward_fn):
                    group.append((at, name, reward_fn))
                    break
            else:
                groups.append([(at, name, reward_fn)])
    return [call for group in groups for call in _calls_of(group, requests)]


def _calls_of(
    group: Sequence[tuple[int, str, RewardFn]], requests: Sequence["ScoringRequest"]
) -> Iterator[_RewardCall]:
    """Yields a call for the chats and one for the texts among the replies of a group."""
    objectives: list[tuple[str, RewardFn]] = []
    for _, name, reward_fn in group:
        if (name, reward_fn) not in objectives:  # reward functions need not be hashable
            objectives.append((name, reward_fn))
    name, reward_fn = objectives[0]
    batches = {at: requests[at] for at, _, _ in group}
    trainer_state = next(iter(batches.values())).trainer_state or TrainerState()
    reads_prompts = getattr(reward_fn, "reads_prompts", False)
    is_text = {
        at: [reads_prompts or prompt.text is not None for prompt in batch.prompts]
        for at, batch in batches.items()
    }
    prompts = [prompt for batch in batches.values() for prompt in batch.prompts]
    columns = dict.fromkeys(column for prompt in prompts for column in prompt.columns)
    forms = {form for flags in is_text.values() for form in flags}
    for form in sorted(forms) or [True]:
        places = {
            at: [place for place, own in enumerate(flags) if own == form]
            for at, flags in is_text.items()
        }
        rows = [(batches[at], place) for at, own in places.items() for place in own]
        prompts = [batch.prompts[place] for batch, place in rows]
        replies: list[Any] = [batch.completions[place] for batch, place in rows]
        if not form:
            replies = [[{"role": "assistant", "content": reply}] for reply in replies]
        arguments: Arguments = {
            **{column: [prompt.columns.get(column) for prompt in prompts] for column in columns},
            "prompts": prompts if reads_prompts else [prompt.given for prompt in prompts],
            "completions": replies,
            "trainer_state": trainer_state,
            "log_metric": partial(_log_metric, name),
            "log_extra": partial(_log_extra, name),
        }
        known = [(b.completion_ids, place) for b, place in rows if b.completion_ids is not None]
        if known:
            arguments["completion_ids"] = [[*ids[place]] for ids, place in known]
        yield _RewardCall(objectives, places, arguments)


def _is_same_call(first: RewardFn, second: RewardFn) -> bool:
    (function, options), (other, others) = _source(first), _source(second)
    is_same = function == other if inspect.ismethod(function) else function is other
    return is_same and options == others


def _source(reward_fn: RewardFn) -> tuple[RewardFn, Mapping[str, Any]]:
    """Returns the underlying function and its options."""
    source = getattr(reward_fn, "source", None)
    return source if isinstance(source, tuple) else (reward_fn, {})


def _log_metric(reward: str, name: str, value: Any) -> None:
    """Logs a metric reported by a reward function, as TRL's trainer does."""
    logger.info("reward %r: %s = %s", reward, printable(name), printable(value))


def _log_extra(reward: str, column: str, values: Sequence[Any]) -> None:
    """Ignores a column for TRL's table of completions, since it may quote texts."""
    logger.debug("reward %r: the column %s is not kept", reward, printable(column))


def _begin_calls(calls: Sequence[_RewardCall]) -> Callable[[], list[tuple[Any, list[bool] | None]]]:
    """Calls reward functions; returns a function that waits for the coroutines among them.

    It returns the results, and which inputs the functions truncated. Errors name the objective.
    """
    results: list[Any] = []
    truncated: list[list[bool] | None] = []
    is_later: list[bool] = []
    """Whether a call has not set `truncated` yet; what other calls set meanwhile is not its own."""
    with ExitStack() as stack:
        for call in calls:
            name, reward_fn = call.objectives[0]
            before = getattr(reward_fn, "truncated", None)
            with _reward_code(name):
                values = reward_fn(**call.arguments)
            is_later.append(getattr(reward_fn, "truncated", None) is before)
            if inspect.iscoroutine(values):
                stack.callback(values.close)  # in case another function raises before it is started
            results.append(values)
            truncated.append(_truncated_inputs(call))
        stack.pop_all()
    waiting = [at for at, values in enumerate(results) if inspect.isawaitable(values)]
    if not waiting:
        return lambda: list(zip(results, truncated, strict=True))
    awaited = start_coroutines([_result(calls[at].objectives[0][0], results[at]) for at in waiting])

    def finish() -> list[tuple[Any, list[bool] | None]]:
        for at, values in zip(waiting, awaited(), strict=True):
            results[at] = values
            if is_later[at]:
                truncated[at] = _truncated_inputs(calls[at])
        return list(zip(results, truncated, strict=True))

    return finish


def _reward_code(name: str) -> AbstractContextManager[None]:
    # a full device is the machine's trouble: as an error of the reward, it would cost the client
    # its batch
    return user_code(f"reward {name!r}", _REMEDY, but=(torch.OutOfMemoryError,))


async def _result(name: str, values: Awaitable[Any]) -> Any:
    with _reward_code(name):
        return await values


def _select_output(name: str, reward_fn: RewardFn, values: Any) -> Any:
    """Selects an objective's values from a function that returns a dict of lists."""
    output = getattr(reward_fn, "output", None)
    if not isinstance(values, Mapping):
        if isinstance(output, str):
            raise ValueError(
                f"reward {name!r} has the output {output!r}, but its function returned "
                f"{type(values).__name__}: return a dict of lists, or remove `output`."
            )
        return values
    # "group/name" selects "name"
    wanted = output if isinstance(output, str) else name.rpartition("/")[2]
    if wanted not in values:
        returned = printable(", ".join(map(repr, values)) or "none", max_length=200)
        raise ValueError(
            f"reward {name!r} uses the output {wanted!r} of a function that returned the outputs "
            f"{returned}: set `output` to one of them, or return it."
        )
    return values[wanted]


def _check_values(name: str, values: Any, num_completions: int) -> torch.Tensor:
    """Returns the values of a reward function, shape [B], float32, with NaN for None."""
    expected = f"return one finite number for each of the {num_completions} completions"
    or_none = "or None where the reward does not apply"
    if isinstance(values, str | bytes | Set | Mapping) or not hasattr(values, "__len__"):
        raise ValueError(f"reward {name!r} returned {type(values).__name__}: {expected}.")
    if hasattr(values, "shape") and len(values.shape) != 1:
        raise ValueError(f"reward {name!r} returned shape {list(values.shape)}: {expected}, flat.")
    values = list(values.detach().tolist() if isinstance(values, torch.Tensor) else values)
    if len(values) != num_completions:
        raise ValueError(f"reward {name!r} returned {len(values)} values: {expected}, in order.")
    numbers = list(map(_as_float, values))
    odd = [at for at, number in enumerate(numbers) if number is None]
    if odd:
        raise ValueError(
            f"reward {name!r} returned {type(values[odd[0]]).__name__} at index {odd[0]} "
            f"({len(odd)} of {num_completions} values are not numbers): {expected}, {or_none}."
        )
    row = torch.tensor(numbers, dtype=torch.float64).float()  # large numbers become infinite
    finite = row.isfinite().tolist()
    broken = [at for at, value in enumerate(values) if value is not None and not finite[at]]
    if broken:
        raise ValueError(
            f"reward {name!r} returned {numbers[broken[0]]} at index {broken[0]} ({len(broken)} of "
            f"{num_completions} values are not finite in float32): {expected}, even for unusual "
            f"replies, {or_none}."
        )
    return row


def _as_float(value: Any) -> float | None:
    """Converts a number, or a tensor or array with one entry, to float, and None to NaN.

    Returns None for anything else.
    """
    if value is None:
        return math.nan
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)
    number = value.item() if size == 1 else value
    if not isinstance(number, Real | Decimal):
        return None
    try:
        return float(number)
    except OverflowError:
        return math.inf if cast(Any, number) > 0 else -math.inf
    except (TypeError, ValueError):  # a signalling NaN of Decimal, or a user-defined class
        return None


def values_or_none(scores: torch.Tensor) -> list[float | None]:
    """Returns scores [B] as a list, with None for NaN, as reward functions return them."""
    return [None if math.isnan(value) else value for value in scores.tolist()]


def calibrate(method: Method, scores: torch.Tensor, *, name: str = "reward") -> Calibration:
    """Fits a calibration to the scores [n] of base-model replies, ignoring NaN.

    Raises:
        ValueError: When the method is unknown, or there are too few scores, or they do not vary, or
            so little that rounding is most of it.
    """
    num_replies = scores.numel()
    scores = scores[~scores.isnan()]  # without replies to which it does not apply
    eps = torch.finfo(scores.dtype).eps if scores.is_floating_point() else 0.0
    scores = scores.double()  # spreads of large, nearly equal scores lose digits in float32
    num_samples = scores.numel()
    if method == "none":
        return Calibration("none", num_samples=num_samples)
    if method not in ("sigmoid", "minmax"):
        raise ValueError(
            f"unknown normalization {method!r} for {name!r}: choose sigmoid, minmax or none."
        )
    if num_samples < 2:
        raise ValueError(
            f"calibrating {name!r} requires at least 2 scores, got {num_samples} on {num_replies} "
            "calibration replies: use more replies, prompts to which the reward applies, or "
            "normalization 'none'."
        )
    if method == "sigmoid":
        figures = {"mean": scores.mean().item(), "scale": scores.std().item()}
        spread, what = figures["scale"], "standard deviation"
    else:
        quantiles = torch.tensor(
            [LOW_QUANTILE, HIGH_QUANTILE], dtype=scores.dtype, device=scores.device
        )
        low, high = torch.quantile(scores, quantiles).tolist()
        figures = {"low": low, "high": high}
        spread, what = high - low, "distance of the 5 % and 95 % quantiles"
    largest = scores.abs().max().item()
    if math.ulp(1.0) * largest < spread <= 16 * eps * largest:  # mostly of rounding
        raise ValueError(
            f"the scores of {name!r} differ too little for their size ({what} {spread:.3g}, "
            f"largest {largest:.3g}), of which float32 keeps seven digits: subtract a constant in "
            "the reward function."
        )
    if not spread > math.ulp(1.0) * largest:
        raise ValueError(
            f"the scores of {name!r} do not vary on {num_samples} calibration replies ({what} "
            f"{spread:.3g}): choose normalization 'none', use more replies, or repair the reward."
        )
    return Calibration(method, **figures, num_samples=num_samples)


SAME_CALIBRATION = 0.05
"""Difference between equal calibrations, relative to their width: replies may differ slightly on
another machine."""


def check_same(frozen: Mapping[str, Calibration], measured: Mapping[str, Calibration]) -> None:
    """Checks that newly measured calibrations agree with the frozen ones.

    Raises:
        ValueError: When they do not agree.
    """
    for name, calibration in frozen.items():
        width = calibration.scale if calibration.method == "sigmoid" else 1.0
        if calibration.method == "minmax":
            width = calibration.high - calibration.low  # rewards go from 0 to 1 there
        now = measured[name]
        for figure in ("mean", "scale", "low", "high"):
            was, is_now = getattr(calibration, figure), getattr(now, figure)
            if now.method != calibration.method or abs(was - is_now) > SAME_CALIBRATION * width:
                raise ValueError(
                    f"the rewards of {name!r} would not be comparable: their {calibration.method} "
                    f"calibration had {figure} {was:.4g}, base-model replies now give "
                    f"{is_now:.4g} ({now.method}); the base model or the reward model has changed: "
                    "restore it, or start a new run."
                )


@dataclass(frozen=True)
class Judges:
    """A client's reward functions and the calibrations of their scores."""

    reward_fns: Mapping[str, RewardFn]
    """Reward functions by objective; the client does not serve other objectives."""
    calibrations: Mapping[str, Calibration] | None = None
    """Calibrations by objective; None uses scores as rewards."""

    def conditional(self, objectives: Sequence[str], scores: torch.Tensor) -> torch.Tensor:
        """Returns scores [M, B], changed where a reward's condition on another does not hold.

        They are NaN there, or the reward's `otherwise`. Conditions compare unconditional scores.
        """
        own = scores.clone()
        for j, name in enumerate(objectives):
            reward_fn: Any = self.reward_fns.get(name)
            condition = getattr(reward_fn, "condition", None)
            if condition is not None:
                holds = condition.holds(scores[objectives.index(condition.name)])  # not for NaN
                otherwise = math.nan if reward_fn.otherwise is None else reward_fn.otherwise
                own[j] = own[j].where(holds, otherwise)
        return own

    def rewards(self, objectives: Sequence[str], scores: torch.Tensor) -> torch.Tensor:
        """Returns the rewards [M, B] of scores; 0 for objectives without a reward function.

        Rewards are NaN where there is no score.
        """
        if self.calibrations is None:
            return scores
        rewards = scores.clone()  # inputs are not changed
        for j, name in enumerate(objectives):
            if name in self.reward_fns:
                rewards[j] = self.calibrations[name](scores[j])
        return rewards

    def tail_shares(self, objectives: Sequence[str], scores: torch.Tensor) -> list[float]:
        """Returns the share of scores [M, B] in the upper tail of each objective's calibration.

        NaN for objectives without scores, or without a tail (`Calibration.tail`).
        """
        maps = self.calibrations or {}
        limits = [maps[name].tail if name in maps else math.nan for name in objectives]
        is_known = ~scores.isnan() & ~scores.new_tensor(limits).isnan()[:, None]
        above = (scores > scores.new_tensor(limits)[:, None]).to(scores)
        return above.where(is_known, math.nan).nanmean(1).tolist()


def filled(rewards: torch.Tensor, replies_per_prompt: int) -> torch.Tensor:
    """Replaces NaN in rewards [M, B] by a mean, so that these replies get no advantage.

    Uses the mean of the objective's rewards for the same prompt, else of the batch, else 0. Replies
    to the same prompt are adjacent.
    """
    groups = rewards.unflatten(1, (-1, replies_per_prompt))  # [M, P, G]
    for mean in (groups.nanmean(2, keepdim=True), groups.nanmean((1, 2), keepdim=True)):
        groups = torch.where(groups.isnan(), mean, groups)
    return groups.flatten(1).nan_to_num(nan=0.0)


@dataclass(frozen=True)
class ScoringRequest:
    """A batch of replies to score."""

    judges: Judges
    objectives: Sequence[str]
    prompts: Sequence[Prompt]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]] | None
    trainer_state: TrainerState | None = None

    @property
    def reward_fns(self) -> dict[str, RewardFn]:
        """Reward functions of the objectives that have one, by name."""
        fns = self.judges.reward_fns
        return {name: fns[name] for name in self.objectives if name in fns}


@dataclass(frozen=True)
class Scored:
    """Scores of a batch of replies."""

    scores: torch.Tensor
    """Scores [M, B]; 0 for objectives without a reward function, NaN where a reward does not
    apply."""
    truncated: dict[str, list[bool]]
    """Truncated inputs, as a flag per input, by objective, for reward models that report them."""


def scored(asked: ScoringRequest) -> Callable[[], Scored]:
    """Begins to score a batch of replies; returns a function that waits for the scores.

    Coroutine functions run meanwhile, all others are called at once.

    Raises:
        ValueError: As for ``score``; the returned function, too.
    """
    finish = _begin_all([asked])
    return lambda: finish()[0]


def scored_together(asked: Sequence[ScoringRequest]) -> list[Callable[[], Scored] | ValueError]:
    """Begins to score several batches of replies; returns for each as ``scored``, or the error.

    A reward model shared by several batches scores all their replies in one call. If that fails,
    each batch is tried separately.
    """
    try:
        finish = _begin_all(asked)
    except ValueError as error:
        if len(asked) == 1:
            return [error]
        return [result for each in asked for result in scored_together([each])]

    def finish_one(at: int) -> Scored:
        try:
            return finish()[at]
        except ValueError:
            if len(asked) == 1:
                raise
            return scored(asked[at])()

    return [partial(finish_one, at) for at in range(len(asked))]


def _begin_all(requests: Sequence[ScoringRequest]) -> Callable[[], list[Scored]]:
    """Begins to score several batches; returns a function that waits for all of them."""
    calls = _plan_calls(requests)
    outcomes = _begin_calls(calls)

    @cache
    def finish() -> list[Scored]:
        results = [
            Scored(torch.zeros(len(each.objectives), len(each.completions)), {})
            for each in requests
        ]
        for call, (values, truncated) in zip(calls, outcomes(), strict=True):
            for name, reward_fn in call.objectives:
                output = _select_output(name, reward_fn, values)
                row = _check_values(name, output, call.num_replies)  # of all requests in the call
                end = 0
                for at, places in call.places.items():
                    start, end = end, end + len(places)  # this request's part of the row
                    request, result = requests[at], results[at]
                    if request.reward_fns.get(name) != reward_fn:
                        continue
                    result.scores[list(request.objectives).index(name), places] = row[start:end]
                    if truncated is not None:
                        flags = result.truncated.setdefault(name, [False] * len(request.prompts))
                        for place, flag in zip(places, truncated[start:end], strict=True):
                            flags[place] = flag
        return results

    return finish


def _truncated_inputs(call: _RewardCall) -> list[bool] | None:
    """Returns whether a call's function truncated each of its inputs; None if unknown."""
    name, reward_fn = call.objectives[0]
    truncated = getattr(reward_fn, "truncated", None)
    if truncated is not None and len(truncated) != call.num_replies:
        raise ValueError(
            f"reward {name!r} has {len(truncated)} entries in `truncated` for {call.num_replies} "
            "completions; provide one for each input of the latest call, or remove the attribute."
        )
    return truncated


def reward_diagnostics(scores: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns diagnostics that reveal reward hacking and redundant rewards.

    Args:
        scores: Scores of B replies, shape [M, B]; NaN, where a reward does not apply, is ignored.
        lengths: Lengths of the replies in tokens, shape [B].

    Returns:
        "mean", "spread" (standard deviation, 0 for a single score) and "saturated" (share of the
        scores within 1 % of their range from the largest), shape [M], NaN without scores;
        "correlation" of each pair of objectives over the replies with both scores (01, 02,
        ..., 12, ...), shape [M(M-1)/2]; and "length_correlation" of each objective's scores with
        the lengths, shape [M]. Correlations are Pearson's, NaN if either side does not vary.
    """
    present = [row[~row.isnan()] for row in scores]
    rows = scores.double()
    correlation = [_correlation(first, second) for first, second in combinations(rows, 2)]
    length_correlation = [_correlation(row, lengths.to(rows)) for row in rows]
    return {
        "mean": torch.stack([row.mean() for row in present]),
        "spread": torch.stack([row.std() if len(row) > 1 else row.mean() * 0 for row in present]),
        "saturated": torch.stack([_saturated_share(row) for row in present]),
        "correlation": torch.tensor(correlation, dtype=torch.float64),
        "length_correlation": torch.tensor(length_correlation, dtype=torch.float64),
    }


def _saturated_share(scores: torch.Tensor) -> torch.Tensor:
    if not len(scores):
        return scores.new_tensor(math.nan)
    low, high = scores.min(), scores.max()
    return (scores >= high - 0.01 * (high - low)).to(scores).mean()


def _correlation(*rows: torch.Tensor) -> float:
    """Returns Pearson's correlation of two rows, float64 [B], over entries present in both."""
    both = torch.stack(rows)
    both = both[:, ~both.isnan().any(0)]  # replies with both scores
    centred = both - both.mean(1, keepdim=True)
    norms = centred.norm(dim=1)
    # rounding errors of equal values do not count as variation
    if not (norms > 1e-12 * both.abs().sum(1)).all():
        return math.nan
    first, second = centred / norms[:, None]  # unit vectors, [B] each
    return (first @ second).clamp(-1, 1).item()  # rounding may exceed 1
