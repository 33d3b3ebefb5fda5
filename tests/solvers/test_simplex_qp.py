"""The shared solver against rational arithmetic, on matrices that break others."""

import numpy as np
import pytest

from firm.solvers import simplex_qp as module
from firm.solvers.kkt import relative_gap
from firm.solvers.simplex_qp import simplex_qp


def _matrix(family: str, size: int, generator: np.random.Generator) -> np.ndarray:
    rows = generator.standard_normal((size, 30))
    norms = 10.0 ** generator.uniform(-6, 6, (size, 1))
    line = generator.standard_normal(30)
    rows = {
        "well conditioned": rows,
        "norms over twelve decades": norms * rows,
        "nearly parallel": line * generator.uniform(1, 2, (size, 1)) + 1e-3 * rows,
        "in balance": rows[:, : size - 1],  # zero is in their convex hull, or near it
        "in balance over twelve decades": norms * rows[:, : size - 1],
        "fewer dimensions than rows": rows[:, :2],
    }[family]
    ridge = 0.005 * np.trace(rows @ rows.T) / size if family.startswith("fewer") else 0.0
    return rows @ rows.T + ridge * np.eye(size)


FAMILIES = [
    "well conditioned",
    "norms over twelve decades",
    "nearly parallel",
    "in balance",
    "in balance over twelve decades",
    "fewer dimensions than rows",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_solution_equals_the_one_in_rational_arithmetic(family, size, exact_oracle):
    generator = np.random.default_rng(size)
    for _ in range(8):
        matrix = _matrix(family, size, generator)
        error = np.abs(simplex_qp(matrix) - exact_oracle(matrix)).max()
        assert error < 1e-11  # conditioning of the nearly parallel family times 1e-16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 5, 8, 40])
def test_solution_is_on_the_simplex_and_meets_the_optimality_conditions(family, size):
    generator = np.random.default_rng(size)
    for _ in range(5):
        matrix = _matrix(family, size, generator)
        weights = simplex_qp(matrix)
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1, abs=1e-14)
        assert relative_gap(matrix, weights) < 1e-13


def test_a_zero_gradient_takes_all_weight_and_several_share_it():
    assert simplex_qp(np.diag([0.0, 1.0, 2.0])).tolist() == [1.0, 0.0, 0.0]
    assert simplex_qp(np.diag([0.0, 1.0, 0.0])).tolist() == [0.5, 0.0, 0.5]
    assert simplex_qp(np.diag([0.0, 1.0])).tolist() == [1.0, 0.0]
    assert simplex_qp(np.zeros((2, 2))).tolist() == [0.5, 0.5]


def test_a_single_objective_has_weight_one():
    assert simplex_qp(np.array([[3.0]])).tolist() == [1.0]


def test_a_wrong_answer_is_reported_and_never_returned(monkeypatch):
    monkeypatch.setattr(module, "nnls", lambda matrix, target: (np.ones(matrix.shape[1]), 0.0))
    with pytest.raises(RuntimeError, match=r"optimality gap is 0\.\d"):
        simplex_qp(np.diag([1.0, 2.0, 3.0]))
