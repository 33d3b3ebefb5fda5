"""Solvers: from a Gram matrix of gradients to weights of the objectives.

Pure functions of small symmetric matrices. Throughout, G = JJᵀ is the Gram matrix of the
objectives' gradients, a float tensor or array of shape [..., M, M], and λ are weights on the
simplex (non-negative, sum 1), shape [..., M]; those of RACO and TorchJD have other sums, and G has
shape [M, M] there. All solvers compute in float64 on the CPU, return weights in G's type, dtype and
device (TorchJD's in float64), and never modify their input. They raise ``ValueError`` on arguments
of wrong shape or range, NaN, infinities, or a G that is not symmetric and positive semidefinite up
to rounding, and ``RuntimeError`` if the result fails its optimality check.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.solvers.constraints import linear_constraints
    from firm.solvers.fedcmoo import fedcmoo_pref_weights, fedcmoo_weights
    from firm.solvers.fixed import fixed_weights
    from firm.solvers.kkt import kkt_gap
    from firm.solvers.min_norm import min_norm_weights
    from firm.solvers.projections import project_to_simplex
    from firm.solvers.raco import raco_weights
    from firm.solvers.regularised import firm_weights
    from firm.solvers.smoothed import smoothed_weights
    from firm.solvers.torchjd import torchjd_weights

__all__ = [
    "fedcmoo_pref_weights",
    "fedcmoo_weights",
    "firm_weights",
    "fixed_weights",
    "kkt_gap",
    "linear_constraints",
    "min_norm_weights",
    "project_to_simplex",
    "raco_weights",
    "smoothed_weights",
    "torchjd_weights",
]

__getattr__, __dir__ = lazy(__name__)
