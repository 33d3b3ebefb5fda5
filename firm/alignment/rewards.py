"""Stage 3 of a local step: scores [M, B] of texts, and their calibration to rewards in [0, 1].

A reward function is any callable with TRL's signature; this module depends on no model. The
calibration to [0, 1] is fitted once to replies of the base model, frozen and shared by all clients:
with statistics per client, rewards would not be comparable across clients.
"""

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
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
from firm.alignment.event_loop import started
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
    objectives = list(reward_fns.items())
    groups = [[objectives[at] for at in group] for group in _same_calls([*reward_fns.values()])]
    batch = [prompt_of(prompt) for prompt in prompts], completions, completion_ids, trainer_state
    answers = _asked([_Question(group, *batch) for group in groups])()
    rows = {
        name: row
        for group, answer in zip(groups, answers, strict=True)
        for (name, _), (row, _) in zip(group, answer, strict=True)
    }
    return torch.stack([rows[name] for name in reward_fns])


def _same_calls(reward_fns: Sequence[RewardFn]) -> list[list[int]]:
    """Groups the indices of reward functions that can share a call."""
    groups: list[list[int]] = []
    for at, reward_fn in enumerate(reward_fns):
        same = (group for group in groups if _is_same_call(reward_fns[group[0]], reward_fn))
        group = next(same, None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    return groups


def _is_same_call(first: RewardFn, second: RewardFn) -> bool:
    (function, options), (other, others) = _source(first), _source(second)
    is_same = function == other if inspect.ismethod(function) else function is other
    return is_same and options == others


def _source(reward_fn: RewardFn) -> tuple[RewardFn, Mapping[str, Any]]:
    """Returns the underlying function and its options."""
    source = getattr(reward_fn, "source", None)
    return source if isinstance(source, tuple) else (reward_fn, {})


Arguments = dict[str, Any]
RawScores = tuple[torch.Tensor, list[bool] | None]
"""Scores [B] of an objective, and whether its reward function truncated each input."""


@dataclass(frozen=True)
class _Question:
    """Objectives that share calls of a reward function, and the replies to score."""

    objectives: Sequence[tuple[str, RewardFn]]
    """Names and reward functions with the same source."""
    prompts: Sequence[Prompt]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]] | None
    trainer_state: TrainerState | None

    def calls(self) -> list[tuple[list[int], Arguments]]:
        """Returns the indices and arguments of each call: one for texts, one for chats."""
        reads_prompts = getattr(self.objectives[0][1], "reads_prompts", False)
        is_text = [reads_prompts or prompt.text is not None for prompt in self.prompts]
        names = dict.fromkeys(column for prompt in self.prompts for column in prompt.columns)
        calls = []
        for form in set(is_text) or {True}:
            places = [at for at, own in enumerate(is_text) if own == form]
            prompts = [self.prompts[at] for at in places]
            replies: list[Any] = [self.completions[at] for at in places]
            arguments: Arguments = {
                **{name: [prompt.columns.get(name) for prompt in prompts] for name in names},
                "prompts": prompts if reads_prompts else [prompt.given for prompt in prompts],
                "completions": replies if form else [_as_message(reply) for reply in replies],
                "trainer_state": self.trainer_state or TrainerState(),
                "log_metric": partial(_log_metric, self.objectives[0][0]),
                "log_extra": partial(_log_extra, self.objectives[0][0]),
            }
            if self.completion_ids is not None:
                arguments["completion_ids"] = [[*self.completion_ids[at]] for at in places]
            calls.append((places, arguments))
        return calls


def _as_message(reply: str) -> list[ChatMessage]:
    return [{"role": "assistant", "content": reply}]


def _log_metric(reward: str, name: str, value: Any) -> None:
    """Logs a metric reported by a reward function, as TRL's trainer does."""
    logger.info("reward %r: %s = %s", reward, printable(name), printable(value))


def _log_extra(reward: str, column: str, values: Sequence[Any]) -> None:
    """Ignores a column for TRL's table of completions, since it may quote texts."""
    logger.debug("reward %r: the column %s is not kept", reward, printable(column))


def _asked(questions: Sequence[_Question]) -> Callable[[], list[list[RawScores]]]:
    """Calls the reward functions; returns a function that waits for the scores.

    It returns the scores for each question, by its objectives in order. Functions are called
    sequentially; coroutine functions run concurrently meanwhile.
    """
    calls = [(at, *call) for at, question in enumerate(questions) for call in question.calls()]
    finish = _called([(*questions[at].objectives[0], arguments) for at, _, arguments in calls])

    def answers() -> list[list[RawScores]]:
        results, truncated = finish()
        found: list[list[RawScores]] = []
        for at, question in enumerate(questions):
            own = [
                (places, values, cut)
                for (whose, places, _), values, cut in zip(calls, results, truncated, strict=True)
                if whose == at
            ]
            size = len(question.prompts)
            found.append([_answer(*objective, size, own) for objective in question.objectives])
        return found

    return answers


