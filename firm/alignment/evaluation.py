"""Evaluation on held-out prompts: scores with standard errors, paired changes, KL and length.

Metrics are means over the rows of the data. Replies to the same prompt are not independent, whether
they are samples for one row or for several rows with the prompt, so standard errors are clustered
by prompt: the samples of a row are averaged, and the rows of a prompt form a cluster. Two policies
are compared row by row. Replies to which a reward does not apply are excluded from that reward's
metrics.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.adapter_files import Reference
from firm.alignment.advantages import kl_penalty
from firm.alignment.calibration import Calibration
from firm.alignment.hacking import ReplyText, hacking_signs
from firm.alignment.prompt_data import loose_text
from firm.alignment.prompts import Prompt, PromptFormat
from firm.alignment.rewards import RewardFn, score, values_or_none
from firm.alignment.rollout import Sampler, encode_prompts, rollout
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.rollout_engines import RolloutEngine
from firm.base.quantities import Quantity, register
from firm.base.randomness import RandomStream
from firm.base.schema import Count, Finite, NonNegative, Share


class MetricRecord(TypedDict):
    """A score as logged for an evaluation."""

    mean: Finite
    se: NotRequired[NonNegative | None]
    num_prompts: NotRequired[Count]


_quantity = partial(Quantity, kind="evaluation", section="")
register(
    _quantity("kl", "KL from the base model", "nats per reply"),
    _quantity("length", "Reply length", "tokens", type=NonNegative),
    _quantity("distinct_1", "Distinct words", "share", type=Share),
    _quantity("distinct_2", "Distinct word pairs", "share", type=Share),
    _quantity("end_share", "Replies that end by themselves", "share", type=Share),
    _quantity("kl_se", type=NonNegative),
    _quantity("commonest_share", type=Share),
    _quantity("empty_share", type=Share),
    *(_quantity(name, type=Count) for name in ("num_prompts", "num_rows", "num_samples")),
    _quantity(
        "rewards",
        "reward",
        "mean reward in [0, 1]",
        "Scores are mapped to rewards in [0, 1] by a calibration that is frozen before training.",
        type=dict[str, MetricRecord],
        by="objective",
        axis={},
        better="higher",
    ),
    *(_quantity(name, type=dict[str, MetricRecord]) for name in ("scores", "change")),
)


@dataclass(frozen=True)
class Replies:
    """One reply to each of N prompts."""

    completions: list[str]
    """Texts, cut before stop strings."""
    kl: torch.Tensor
    """KL from the base model, the sum over tokens of logp - ref_logp, [N]."""
    num_tokens: torch.Tensor
    """Length in tokens, [N]."""
    ended: torch.Tensor
    """True if the reply ended with an end token or stop string, bool [N]."""
    completion_ids: list[list[int]]
    """Token ids of the replies, end tokens included."""
    has_template: list[bool]
    """True if the reply contains a special token before its end."""


Generate = Callable[..., Replies]
"""Samples one reply to each of N prompts from the global generators.

