"""How far LoRA's averaged factors are from the mean product, and what rank r loses of it."""

from collections.abc import Sequence

import torch

from firm.federation import Adapter
from firm.federation.aggregation import weighted_mean
from firm.federation.options.lora_mean import lora_pairs, mean_product


def truncation_error(adapters: Sequence[Adapter], weights: Sequence[float]) -> float:
    """Returns how much of the mean products rank r loses, ‖P - P_r‖ / ‖P‖ over all layers.

    It is from 0 to 1; 0 where all products are zero.
    """
    lost, all_of_it = 0.0, 0.0
    for pair in lora_pairs(adapters[0]):
        core = mean_product(pair, adapters, weights).core
        squares = torch.linalg.svdvals(core).square()
        lost += squares[len(adapters[0][pair.a]) :].sum().item()
        all_of_it += squares.sum().item()
    return (lost / all_of_it) ** 0.5 if all_of_it > 0 else 0.0


def averaging_error(adapters: Sequence[Adapter], weights: Sequence[float]) -> float:
    """Returns how far plain means are from the mean product, ‖B̄Ā - P‖ / ‖P‖ over all layers.

    It is not negative; 0 where all products are zero.
    """
    doubles = [{name: each.double() for name, each in adapter.items()} for adapter in adapters]
    mean = weighted_mean(doubles, weights)
    difference, all_of_it = 0.0, 0.0
    for pair in lora_pairs(mean):
        product = mean_product(pair, adapters, weights)
        plain = (product.left.T @ mean[pair.b]) @ (mean[pair.a] @ product.right)
        difference += (plain - product.core).square().sum().item()
        all_of_it += product.core.square().sum().item()
    return (difference / all_of_it) ** 0.5 if all_of_it > 0 else 0.0
