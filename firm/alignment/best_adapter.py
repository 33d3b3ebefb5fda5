"""The adapter that a run leaves: the last one, unless an earlier one is better on validation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from firm.alignment.evaluation import mean_and_error
from firm.base.state import State

CLEAR = 2.0
"""Standard errors by which an earlier adapter must be better than the last one."""


@dataclass(frozen=True)
class Measured:
    """Utility of the adapter after a round, by row of the validation data."""

    round: int
    values: torch.Tensor
    """Utilities, float64 [R]; their mean is the adapter's."""

    @property
    def mean(self) -> float:
        """Mean utility."""
        return self.values.mean().item()


def utility(measured: Sequence[tuple[Sequence[float], Mapping[str, torch.Tensor]]]) -> torch.Tensor:
    """Returns the utility of an adapter by row of data, float64 [R].

    For one preference p its mean is Σ_j p_j r_j, with the mean rewards r. For K preferences it is
    the expected utility: the mean over the preferences of Σ_j p_j r_j, each at the best of the K
    folds of the policy for it. Rows without a reward contribute nothing to the mean.

    Args:
        measured: Preferences [M], each with the metrics of the policy at it by row
            (`Evaluation.by_row`); an unconditioned policy is measured once, at equal shares.
    """
    rows = [_rewards(by_row) for _, by_row in measured]  # K of [M, R]
    best = []
    for preference, _ in measured:
        shares = torch.tensor(preference, dtype=torch.float64)
        best.append(max((shares / shares.sum() @ own for own in rows), key=torch.mean))
    return torch.stack(best).mean(0)


def _rewards(by_row: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns rewards [M, R] whose means are those of the known ones; 0 for the others."""
    rewards = [values.double() for name, values in by_row.items() if name.startswith("rewards/")]
    counts = [(~values.isnan()).sum().clamp(min=1) for values in rewards]
    return torch.stack(
        [r.nan_to_num(0.0) * len(r) / n for r, n in zip(rewards, counts, strict=True)]
    )


class BestAdapter:
    """Compares the best and the newest adapter of a run on the validation data."""

    def __init__(self) -> None:
        self.best: Measured | None = None
        self.second: Measured | None = None
        self.newest: Measured | None = None

    def drop(self, round: int) -> None:
        """Forgets an adapter whose update was undone."""
        if self.best is not None and self.best.round == round:
            self.best = self.second

    def note(self, round: int, values: torch.Tensor) -> float:
        """Notes the utilities after a round, and returns their mean."""
        self.newest = Measured(round, values)
        if self.best is None or self.newest.mean > self.best.mean:
            self.best, self.second = self.newest, self.best
        return self.newest.mean

    def earlier(
        self, last: int, what: str, *, groups: torch.Tensor | None, is_out: bool = False
    ) -> tuple[int | None, str]:
        """Returns the round of an earlier adapter that is better than the last one, and the reason.

        An adapter is better if its utility exceeds the last one's by two standard errors. The
        difference is paired by row, and its error clustered by prompt.

        Args:
            last: The last round.
            what: Name of the utility, for the reason.
            groups: Prompt index of each row, [R]; None without validation data.
            is_out: Whether any earlier adapter is better.

        Returns:
            The round, None if the last adapter is the choice; and the reason.
        """
        best, newest = self.best, self.newest
        if groups is None:
            return None, "the last; there is no validation data that could choose another"
        if best is None or newest is None:
            return None, "the last; no other one was measured on the validation data"
        found = f"({what} {best.mean:.3f})"
        if best.round == last:
            return None, f"the last, and the best on the validation data {found}"
        if newest.round < last:
            among, why = "", "was not measured"
            if is_out:
                among = " among the adapters that the guard accepts"
                why = "is outside the guard's trust region"
            return best.round, f"the best on the validation data {found}{among}; the last {why}"
        difference, error = mean_and_error(best.values - newest.values, groups)
        if not (is_out or difference > 0):
            return None, f"the last, and as good as any on the validation data {found}"
        if is_out or difference > CLEAR * error:
            return best.round, (
                f"the best on the validation data {found}; the last has {newest.mean:.3f}, "
                f"{difference:.3f} ± {error:.3f} less"
            )
        return None, (
            f"the last ({what} {newest.mean:.3f} on the validation data); round {best.round} with "
            f"{best.mean:.3f} is not clearly better ({difference:.3f} ± {error:.3f})"
        )

    def state(self) -> State:
        """Returns the state to keep in a checkpoint."""
        return {name: vars(own) if own else None for name, own in vars(self).items()}

    def restore(self, state: State) -> None:
        """Restores a state returned by `state`."""
        for name, own in state.items():
            setattr(self, name, Measured(**own) if own else None)
