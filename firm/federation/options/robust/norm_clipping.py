"""Norm clipping: limits the norm of every update."""

from collections.abc import Sequence

import torch

from firm.base.state import State
from firm.federation.aggregation import by_client, update_lengths
from firm.federation.client import Adapter
from firm.federation.messages import Update
from firm.federation.options.robust.median import coordinate_median
from firm.federation.options.robust.rule import RobustConfig, robust_rule
from firm.federation.options.robust.updates import scale_updates


def clip_factors(lengths: torch.Tensor, clip_norm: float | None = None) -> torch.Tensor:
    """Returns the factors that scale updates down to at most a limit on their norm.

    Norm clipping as in Sun et al. (2019), "Can You Really Backdoor Federated Learning?",
    arXiv:1911.07963. An attacker moves the mean by at most limit / N. Taking the median norm as
    the limit is not in that paper. It adapts as the honest updates get smaller, and is between
    honest norms if N ≥ 2f + 1.

    Args:
        lengths: ‖u_c‖, shape [N], non-negative.
        clip_norm: The limit; by default the median of ``lengths``.

    Returns:
        float64 [N], from 0 to 1; exactly 1 for updates within the limit.
    """
    lengths = lengths.double()
    limit = coordinate_median(lengths) if clip_norm is None else lengths.new_tensor(clip_norm)
    return torch.where(lengths > limit, limit / lengths, 1.0)


@robust_rule("norm_clipping")
def _clip(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    lengths = torch.tensor(update_lengths(start, updates), dtype=torch.float64)
    factors = clip_factors(lengths, cfg.clip_norm)
    limit = coordinate_median(lengths).item() if cfg.clip_norm is None else cfg.clip_norm
    clipped = [update.client for update, f in zip(updates, factors, strict=True) if f < 1]
    return scale_updates(start, updates, factors), {
        "clip_norm": limit,
        "clipped": clipped,
        "lengths": by_client(updates, lengths.tolist()),
    }
