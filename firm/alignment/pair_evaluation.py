"""Evaluation on held-out pairs: how often, and how clearly, a policy ranks replies as people did.

The implicit reward of a reply is β log(π / π_ref) (arXiv:2305.18290, Eq. 5). A pair's margin is
that of the preferred reply minus that of the other one, and its accuracy 1 if the margin is
positive, 1/2 if it is zero. The base model is its own reference, so that its margins are 0 and its
accuracy is 1/2. Standard errors are clustered by prompt, as in `firm.alignment.evaluation`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from firm.alignment.evaluation import (
    MetricComparison,
    MetricRecord,
    num_scored,
    prompt_indices,
    rewards_compared,
    summaries,
)
from firm.alignment.pair_tokens import EncodedPair
from firm.base.quantities import Quantity, register

register(Quantity("accuracy_change", kind="evaluation", section="", type=dict[str, MetricRecord]))

ACCURACY = "{}, accuracy"
MARGIN = "{}, margin"


@dataclass(frozen=True)
class PairEvaluation:
    """Implicit rewards of a policy on R held-out pairs."""

    margins: dict[str, torch.Tensor]
    """β Δ by objective, each [R]; NaN for pairs that another objective ranks."""
    prompt_of_row: torch.Tensor
    """Prompt index of each pair, in order of first appearance, [R]."""

    num_samples = 1

    @property
    def rewards(self) -> dict[str, torch.Tensor]:
        """Accuracies by objective, each [R]; NaN for pairs that another objective ranks."""
        return {  # torch.sign turns NaN into 0
            name: ((values.sign() + 1) / 2).where(~values.isnan(), torch.nan)
            for name, values in self.margins.items()
        }

    @property
    def num_rows(self) -> int:
        """Number of pairs, R."""
        return len(self.prompt_of_row)

    @property
    def num_prompts(self) -> int:
        """Number of distinct prompts."""
        return len(self.prompt_of_row.unique())

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
        groups = self.prompt_of_row
        changes = {}
        if base is not None:
            change = {name: own - base.margins[name] for name, own in self.margins.items()}
            gained = {name: own - base.rewards[name] for name, own in self.rewards.items()}
            changes = {
                "change": summaries(change, groups),
                "accuracy_change": summaries(gained, groups),
            }
        return {
            "kind": "evaluation",
            "round": round,
            "split": split,
            "num_prompts": self.num_prompts,
            "num_rows": self.num_rows,
            "num_samples": self.num_samples,
            "scores": summaries(self.margins, groups),
            "rewards": summaries(self.rewards, groups),
            **changes,
        }

    def by_row(self) -> dict[str, torch.Tensor]:
        """Returns accuracies, margins and the prompt index by row; see `Evaluation.by_row`."""
        return {
            "prompt": self.prompt_of_row,
            **{f"rewards/{name}": values.float() for name, values in self.rewards.items()},
            **{f"scores/{name}": values for name, values in self.margins.items()},
        }

    def sample_rows(self, *, round: int, limit: int | None = None) -> list[dict[str, Any]]:
        """Returns no rows, since the policy sampled no replies."""
        return []

    def reward_comparison(self, base: "PairEvaluation") -> dict[str, MetricComparison]:
        """Returns comparisons of the accuracies with the base model's, by objective."""
        return rewards_compared(base.rewards, self.rewards, self.prompt_of_row)

    def comparison(self, base: "PairEvaluation") -> list[MetricComparison]:
        """Returns comparisons of accuracies and margins with the base model's."""
        margins = rewards_compared(base.margins, self.margins, self.prompt_of_row)
        named = {ACCURACY: self.reward_comparison(base), MARGIN: margins}
        # each objective has its own pairs, so that every row would be marked as partial
        return [
            replace(row, name=title.format(name), is_partial=False)
            for title, rows in named.items()
            for name, row in rows.items()
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
    return PairEvaluation(margins, groups)
