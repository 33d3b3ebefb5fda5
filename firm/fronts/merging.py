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
    combine = getattr(merge_utils, merge)

    def merged(name: str) -> torch.Tensor:
        # a layer's change is the product of A and B, and linear in all else
        is_factor = ".lora_A" in name or ".lora_B" in name
        has_both = is_factor and name.replace(".lora_B", ".lora_A") in adapters[0]
        own_weights = weights.sqrt() if has_both else weights
        return combine([own[name] for own in adapters], own_weights, density)

    return {name: merged(name).to(first.dtype) for name, first in adapters[0].items()}