def _answer(
    name: str,
    reward_fn: RewardFn,
    num_replies: int,
    calls: Sequence[tuple[list[int], Any, list[bool] | None]],
) -> RawScores:
    """Combines the results of one or two calls into the scores [B] of an objective."""
    row, is_truncated, cut = torch.empty(num_replies), [False] * num_replies, None
    for places, values, cut in calls:
        row[places] = _checked(name, _selected(name, reward_fn, values), len(places))
        for place, own in zip(places, cut or (), strict=False):
            is_truncated[place] = own
    return row, None if cut is None else is_truncated


def _called(
    calls: Sequence[tuple[str, RewardFn, Arguments]],
) -> Callable[[], tuple[list[Any], list[list[bool] | None]]]:
    """Calls reward functions; returns a function that waits for the coroutines among them.

    It returns the results, and whether the functions truncated each input. Errors name the
    objective.
    """
    results: list[Any] = []
    truncated: list[list[bool] | None] = []

    def cut_by(name: str, reward_fn: RewardFn, arguments: Arguments) -> list[bool] | None:
        return _truncated(name, reward_fn, len(arguments["completions"]))

    with ExitStack() as stack:
        for call in calls:
            name, reward_fn, arguments = call
            with _reward_code(name):
                values = reward_fn(**arguments)
            if inspect.iscoroutine(values):
                stack.callback(values.close)  # in case another function raises before it is started
            results.append(values)
            truncated.append(cut_by(*call))
        stack.pop_all()
    waiting = [at for at, values in enumerate(results) if inspect.isawaitable(values)]
    if not waiting:
        return lambda: (results, truncated)
    awaited = started([_result(calls[at][0], results[at]) for at in waiting])

    def finish() -> tuple[list[Any], list[list[bool] | None]]:
        for at, values in zip(waiting, awaited(), strict=True):
            results[at] = values
            truncated[at] = cut_by(*calls[at])
        return results, truncated

    return finish


def _reward_code(name: str) -> AbstractContextManager[None]:
    # a full device is the machine's trouble: as an error of the reward, it would cost the client
    # its batch
    return user_code(f"reward {name!r}", _REMEDY, but=(torch.OutOfMemoryError,))


async def _result(name: str, values: Awaitable[Any]) -> Any:
    with _reward_code(name):
        return await values


def _selected(name: str, reward_fn: RewardFn, values: Any) -> Any:
    """Selects an objective's values from a function that returns a dict of lists."""
    output = getattr(reward_fn, "output", None)
    if not isinstance(values, Mapping):
        if isinstance(output, str):
            raise ValueError(
                f"reward {name!r} has the output {output!r}, but its function returned "
                f"{type(values).__name__}: return a dict of lists, or remove `output`."
            )
        return values
    wanted = (
        output if isinstance(output, str) else name.rpartition("/")[2]
    )  # "group/name" selects "name"
    if wanted not in values:
        returned = printable(", ".join(map(repr, values)) or "none", max_length=200)
        raise ValueError(
            f"reward {name!r} uses the output {wanted!r} of a function that returned the outputs "
            f"{returned}: set `output` to one of them, or return it."
        )
    return values[wanted]


