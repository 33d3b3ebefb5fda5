"""UPGrad's weights of the objectives, solved by TorchJD.

Quinton and Rey (2024), "Jacobian Descent for Multi-Objective Optimization", arXiv:2406.16232.
"""

from collections.abc import Callable

import torch

from firm.base.extras import install_command


def upgrad_weights(gram: torch.Tensor) -> torch.Tensor:
    """Returns the weights of UPGrad: the mean of the gradients' projections on the dual cone.

    Each gradient is projected onto the directions that conflict with no objective (Eq. 3), and the
    projections are averaged: w = (1/M) Σᵢ argmin vᵀGv over v ≥ eᵢ (Proposition 1), float64 [M],
    each at least 1/M, so that the sum is 1 or more.

    TorchJD solves for G / tr(G) + 1e-4 I, so that "conflicts with no objective" holds only up to
    (Gw)ⱼ ≥ -1e-4 tr(G) wⱼ. It treats a trace below 1e-4 as zero; dividing G [M, M] by its trace
    first restricts this to zero matrices.

    Raises:
        ValueError: When TorchJD is not installed, or finds no solution.
    """
    matrix = gram.double()
    trace = matrix.trace()
    return require_torchjd()(matrix / trace if trace > 0 else matrix)


def require_torchjd() -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns TorchJD's weighting; raises ``ValueError`` if it is not installed."""
    try:
        from torchjd.aggregation import UPGradWeighting  # pyright: ignore[reportMissingImports]

        return UPGradWeighting()
    except ImportError:
        raise ValueError(
            "UPGrad is solved by TorchJD and its projector, which are not all installed: "
            f"{install_command('torchjd')}."
        ) from None
