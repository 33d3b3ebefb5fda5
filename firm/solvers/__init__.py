"""Solvers: from a Gram matrix of gradients to weights of objectives.

Pure functions on small symmetric matrices: no models, files, devices or logging. They take float
tensors or arrays of shape [..., M, M], compute in float64 on the CPU, return weights [..., M] in
the input's type, dtype and device, and never change their input. A solver that cannot meet its own
optimality check raises; it never returns its last iterate in silence.
"""

from firm.solvers.constraints import linear_constraints
from firm.solvers.fedcmoo import fedcmoo_pref_weights, fedcmoo_weights
from firm.solvers.fixed import fixed_weights
from firm.solvers.kkt import kkt_gap
from firm.solvers.min_norm import min_norm_weights
from firm.solvers.projections import project_to_box_simplex, project_to_simplex
from firm.solvers.regularised import firm_weights
from firm.solvers.smoothed import smoothed_weights

__all__ = [
    "fedcmoo_pref_weights",
    "fedcmoo_weights",
    "firm_weights",
    "fixed_weights",
    "kkt_gap",
    "linear_constraints",
    "min_norm_weights",
    "project_to_box_simplex",
    "project_to_simplex",
    "smoothed_weights",
]