def _checked(name: str, values: Any, num_completions: int) -> torch.Tensor:
    """Returns the values of a reward function, shape [B], float32, with NaN for None."""
    expected = f"return one finite number for each of the {num_completions} completions"
    or_none = "or None where the reward does not apply"
    if isinstance(values, str | bytes | Set | Mapping) or not hasattr(values, "__len__"):
        raise ValueError(f"reward {name!r} returned {type(values).__name__}: {expected}.")
    if len(getattr(values, "shape", ())) > 1:
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
    row = torch.tensor(
        numbers, dtype=torch.float64
    ).float()  # beyond float32's range becomes infinite
    finite = row.isfinite().tolist()
    broken = [at for at, value in enumerate(values) if value is not None and not finite[at]]
    if broken:
        raise ValueError(
            f"reward {name!r} returned {row[broken[0]].item()} at index {broken[0]} ({len(broken)} "
            f"of {num_completions} values are not finite): {expected}, even for unusual replies, "
            f"{or_none}."
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
        ValueError: When the method is unknown, or there are too few scores or they do not vary.
    """
    num_replies = scores.numel()
    scores = scores[~scores.isnan()]
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
    if not spread > math.ulp(1.0) * scores.abs().max().item():
        raise ValueError(
            f"the scores of {name!r} do not vary on {num_samples} calibration replies ({what} "
            f"{spread:.3g}): choose normalization 'none', use more replies, or repair the reward."
        )
    return Calibration(method, **figures, num_samples=num_samples)


def check_same(
    frozen: Mapping[str, Calibration],
    measured: Mapping[str, Calibration],
    *,
    tolerance: float = 0.05,
) -> None:
    """Checks that newly measured calibrations agree with the frozen ones.

    Parameters may differ by `tolerance` in units of the frozen calibration's width, since replies
    may differ slightly on another machine.

    Raises:
        ValueError: When they do not agree.
    """
    for name, calibration in frozen.items():
        width = calibration.scale if calibration.method == "sigmoid" else 1.0
        if calibration.method == "minmax":
            width = calibration.high - calibration.low
        now = measured[name]
        for figure in ("mean", "scale", "low", "high"):
            was, is_now = getattr(calibration, figure), getattr(now, figure)
            if now.method != calibration.method or abs(was - is_now) > tolerance * width:
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

    def rewards(self, objectives: Sequence[str], scores: torch.Tensor) -> torch.Tensor:
        """Returns the rewards [M, B] of scores; 0 for objectives without a reward function.

        Rewards are NaN where there is no score.
        """
        if self.calibrations is None:
            return scores
        rewards = scores.clone()
        for j, name in enumerate(objectives):
            if name in self.reward_fns:
                rewards[j] = self.calibrations[name](scores[j])
        return rewards


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
    completion_ids: Sequence[Sequence[int]]
    trainer_state: TrainerState | None = None


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
    finish = _scored_at_once([asked])
    return lambda: finish()[0]


def scored_together(
    asked: Sequence[ScoringRequest],
) -> list[Callable[[], Scored] | ValueError]:
    """Begins to score several batches of replies; returns for each as ``scored``, or the error.

    A reward model shared by several batches scores all their replies in one call. If that fails,
    each batch is tried separately.
    """
    try:
        finish = _scored_at_once(asked)
    except ValueError as error:
        if len(asked) == 1:
            return [error]
        return [result for each in asked for result in scored_together([each])]

    def own(at: int) -> Scored:
        try:
            return finish()[at]
        except ValueError:
            if len(asked) == 1:
                raise
            return scored(asked[at])()

    return [partial(own, at) for at in range(len(asked))]


def _scored_at_once(asked: Sequence[ScoringRequest]) -> Callable[[], list[Scored]]:
    askers = [
        (at, name, fn)
        for at, each in enumerate(asked)
        for name in each.objectives
        if (fn := each.judges.reward_fns.get(name)) is not None
    ]
    groups = [[askers[place] for place in group] for group in _same_calls([a[2] for a in askers])]
    # clients can share a call only at the same training progress, which is an argument
    groups = [
        [asker for asker in group if asked[asker[0]].trainer_state == state]
        for group in groups
        for state in _distinct([asked[asker[0]].trainer_state for asker in group])
    ]
    questions = [_joined_question(asked, group) for group in groups]
    answers = _asked(questions)

    @cache
    def finish() -> list[Scored]:
        results = [Scored(torch.zeros(len(e.objectives), len(e.completions)), {}) for e in asked]
        for group, question, own in zip(groups, questions, answers(), strict=True):
            start, slices = 0, {}
            for at in dict.fromkeys(at for at, _, _ in group):
                slices[at] = slice(start, start := start + len(asked[at].completions))
            for at, name, fn in group:
                row, truncated = own[question.objectives.index((name, fn))]
                results[at].scores[list(asked[at].objectives).index(name)] = row[slices[at]]
                if truncated is not None:
                    results[at].truncated[name] = truncated[slices[at]]
        return results

    return finish


def _joined_question(
    asked: Sequence[ScoringRequest], group: Sequence[tuple[int, str, RewardFn]]
) -> _Question:
    """Joins the replies of several requests into one question."""
    batches = [asked[at] for at in dict.fromkeys(at for at, _, _ in group)]
    return _Question(
        _distinct([(name, fn) for _, name, fn in group]),
        [prompt for batch in batches for prompt in batch.prompts],
        [completion for batch in batches for completion in batch.completions],
        [row for batch in batches for row in batch.completion_ids],
        batches[0].trainer_state,
    )


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Removes duplicates from values that need not be hashable."""
    return [value for at, value in enumerate(values) if value not in values[:at]]


def _truncated(name: str, reward_fn: RewardFn, count: int) -> list[bool] | None:
    """Returns whether a reward function truncated each of its latest inputs; None if unknown."""
    truncated = getattr(reward_fn, "truncated", None)
    if truncated is not None and len(truncated) != count:
        raise ValueError(
            f"reward {name!r} has {len(truncated)} entries in `truncated` for {count} completions; "
            "provide one for each input of the latest call, or remove the attribute."
        )
    return truncated


def reward_diagnostics(scores: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns diagnostics that reveal reward hacking and redundant rewards.

    Args:
        scores: Scores of B replies, shape [M, B]; NaN, where a reward does not apply, is ignored.
        lengths: Lengths of the replies in tokens, shape [B].

    Returns:
        "mean" and "spread" (standard deviation, 0 for a single score), shape [M], NaN without
        scores; "correlation" of each pair of objectives over the replies with both scores (01, 02,
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
        "correlation": torch.tensor(correlation, dtype=torch.float64),
        "length_correlation": torch.tensor(length_correlation, dtype=torch.float64),
    }


def _correlation(*rows: torch.Tensor) -> float:
    """Returns Pearson's correlation of two rows, float64 [B], over entries present in both."""
    both = torch.stack(rows)
    both = both[:, ~both.isnan().any(0)]
    centred = both - both.mean(1, keepdim=True)
    norms = centred.norm(dim=1)
    # rounding errors of equal values do not count as variation
    if not (norms > 1e-12 * both.abs().sum(1)).all():
        return math.nan
    first, second = centred / norms[:, None]
    return (first @ second).clamp(-1, 1).item()
