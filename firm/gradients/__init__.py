"""Gradients: from M losses to the Jacobian [M, d], its Gram matrix [M, M] and one direction [d].

Vision, tables and language share this code; they differ only in how they make the losses.
"""

from firm.gradients.gram import combine, gram_matrix
from firm.gradients.jacobian import jacobian

__all__ = ["combine", "gram_matrix", "jacobian"]
