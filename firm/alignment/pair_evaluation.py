"""Evaluation on held-out pairs: how often, and how clearly, a policy ranks replies as people did.

The implicit reward of a reply is β log(π / π_ref) (arXiv:2305.18290, Eq. 5). A pair's margin is
that of the preferred reply minus that of the other one, and its accuracy 1 if the margin is
positive, 1/2 if it is zero. The base model is its own reference, so that its margins are 0 and its
accuracy is 1/2. Standard errors are clustered by prompt, as in `firm.alignment.evaluation`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from firm.alignment.evaluation import (
    MetricComparison,
    MetricRecord,
    RowMetrics,
    compare_by_name,
    num_scored,
    prompt_indices,
    summaries,
)
from firm.alignment.pair_tokens import EncodedPair
from firm.base.quantities import Quantity, register
from firm.fronts.confidence import share_interval

register(Quantity("accuracy_change", kind="evaluation", section="", type=dict[str, MetricRecord]))

ACCURACY = "{}, accuracy"
MARGIN = "{}, margin"


class _Accuracy(MetricComparison):
    """An accuracy beside the base model's 1/2, with its exact 95 % interval, by prompts."""

    def cells(self) -> list[str]:
        """Returns name, base, aligned and change as strings for a table, and no z."""
        ends = share_interval(self.aligned, self.num_prompts)
        low, high = (end - self.base for end in ends)
        aligned = f"{self.aligned:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"
        change = f"{self.change:+.3f} [{low:+.3f}, {high:+.3f}]"
        return [self.name, f"{self.base:.3f}", aligned, change, ""]


@dataclass(frozen=True)
class PairEvaluation(RowMetrics):
    """Implicit rewards of a policy on R held-out pairs."""

    scores: dict[str, torch.Tensor]
    """Margins β Δ by objective, each [R]; NaN for pairs that another objective ranks."""
    rewards: dict[str, torch.Tensor]
    """Accuracies by objective, each [R]; NaN for pairs that another objective ranks."""
    prompt_indices: torch.Tensor
    """Prompt index of each pair, in order of first appearance, [R]."""

    num_samples = 1

    @property
    def prompt_of_row(self) -> torch.Tensor:
        """Prompt index of each pair, [R]."""
        return self.prompt_indices

    def row(
        self,
        base: "PairEvaluation | None" = None,
        *,
        round: int,
        split: str,
        has_quotes: bool = False,
    ) -> dict[str, Any]:
        """Returns the row of `metrics.jsonl`; see `Evaluation.row`.

        Its `rewards` are accuracies, and its `scores` margins.
        """
        changes = {}
        if base is not None:
            for key in ("scores", "rewards"):
                before, after = getattr(base, key), getattr(self, key)
                change = {name: values - before[name] for name, values in after.items()}
                name = "change" if key == "scores" else "accuracy_change"
                changes[name] = summaries(change, self.prompt_of_row)
        return self._row(round, split, **changes)

    def comparison(self, base: "PairEvaluation") -> list[MetricComparison]:
        """Returns comparisons of accuracies and margins with the base model's."""
        # each objective has its own pairs, so that every row would be marked as partial
        accuracies = [
            _Accuracy(**asdict(row) | {"name": ACCURACY.format(name), "is_partial": False})
            for name, row in self.reward_comparison(base).items()
        ]
        margins = compare_by_name(base.scores, self.scores, self.prompt_of_row)
        return accuracies + [
            replace(row, name=MARGIN.format(name), is_partial=False)
            for name, row in margins.items()
        ]


def reference_logprobs(pairs: Sequence[EncodedPair]) -> torch.Tensor:
    """Returns the log-probabilities of the replies of N pairs under the reference, [N, 2]."""
    return torch.tensor([pair.reference for pair in pairs]).view(-1, 2)


def evaluate_pairs(
    logprobs: Callable[[Sequence[EncodedPair]], torch.Tensor],
    pairs: Sequence[EncodedPair],
    objectives: Sequence[str],
    *,
    beta: float,
) -> PairEvaluation:
    """Evaluates a policy on held-out pairs.

    Args:
        logprobs: Returns the log-probabilities of the replies of N pairs under the policy, [N, 2].
        pairs: Pairs with their log-probabilities under the reference; of each objective, pairs of
            at least two different prompts.
        objectives: Names of the objectives.
        beta: Factor of the implicit rewards.

    Raises:
        ValueError: An objective has too few pairs for a standard error.
    """
    ratios = logprobs(pairs) - reference_logprobs(pairs)
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    ranked = torch.tensor([pair.objective for pair in pairs])
    groups = prompt_indices(pair.pair.prompt.transcript for pair in pairs)
    margins = {name: margin.where(ranked == j, torch.nan) for j, name in enumerate(objectives)}
    for name, values in margins.items():
        if (count := num_scored(values, groups)) < 2:
            raise ValueError(
                f"an evaluation needs pairs of {name} with at least 2 different prompts for a "
                f"standard error, got {count}: hold out more pairs."
            )
    accuracies = {  # torch.sign turns NaN into 0
        name: ((values.sign() + 1) / 2).where(~values.isnan(), torch.nan).float()
        for name, values in margins.items()
    }
    return PairEvaluation(margins, accuracies, groups)
