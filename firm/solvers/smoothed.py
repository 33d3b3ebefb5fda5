"""The running average of weights used by T-FIRM."""

import torch

from firm.solvers.checks import ArrayT, as_float64, like


def smoothed_weights(previous: ArrayT, weights: torch.Tensor | ArrayT, *, step: int) -> ArrayT:
    """Returns the average λₜ = (1 - ηₜ) λₜ₋₁ + ηₜ λ*ₜ with ηₜ = 1/t.

    This is the λ average below Eq. 11 in Algorithm 2 of FIRM (Nourzad et al.); with ηₜ = 1/t
    (Eq. 34) it is the arithmetic mean of all weights so far, independent of the initial ones.

    Args:
        previous: λₜ₋₁, shape [..., M]; any weights at the first step.
        weights: λ*ₜ, the solver's latest result, shape [..., M].
        step: t, counted from 1.

    >>> smoothed_weights(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), step=4)
    tensor([0.7500, 0.2500])
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}.")
    before = as_float64(previous, name="previous")
    now = as_float64(weights, name="weights")
    if before.shape != now.shape:
        raise ValueError(
            f"weights must have the shape of previous, {list(before.shape)}, got {list(now.shape)}."
        )
    return like(before + (now - before) / step, previous)
