"""Merged adapters: the mean of Rewarded Soups, TIES and DARE."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from peft.utils import merge_utils

Merge = Literal["ties", "dare_linear", "dare_ties"]


def merged_adapter(
    adapters: Sequence[Mapping[str, torch.Tensor]],
    shares: Sequence[float],
    *,
    merge: Merge,
    density: float,
) -> dict[str, torch.Tensor]:
    """Returns a LoRA adapter merged by TIES (arXiv:2306.01708) or DARE (arXiv:2311.03099).

    As PEFT's ``add_weighted_adapter``, on the factors A and B of each layer, which are weighted by
    √share each (or one of them by its share, if the adapters have the other in common): values are
    pruned (by magnitude, or at random and rescaled), signs are elected (not by dare_linear), and
    what agrees is averaged. DARE draws from torch's global generator.

    Args:
        adapters: Adapters of the same names, shapes and scale.
        shares: Weights of the adapters, non-negative, not all zero; scaled to sum 1.
        merge: Method.
        density: Share of the values that are kept, in (0, 1].
    """
    total = sum(shares)
    weights = torch.tensor([share / total for share in shares])
    if any("lora_A" in name for name in adapters[0]):  # else the change is linear in the rest
        weights = weights.sqrt()
    combine = getattr(merge_utils, merge)
    return {
        name: combine([own[name] for own in adapters], weights, density).to(first.dtype)
        for name, first in adapters[0].items()
    }
