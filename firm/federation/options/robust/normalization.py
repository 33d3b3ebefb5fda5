"""Normalisation: all updates with their median length."""

from collections.abc import Sequence

import torch

from firm.federation.aggregation import by_client, update_lengths
from firm.federation.client import Adapter, State
from firm.federation.messages import Update
from firm.federation.options.robust.median import coordinate_median
from firm.federation.options.robust.rule import RobustConfig, robust_rule, scaled


def normalization_factors(lengths: torch.Tensor) -> torch.Tensor:
    """Returns what each update is multiplied by so that all have the median length, float64 [N].

    FedMGDA+'s normalisation (Hu et al. 2022, arXiv:2006.11489, Algorithm 1), by which a client
    counts by its direction alone. The common length is an addition: unit updates would ask for
    another server learning rate, and would not shrink where training converges. Factors are exactly
    1 where all lengths are equal; an update of length 0 has no direction and stays 0.
    """
    lengths = lengths.double()
    return torch.where(lengths > 0, coordinate_median(lengths) / lengths, 0.0)


@robust_rule("normalization")
def _normalize(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    lengths = torch.tensor(update_lengths(start, updates), dtype=torch.float64)
    return scaled(start, updates, normalization_factors(lengths)), {
        "length": coordinate_median(lengths).item(),
        "lengths": by_client(updates, lengths.tolist()),
    }
