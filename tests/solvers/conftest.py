"""Oracles that share no code with the solvers."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest


def _solve_rational(rows: list[list[Fraction]]) -> list[Fraction] | None:
    """Solves a square system by Gauss-Jordan elimination; rows carry the right-hand side."""
    for column in range(len(rows)):
        pivot = next((r for r in range(column, len(rows)) if rows[r][column] != 0), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [entry / rows[column][column] for entry in rows[column]]
        for r, row in enumerate(rows):
            if r != column:
                rows[r] = [a - row[column] * b for a, b in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows]


def exact_simplex_qp(matrix: np.ndarray) -> np.ndarray:
    """The minimiser by trying every support in rational arithmetic, where nothing rounds."""
    size = len(matrix)
    exact = [[Fraction(float(entry)) for entry in row] for row in matrix]
    best: tuple[Fraction, list[Fraction]] | None = None
    for count in range(1, size + 1):
        for support in combinations(range(size), count):
            rows = [[*(exact[i][j] for j in support), Fraction(1), Fraction(0)] for i in support]
            rows.append([Fraction(1)] * count + [Fraction(0), Fraction(1)])
            solution = _solve_rational(rows)
            if solution is None or min(solution[:count]) < 0:
                continue
            weights = [Fraction(0)] * size
            for index, weight in zip(support, solution, strict=False):
                weights[index] = weight
            pairs = [(i, j) for i in support for j in support]
            value = sum(weights[i] * exact[i][j] * weights[j] for i, j in pairs)
            if best is None or value < best[0]:
                best = Fraction(value), weights
    assert best is not None
    return np.array([float(weight) for weight in best[1]])


@pytest.fixture(scope="session")
def exact_oracle():
    return exact_simplex_qp
