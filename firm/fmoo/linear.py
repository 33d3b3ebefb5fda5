"""Gradient descent on linear models, many steps per call.

For ten samples with a hundred features, the overhead of autograd and the optimizer far exceeds the
arithmetic of a step. Here local training is a single loop over arrays.
"""

from collections.abc import Sequence

import numpy as np


def descend_(
    weight: np.ndarray,
    bias: np.ndarray,
    *,
    inputs: np.ndarray,
    targets: np.ndarray,
    batches: np.ndarray,
    factors: Sequence[float] | np.ndarray,
    is_binary: bool,
    lr: float,
    proximal: float = 0.0,
) -> np.ndarray:
    """Takes steps of gradient descent on Σᵣ fᵣ Lᵣ in place; returns the losses of each step.

    Lᵣ is the loss of row r of the linear map: the binary cross-entropy of its logit, or its squared
    error, averaged over the batch. Values beyond the float32 range silently become NaN or infinity
    in the losses and parameters; the caller must check for them.

    Args:
        weight: float32 [R, F]. Modified in place.
        bias: float32 [R]. Modified in place.
        inputs: float32 [N, F].
        targets: float32 [N, R]; 0 or 1 for binary losses.
        batches: Indices of each step's samples, int64 [K, B].
        factors: f, shape [R].
        is_binary: Whether the losses are binary cross-entropies; else squared errors.
        lr: Step size.
        proximal: μ of the proximal term μ/2 ‖θ - θ_t‖², with θ_t the initial parameters.

    Returns:
        The losses before each step, float32 [K, R].
    """
    start_weight, start_bias = weight.copy(), bias.copy()
    scales = np.asarray(factors, dtype=np.float32) / np.float32(batches.shape[1])
    scales = scales if is_binary else 2 * scales
    rate, pull = np.float32(lr), np.float32(proximal)
    outputs = np.empty((*batches.shape, len(bias)), dtype=np.float32)  # [K, B, R]
    with np.errstate(over="ignore", invalid="ignore"):
        for step, batch in enumerate(batches):
            rows = inputs[batch]  # [B, F]
            output = outputs[step] = rows @ weight.T + bias
            means = 1 / (1 + np.exp(-output)) if is_binary else output
            residuals = (means - targets[batch]) * scales
            slope, bias_slope = residuals.T @ rows, residuals.sum(axis=0)
            if proximal:
                slope += pull * (weight - start_weight)
                bias_slope += pull * (bias - start_bias)
            weight -= rate * slope
            bias -= rate * bias_slope
        if is_binary:
            losses = np.logaddexp(np.float32(0), outputs) - targets[batches] * outputs
        else:
            losses = np.square(outputs - targets[batches])
    return losses.mean(axis=1)