Takes a list of prompts, and `on_progress` by keyword, like `sample_replies`.
"""


def sample_replies(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    config: RolloutConfig,
    reference: Reference,
    preference: Sequence[float] | None = None,
    engine: RolloutEngine | None = None,
    on_progress: Callable[[float], None] = lambda _: None,
) -> Replies:
    """Samples one reply to each of N prompts, with its KL from the base model.

    The model must be in evaluation mode, and becomes the base model inside the context `reference`.
    A conditioned policy replies at the preference, by default at equal shares. The engine is the
    model's own passes by default.
    """
    queries = encode_prompts(
        prompts, tokenizer, prompt_format=prompt_format, max_prompt_tokens=config.max_prompt_tokens
    )
    if preference is not None:
        shares = torch.tensor(preference) / sum(preference)  # [M]
        queries = replace(queries, preferences=shares.expand(len(prompts), -1))
    queries = queries.to(model.device)
    sampler = Sampler(model, tokenizer, config, reference, prompt_format, engine=engine)
    rollouts = rollout(sampler, queries, on_progress=on_progress)
    kl = kl_penalty(rollouts.logprobs, rollouts.reference_logprobs).sum(1)  # nats per reply, [N]
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Replies(
        rollouts.completions,
        kl,
        rollouts.num_tokens,
        rollouts.ended,
        rollouts.completion_ids,
        # the last token may be the reply's end
        [not special.isdisjoint(row[:-1]) for row in rollouts.completion_ids],
    )


class RowMetrics:
    """Scores and rewards of a policy on R rows of data, which may share prompts."""

    scores: dict[str, torch.Tensor]
    rewards: dict[str, torch.Tensor]
    num_samples: int

    @property
    def prompt_of_row(self) -> torch.Tensor:
        """Prompt index of each row, in order of first appearance, [R]."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.prompt_of_row)

    @property
    def num_prompts(self) -> int:
        """Number of distinct prompts, ignoring white space."""
        return len(self.prompt_of_row.unique())

    def by_row(self) -> dict[str, torch.Tensor]:
        """Returns metrics by row, each [R]: "rewards/NAME", "scores/NAME" and "prompt".

        Rewards and scores are NaN where they do not apply; "prompt" is the prompt index.
        """
        return {
            "prompt": self.prompt_of_row,
            **{f"rewards/{name}": values for name, values in self.rewards.items()},
            **{f"scores/{name}": values for name, values in self.scores.items()},
        }

    def reward_comparison(self, base: "RowMetrics") -> "dict[str, MetricComparison]":
        """Returns comparisons of the rewards in [0, 1] with the base model's, by objective."""
        return compare_by_name(base.rewards, self.rewards, self.prompt_of_row)

    def _row(self, round: int, split: str, **figures: Any) -> dict[str, Any]:
        """Returns the part of a row of `metrics.jsonl` that does not depend on the data's kind."""
        groups = self.prompt_of_row
        return {
            "kind": "evaluation",
            "round": round,
            "split": split,
            "num_prompts": self.num_prompts,
            "num_rows": self.num_rows,
            "num_samples": self.num_samples,
            "scores": summaries(self.scores, groups),
            "rewards": summaries(self.rewards, groups),
            **figures,
        }


