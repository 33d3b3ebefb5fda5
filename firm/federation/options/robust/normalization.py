"""Normalisation: scales all updates to their median norm."""

from collections.abc import Sequence

import torch

from firm.base.state import State
from firm.federation.aggregation import by_client, update_lengths
from firm.federation.client import Adapter
from firm.federation.messages import Update
from firm.federation.options.robust.median import coordinate_median
from firm.federation.options.robust.rule import RobustConfig, robust_rule
from firm.federation.options.robust.updates import scale_updates


def normalization_factors(lengths: torch.Tensor) -> torch.Tensor:
    """Returns the factors that scale all updates to the median norm, float64 [N].

    FedMGDA+'s normalisation (Hu et al. 2022, arXiv:2006.11489, Algorithm 1), with which only the
    direction of a client's update matters. The common norm is not in the paper: updates of norm 1
    would need a different server learning rate, and would not shrink as training converges. The
    factors are exactly 1 if all norms are equal; a zero update has no direction and stays zero.
    """
    lengths = lengths.double()
    return torch.where(lengths > 0, coordinate_median(lengths) / lengths, 0.0)


@robust_rule("normalization")
def _normalize(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    lengths = torch.tensor(update_lengths(start, updates), dtype=torch.float64)
    return scale_updates(start, updates, normalization_factors(lengths)), {
        "length": coordinate_median(lengths).item(),
        "lengths": by_client(updates, lengths.tolist()),
    }