@dataclass(frozen=True)
class Evaluation(RowMetrics):
    """Metrics of a policy on R rows of data, which may share prompts."""

    scores: dict[str, torch.Tensor]
    """Scores by objective and further metric, each [R]; NaN for rows without a score."""
    rewards: dict[str, torch.Tensor]
    """Rewards in [0, 1] by objective, each [R]; NaN for rows without a score."""
    kl: torch.Tensor
    """KL from the base model per reply, [R]."""
    length: torch.Tensor
    """Tokens per reply, [R]."""
    ended: torch.Tensor
    """Share of replies with an end token or stop string, [R]."""
    distinct_1: float
    """Distinct words as a share of all words in all replies."""
    distinct_2: float
    """Distinct word pairs as a share of all word pairs."""
    num_samples: int
    """Replies per row."""
    samples: list[dict[str, Any]]
    """First reply to each row: `prompt` as text, its `messages`, `completion` and `scores`, None
    for scores that do not apply."""
    has_template: list[bool]
    """True for rows whose first reply contains a special token before its end."""

    @property
    def prompt_of_row(self) -> torch.Tensor:
        """Prompt index of each row, in order of first appearance, [R]."""
        return prompt_indices(row["prompt"] for row in self.samples)

    def change(self, base: "Evaluation") -> dict[str, torch.Tensor]:
        """Returns scores minus another policy's, by name and row, [R].

        NaN for rows on which either policy has no score.

        Raises:
            ValueError: When the policies were evaluated on different rows or scores, or fewer than
                two prompts have scores of both.
        """
        prompts, base_prompts = ([row["prompt"] for row in e.samples] for e in (self, base))
        if prompts != base_prompts or self.scores.keys() != base.scores.keys():
            raise ValueError(
                f"cannot pair {len(prompts)} prompts with {', '.join(self.scores)} and "
                f"{len(base_prompts)} prompts with {', '.join(base.scores)}: evaluate both "
                "policies on the same prompts with the same scores."
            )
        change = {name: values - base.scores[name] for name, values in self.scores.items()}
        _check_scored(change, self.prompt_of_row, "of both policies")
        return change

    def row(
        self, base: "Evaluation | None" = None, *, round: int, split: str, has_quotes: bool = True
    ) -> dict[str, Any]:
        """Returns the row of `metrics.jsonl`, with paired changes from the base model.

        `round` is the round after which the policy was evaluated, 0 for the base model. Signs of
        reward hacking quote phrases from the replies unless `has_quotes` is False.
        """
        groups, changes = self.prompt_of_row, {}
        if base is not None:
            texts = [
                [
                    ReplyText(sample["completion"], has_template)
                    for sample, has_template in zip(each.samples, each.has_template, strict=True)
                ]
                for each in (base, self)
            ]
            changes = {
                "change": summaries(self.change(base), groups),
                "hacking_signs": hacking_signs(*texts, has_quotes=has_quotes),
            }
        counts = Counter(sample["completion"].strip() for sample in self.samples)
        num_empty = counts.pop("", 0)
        kl, kl_error = mean_and_error(self.kl, groups)
        return self._row(
            round,
            split,
            **changes,
            kl=kl,
            kl_se=kl_error,
            length=self.length.mean().item(),
            distinct_1=self.distinct_1,
            distinct_2=self.distinct_2,
            end_share=self.ended.mean().item(),
            # of the first replies to the rows: that of the most frequent one, and of blank ones
            commonest_share=max(counts.values(), default=0) / self.num_rows,
            empty_share=num_empty / self.num_rows,
        )

    def comparison(
        self, base: "Evaluation", *, rewards: Collection[str] = ()
    ) -> "list[MetricComparison]":
        """Compares all metrics with the base model's, one row each, scores first.

        The rewards in [0, 1] of the objectives in `rewards` follow the scores.
        """
        self.change(base)  # checks that the two can be paired
        figures = {name: (base.scores[name], after) for name, after in self.scores.items()}
        for name in [name for name in self.rewards if name in rewards]:
            figures[f"{name} in [0, 1]"] = base.rewards[name], self.rewards[name]
        figures["kl"], figures["length"] = (base.kl, self.kl), (base.length, self.length)
        figures["end_share"] = base.ended, self.ended
        groups, count = self.prompt_of_row, self.num_prompts
        rows = [compare_metric(name, *both, groups) for name, both in figures.items()]
        for name in ("distinct_1", "distinct_2"):
            before, after = getattr(base, name), getattr(self, name)
            change = after - before
            rows.append(MetricComparison(name, before, None, after, None, change, None, count))
        return rows

    def by_row(self) -> dict[str, torch.Tensor]:
        """Returns metrics by row as `RowMetrics.by_row`, and "kl"."""
        return {**super().by_row(), "kl": self.kl}


def evaluate(
    generate: Generate,
    prompts: Sequence[Prompt],
    reward_fns: Mapping[str, RewardFn],
    *,
    calibrations: Mapping[str, Calibration],
    stream: RandomStream,
    extra_fns: Mapping[str, RewardFn] | None = None,
    num_samples: int = 1,
    batch_size: int = 64,
    on_progress: Callable[[float, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluates a policy on held-out prompts.

    Args:
        generate: Samples one reply to each of a list of prompts.
        prompts: One prompt per row of the data, at least two of them distinct. Repeated rows have
            more weight in the means but do not reduce the standard errors.
        reward_fns: Reward functions by objective; may be empty.
        calibrations: Calibrations from scores to rewards, by objective.
        stream: Random stream of the sampling. Evaluations to be compared need streams in equal
            states.
        extra_fns: Further metrics with the signature of reward functions, such as the ground truth.
        num_samples: Replies per row.
        batch_size: Replies sampled per batch.
        on_progress: Called at each token with the number of finished replies and the total.

    Raises:
        ValueError: When there are too few prompts for a standard error, two scores have the same
            name, an objective has no calibration, a score is not finite, or fewer than two prompts
            have a score.
    """
    extra_fns = extra_fns or {}
    if num_samples < 1 or batch_size < 1:
        raise ValueError(
            f"num_samples and batch_size must be positive, got {num_samples} and {batch_size}."
        )
    _check_measurable(prompts, reward_fns, extra_fns, calibrations)
    # replies to a row are adjacent
    asked = [prompt for prompt in prompts for _ in range(num_samples)]
    with stream:  # equal states give equal samples, so that changes are paired
        chunks = []
        for start in range(0, len(asked), batch_size):
            on_progress(start, len(asked))
            batch = asked[start : start + batch_size]

            def report(num_done: float, *, start: int = start) -> None:
                on_progress(start + num_done, len(asked))

            chunks.append(generate(batch, on_progress=report))
        on_progress(len(asked), len(asked))
    completions = [text for replies in chunks for text in replies.completions]
    ids = [row for replies in chunks for row in replies.completion_ids]
    has_template = [each for replies in chunks for each in replies.has_template]
    fns = {**reward_fns, **extra_fns}
    rows = score(fns, asked, completions, ids) if fns else ()  # [M + extras, R * S]
    scores = dict(zip(fns, rows, strict=True))

    def by_row(values: torch.Tensor) -> torch.Tensor:
        return values.float().cpu().reshape(len(prompts), num_samples).nanmean(1)  # [R * S] to [R]

    sample_scores = {name: values_or_none(row) for name, row in scores.items()}
    evaluation = Evaluation(
        scores={name: by_row(row) for name, row in scores.items()},
        rewards={name: by_row(calibrations[name](scores[name])) for name in reward_fns},
        kl=by_row(torch.cat([replies.kl for replies in chunks])),
        length=by_row(torch.cat([replies.num_tokens for replies in chunks])),
        ended=by_row(torch.cat([replies.ended for replies in chunks])),
        distinct_1=distinct(completions, 1),
        distinct_2=distinct(completions, 2),
        num_samples=num_samples,
        samples=[
            {
                "prompt": prompt.transcript,
                "messages": prompt.turns,
                "completion": completions[at],
                "scores": {name: row[at] for name, row in sample_scores.items()},
            }
            for prompt, at in zip(prompts, range(0, len(asked), num_samples), strict=True)
        ],
        has_template=has_template[::num_samples],
    )
    _check_scored(evaluation.scores, evaluation.prompt_of_row)
    return evaluation


def _check_measurable(
    prompts: Sequence[Prompt],
    reward_fns: Mapping[str, RewardFn],
    extra_fns: Mapping[str, RewardFn],
    calibrations: Mapping[str, Calibration],
) -> None:
    """Checks that there are enough prompts for standard errors, and a calibration per objective."""
    num_distinct = len({loose_text(prompt.transcript) for prompt in prompts})
    if num_distinct < 2:
        raise ValueError(
            f"an evaluation needs at least 2 distinct prompts for a standard error, got "
            f"{num_distinct}."
        )
    if shared := sorted(reward_fns.keys() & extra_fns.keys()):
        raise ValueError(f"{shared[0]!r} is both an objective and an extra score: rename one.")
    if missing := sorted(reward_fns.keys() - calibrations.keys()):
        raise ValueError(f"{missing[0]!r} has no calibration: calibrate every objective first.")


def _check_scored(
    scores: Mapping[str, torch.Tensor], groups: torch.Tensor, whose: str = ""
) -> None:
    """Checks that at least two prompts have a score under each name."""
    for name, values in scores.items():
        if (count := num_scored(values, groups)) < 2:
            raise ValueError(
                f"{count} of {len(groups.unique())} evaluation prompts have a score of {name!r}"
                f"{whose and f' {whose}'}, and a standard error needs 2: evaluate on more prompts "
                "to which it applies, or remove it."
            )


def prompt_indices(texts: Iterable[str]) -> torch.Tensor:
    """Returns the index of each prompt in order of first appearance, ignoring white space, [R]."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(loose_text(text), len(numbers)) for text in texts])


def distinct(texts: Sequence[str], length: int) -> float:
    """Returns the share of distinct n-grams of `length` words; 0 if there are none.

    Words are split at white space and lower-cased; n-grams do not span texts.

    >>> distinct(["a b a", "A b"], 2)  # ab, ba, ab
    0.6666666666666666
    """
    rows = [text.lower().split() for text in texts]
    runs = [tuple(row[i : i + length]) for row in rows for i in range(len(row) - length + 1)]
    return len(set(runs)) / len(runs) if runs else 0.0


def mean_and_error(values: torch.Tensor, groups: torch.Tensor | None = None) -> tuple[float, float]:
    """Returns the mean of values [R] and its standard error, clustered by group.

    Rows of a group may be arbitrarily dependent. With G groups the squared error is G / (G - 1)
    times the sum of the groups' squared sums of residuals, divided by R² (Liang and Zeger, 1986);
    with one row per group it is the sample variance divided by G. NaN entries, from rows without a
    score, are excluded.

    Args:
        values: Values, [R].
        groups: Group index of each row, such as its prompt, [R]; by default every row is its own
            group.
    """
    groups = torch.arange(len(values)) if groups is None else groups
    is_known = ~values.isnan()
    # sums of squares cancel in float32
    values, groups = values[is_known].double(), groups[is_known]
    mean, num_groups = values.mean(), len(groups.unique())  # rows weigh alike, errors are by prompt
    sums = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(
        0, groups, values - mean
    )
    # G / (G - 1) corrects for the estimated mean
    variance = num_groups / (num_groups - 1) * sums.square().sum()
    return mean.item(), (variance.sqrt() / len(values)).item()


def summaries(
    values: Mapping[str, torch.Tensor], groups: torch.Tensor
) -> dict[str, dict[str, float]]:
    """Returns means, standard errors and numbers of prompts."""
    summaries = {}
    for name, row in values.items():
        mean, error = mean_and_error(row, groups)
        summaries[name] = {"mean": mean, "se": error, "num_prompts": num_scored(row, groups)}
    return summaries


def num_scored(values: torch.Tensor, groups: torch.Tensor) -> int:
    """Returns the number of prompts with a score."""
    return len(groups[~values.isnan()].unique())


@dataclass(frozen=True)
class MetricComparison:
    """A metric of two policies on the same prompts; only metrics by row have standard errors."""

    name: str
    base: float
    base_se: float | None
    aligned: float
    aligned_se: float | None
    change: float
    change_se: float | None
    """Standard error of the change, paired by row."""
    num_prompts: int
    """Number of prompts that the change is computed on."""
    is_partial: bool = False
    """True if some prompts of the evaluation have no score."""

    @property
    def z(self) -> float | None:
        """The change in units of its standard error; None if that is zero or unknown."""
        return self.change / self.change_se if self.change_se else None

    def cells(self) -> list[str]:
        """Returns name, base, aligned, change and z as strings for a table."""
        z = "" if self.z is None else f"{self.z:+.1f}"
        base = _figure(self.base, self.base_se)
        aligned = _figure(self.aligned, self.aligned_se)
        name = f"{self.name}, {self.num_prompts} prompts" if self.is_partial else self.name
        return [name, base, aligned, _figure(self.change, self.change_se, sign="+"), z]


def _figure(value: float, error: float | None, *, sign: str = "") -> str:
    shown = f"{round(value, 3) + 0.0:{sign}.3f}"  # no -0.000
    return shown if error is None else f"{shown} ± {error:.3f}"


def compare_metric(
    name: str, before: torch.Tensor, after: torch.Tensor, groups: torch.Tensor
) -> MetricComparison:
    """Returns the comparison of a metric by row, [R], in rows with a prompt index, [R]."""
    count = num_scored(after - before, groups)
    return MetricComparison(
        name,
        *mean_and_error(before, groups),
        *mean_and_error(after, groups),
        *mean_and_error(after - before, groups),
        count,
        is_partial=count < len(groups.unique()),
    )


def compare_by_name(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], groups: torch.Tensor
) -> dict[str, MetricComparison]:
    """Returns the comparisons of metrics by row, [R], by name; see `compare_metric`."""
    return {name: compare_metric(name, before[name], own, groups) for name, own in after.items()}
