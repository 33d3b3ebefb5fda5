"""Min-norm weights: time and error of this project and its peers on Gram matrices that are hard.

    pip install -e ".[bench]"
    python benchmarks/solvers.py                      # about 12 minutes
    python benchmarks/solvers.py --sizes 2 8 64       # fewer

All solvers get the same float64 matrices, one after the other in turn, three to a cell; a time is
the median over them of the least CPU time of a call, set-up included and constant matrices cached.
λ* is an active set in 400-bit arithmetic whose optimality conditions hold there; errors are shown
where it is unique. The gap is ``kkt_gap``. A peer that is not installed is left out.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: threads on busy cores time nothing
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import cvxpy
import numpy as np
import scipy.optimize
import torch

from firm.run import print_table
from firm.solvers import kkt_gap, min_norm_weights
from firm.solvers.simplex_qp import simplex_qp

SIZES = (2, 3, 5, 8, 16, 40, 64, 200)
FAMILIES = ("well", "collinear", "duplicated", "rank-deficient", "zero", "scale-spread")
UNIQUE = ("well", "collinear", "scale-spread")
PROBLEMS, ROUNDS = 3, 3
CELL_S = 0.02  # CPU time that a solver is given for one problem and round, one call at the least
PATIENCE_S = 2.0  # a solver that took longer for one call is not asked for a larger M
PRECISION = 400  # bits
RIGHT = 1e-4  # the gap up to which a peer's weights count as right

Solve = Callable[[np.ndarray], np.ndarray]


def gram_of(family: str, size: int, generator: np.random.Generator) -> np.ndarray:
    rows = generator.standard_normal((size, 2 * size + 10))
    if family == "well":  # lengths within a factor of a few
        rows *= np.exp(0.5 * generator.standard_normal((size, 1)))
    elif family == "collinear":  # angles of 1e-4
        line = generator.standard_normal(rows.shape[1])
        rows = line * (1 + 0.001 * generator.random((size, 1))) + 1e-4 * rows
    elif family == "duplicated":
        rows = rows[generator.integers(0, (size + 1) // 2, size)]
    elif family == "rank-deficient":
        rows = rows[:, : max(1, size // 2)]
    elif family == "zero":
        rows = 0.0 * rows
    elif family == "scale-spread":  # lengths from 1e-6 to 1e6
        rows *= 10.0 ** generator.uniform(-6, 6, (size, 1))
    return rows @ rows.T


@dataclass
class Cell:
    """What one solver did on the problems of one family and size."""

    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    failures: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Min-norm weights beside their peers.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    cfg = parser.parse_args()
    torch.set_num_threads(1)
    cells = {}
    tired: set[tuple[str, str]] = set()
    for family in cfg.families:
        for size in cfg.sizes:
            solvers = make_solvers(size)
            by_name = measure(family, size, solvers, tired)
            cells.update({(family, size, name): cell for name, cell in by_name.items()})
    names = list(dict.fromkeys(name for _, _, name in cells))
    for family in cfg.families:
        header = ["", *(f"M={size}" for size in cfg.sizes)]
        by_size = [[cells.get((family, size, name)) for size in cfg.sizes] for name in names]
        entries = {"CPU time in microseconds": _time, "largest relative KKT gap, F failures": _gap}
        if family in UNIQUE:
            entries["largest |λ - λ*| (the last row: 100 ε κ)"] = _error
        for title, entry in entries.items():
            rows = [
                [name, *(entry(cell) if cell else "-" for cell in row)]
                for name, row in zip(names, by_size, strict=True)
            ]
            if entry is _error:
                rows.append(["100 ε κ", *(_bound(cell) for cell in by_size[0])])
            print_table(f"{family}: {title}", header, rows)
    print_verdict(cells, cfg.sizes, cfg.families)
    print_batch()
    print_starts()


def make_solvers(size: int) -> dict[str, Solve]:
    """Returns every solver that is installed, from a Gram matrix [M, M] to weights [M]."""
    solvers: dict[str, Solve] = {
        "firm (public)": lambda gram: min_norm_weights(torch.from_numpy(gram)).numpy(),
        "firm (core)": simplex_qp,
    }
    solvers |= cvxpy_solvers(size) | qp_solvers(size) | scipy_solvers(size)
    if torchjd := _installed("torchjd.aggregation"):
        weighting = torchjd.MGDAWeighting()
        solvers["TorchJD MGDA"] = lambda gram: weighting(torch.from_numpy(gram)).numpy()
    return {**solvers, "Frank-Wolfe, 1000 steps": frank_wolfe}


def cvxpy_solvers(size: int) -> dict[str, Solve]:
    """Returns cvxpy's, which build their problem in each call, or once with parameters (DPP)."""

    def naive(gram: np.ndarray, solver: str) -> np.ndarray:
        weights = cvxpy.Variable(size, nonneg=True)
        goal = cvxpy.Minimize(cvxpy.quad_form(weights, cvxpy.psd_wrap(gram)))
        total: Any = cvxpy.sum(weights) == 1
        cvxpy.Problem(goal, [total]).solve(solver=solver)
        return np.asarray(weights.value, dtype=float)

    def parametrised(solver: str) -> Solve:
        root, weights = cvxpy.Parameter((size, size)), cvxpy.Variable(size, nonneg=True)
        goal = cvxpy.Minimize(cvxpy.sum_squares(root @ weights))
        total: Any = cvxpy.sum(weights) == 1
        problem = cvxpy.Problem(goal, [total])

        def solve(gram: np.ndarray) -> np.ndarray:
            root.value = _root(gram)
            problem.solve(solver=solver)
            return np.asarray(weights.value, dtype=float)

        return solve

    return {
        "cvxpy naive Clarabel": lambda gram: naive(gram, cvxpy.CLARABEL),
        "cvxpy naive OSQP": lambda gram: naive(gram, cvxpy.OSQP),
        "cvxpy DPP Clarabel": parametrised(cvxpy.CLARABEL),
        "cvxpy DPP OSQP": parametrised(cvxpy.OSQP),
    }


def qp_solvers(size: int) -> dict[str, Solve]:
    """Returns those of daqp and quadprog, where they are installed."""
    solvers: dict[str, Solve] = {}
    ones, zeros = np.ones(size), np.zeros(size)
    if daqp := _installed("daqp"):
        sense = np.array([0] * size + [5], dtype=np.int32)
        upper, lower = np.append(np.full(size, 1e30), 1.0), np.append(zeros, 1.0)
        row = ones[None].copy()

        def by_daqp(gram: np.ndarray) -> np.ndarray:
            weights, _, flag, _ = daqp.solve(gram, zeros, row, upper, lower, sense)
            if flag < 1:
                raise RuntimeError(f"exit flag {flag}")
            return np.array(weights)

        solvers["daqp"] = by_daqp
    if quadprog := _installed("quadprog"):
        sides, bounds = np.hstack([ones[:, None], np.eye(size)]), np.append(1.0, zeros)
        solvers["quadprog"] = lambda gram: quadprog.solve_qp(gram, zeros, sides, bounds, 1)[0]
    return solvers


def scipy_solvers(size: int) -> dict[str, Solve]:
    """Returns NNLS on the matrix as it is and scaled to a unit diagonal, and SLSQP."""
    ones, zeros = np.ones(size), np.zeros(size)

    def by_nnls(gram: np.ndarray, scale: np.ndarray) -> np.ndarray:
        scaled = gram * scale * scale[:, None]
        try:
            root = np.linalg.cholesky(scaled).T
        except np.linalg.LinAlgError:
            root = _root(scaled)
        border = scale / scale.max()
        point, _ = scipy.optimize.nnls(np.vstack([root, border]), np.append(zeros, 1.0))
        point = scale * point
        return point / point.sum()

    def by_scaled_nnls(gram: np.ndarray) -> np.ndarray:
        diagonal = gram.diagonal()
        return by_nnls(gram, 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1.0)))

    limits = [(0.0, 1.0)] * size
    total = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: ones}

    def by_slsqp(gram: np.ndarray) -> np.ndarray:
        result = scipy.optimize.minimize(
            lambda w: (w @ gram @ w, 2 * gram @ w), ones / size, jac=True, method="SLSQP",
            bounds=limits, constraints=[total], options={"ftol": 1e-15, "maxiter": 1000},
        )  # fmt: skip
        if not result.success:
            raise RuntimeError(result.message)
        return result.x

    return {
        "scipy NNLS, unscaled": lambda gram: by_nnls(gram, ones),
        "scipy NNLS, scaled": by_scaled_nnls,
        "scipy SLSQP": by_slsqp,
    }


def _root(gram: np.ndarray) -> np.ndarray:
    """Returns R with RᵀR = G."""
    values, vectors = np.linalg.eigh(gram)
    return np.sqrt(np.maximum(values, 0))[:, None] * vectors.T


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def frank_wolfe(gram: np.ndarray) -> np.ndarray:
    """Returns weights after at most 1,000 Frank-Wolfe steps with exact line search."""
    weights = np.full(len(gram), 1 / len(gram))
    for _ in range(1000):
        slope = gram @ weights
        corner = int(slope.argmin())
        value = weights @ slope
        if value - slope[corner] <= 1e-12 * value:
            break
        length = value - 2 * slope[corner] + gram[corner, corner]
        step = min(1.0, (value - slope[corner]) / length)
        weights *= 1 - step
        weights[corner] += step
    return weights


def measure(
    family: str, size: int, solvers: dict[str, Solve], tired: set[tuple[str, str]]
) -> dict[str, Cell]:
    """Returns what each solver did on the family's problems of this size, in turns."""
    cells = {name: Cell() for name in solvers if (family, name) not in tired}
    for seed in range(PROBLEMS):
        gram = gram_of(family, size, np.random.default_rng([seed, size]))
        truth = reference(gram) if family in UNIQUE else None
        best = dict.fromkeys(cells, np.inf)
        for _ in range(ROUNDS):
            for name in cells:
                best[name] = min(best[name], _seconds(solvers[name], gram))
        for name, cell in cells.items():
            cell.seconds.append(best[name])
            if best[name] > PATIENCE_S:
                tired.add((family, name))
            weights = _attempt(solvers[name], gram)
            if weights is None or not np.isfinite(weights).all():
                cell.failures += 1
                continue
            weights = np.maximum(weights, 0.0)
            cell.gaps.append(float(kkt_gap(gram, weights / weights.sum())))
            if truth is not None:
                cell.errors.append(float(np.abs(weights - truth[0]).max()))
                cell.bounds.append(truth[1])
    return cells


def _attempt(solve: Solve, gram: np.ndarray) -> np.ndarray | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return solve(gram)
        except Exception:  # whatever a peer raises is a failure of its
            return None


def _seconds(solve: Solve, gram: np.ndarray) -> float:
    """Returns the mean CPU time of a call, over as many as fit the cell."""
    start = time.process_time()
    if _attempt(solve, gram) is None:
        return time.process_time() - start
    first = time.process_time() - start
    calls = max(1, int(CELL_S / max(first, 1e-7) / 10))
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.process_time()
        while count == 0 or time.process_time() - start < CELL_S:
            for _ in range(calls):  # a look at the clock costs as much as a small solve
                solve(gram)
            count += calls
    return (time.process_time() - start) / count


def reference(gram: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Returns λ* and 100 ε κ, κ of the scaled matrix on its support; None without python-flint.

    Block pivoting in 400-bit arithmetic until every sign condition holds there.
    """
    flint = _installed("flint")
    if flint is None:
        return None
    flint.ctx.prec = PRECISION
    arb, arb_mat = flint.arb, flint.arb_mat
    size = len(gram)
    exact = [[arb(float(entry)) for entry in row] for row in gram]
    support = [bool(weight > 0) for weight in simplex_qp(gram)]
    for _ in range(100):
        inside = [i for i in range(size) if support[i]]
        face = arb_mat([[exact[i][j] for j in inside] for i in inside])
        found = face.solve(arb_mat([[arb(1)] for _ in inside]))
        values = dict(zip(inside, (found[k, 0] for k in range(len(inside))), strict=True))
        signs = [
            values[i] if support[i] else sum((exact[i][j] * values[j] for j in inside), arb(-1))
            for i in range(size)
        ]
        if all(sign > 0 or (support[i] is False and not sign < 0) for i, sign in enumerate(signs)):
            total = sum(values.values(), arb(0))
            truth = np.array([float(values[i] / total) if support[i] else 0.0 for i in range(size)])
            chosen = np.flatnonzero(support)
            scale = 1 / np.sqrt(gram.diagonal()[chosen])
            scaled = gram[np.ix_(chosen, chosen)] * np.outer(scale, scale)
            return truth, 100 * float(np.finfo(float).eps * np.linalg.cond(scaled))
        support = [held != bool(sign < 0) for held, sign in zip(support, signs, strict=True)]
    raise RuntimeError(f"No reference at M = {size}: 100 exchanges of a 400-bit active set.")


def _time(cell: Cell) -> str:
    microseconds = 1e6 * median(cell.seconds)
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def _gap(cell: Cell) -> str:
    worst = f"{max(cell.gaps):.0e}" if cell.gaps else "-"
    return f"{worst} F{cell.failures}" if cell.failures else worst


def _error(cell: Cell) -> str:
    return f"{max(cell.errors):.0e}" if cell.errors else "-"


def _bound(cell: Cell | None) -> str:
    return f"{min(cell.bounds):.0e}" if cell and cell.bounds else "-"


def print_verdict(
    cells: dict[tuple[str, int, str], Cell], sizes: list[int], families: list[str]
) -> None:
    """Prints this project's worst figures, and its ratios to cvxpy's fastest form."""
    own = {key: cell for key, cell in cells.items() if key[2].startswith("firm")}
    gap = max(max(cell.gaps) for cell in own.values())
    print(f"\nfailures of this project: {sum(cell.failures for cell in own.values())}")
    print(f"largest relative KKT gap: {gap:.1e} (wanted at most 1e-12)")
    shares = [
        error / bound
        for cell in own.values()
        for error, bound in zip(cell.errors, cell.bounds, strict=True)
    ]
    if shares:
        print(f"largest |λ - λ*| / (100 ε κ): {max(shares):.2g} (wanted at most 1)")
    print("\ntimes faster than cvxpy's fastest form: least over the families (median)")
    for name, wanted in (("firm (public)", "30, 10, -"), ("firm (core)", "500, 20, -")):
        for kind, largest_gap in (("any", np.inf), ("right", RIGHT)):
            entries = [_ratios(cells, size, families, name, largest_gap) for size in sizes]
            row = "".join(f"{entry:>12}" for entry in entries)
            print(f"{name:14}{kind:>6}{row}" + (f"   wanted {wanted}" if kind == "any" else ""))
    print(f"{'':20}" + "".join(f"{f'M={size}':>12}" for size in sizes))
    print(f"(any: whatever it returns; right: where one has a gap of at most {RIGHT:g})")


def _ratios(
    cells: dict[tuple[str, int, str], Cell],
    size: int,
    families: list[str],
    name: str,
    largest_gap: float,
) -> str:
    """Returns how many times faster it is than the fastest cvxpy form of small enough gaps."""
    ratios = []
    for family in families:
        peers = [
            median(cell.seconds)
            for (f, s, peer), cell in cells.items()
            if (f, s) == (family, size) and peer.startswith("cvxpy")
            if cell.gaps and not cell.failures and max(cell.gaps) <= largest_gap
        ]
        if peers:
            ratios.append(min(peers) / median(cells[family, size, name].seconds))
    return f"{min(ratios):.0f} ({median(ratios):.0f})" if ratios else "-"


def print_batch() -> None:
    """Prints the time of a batch for each of its members."""
    print("\nbatches, public function: microseconds for each member (alone)")
    for size, count in ((2, 1000), (3, 1000), (8, 100)):
        generator = np.random.default_rng(size)
        grams = np.array([gram_of("well", size, generator) for _ in range(count)])
        together = min(_seconds(min_norm_weights, grams) for _ in range(ROUNDS)) / count
        alone = min(_seconds(min_norm_weights, grams[0]) for _ in range(ROUNDS))
        print(f"M={size}, {count} members: {1e6 * together:.2f} ({1e6 * alone:.1f})")


def print_starts() -> None:
    """Prints what a start from the solution saves."""
    print("\nstarts, public function: microseconds from the solution (without a start)")
    for size in (8, 40, 64, 200):
        gram = gram_of("well", size, np.random.default_rng(size))
        solution = min_norm_weights(gram)
        warm = min(
            _seconds(lambda g, w=solution: min_norm_weights(g, start=w), gram)
            for _ in range(ROUNDS)
        )
        cold = min(_seconds(min_norm_weights, gram) for _ in range(ROUNDS))
        print(f"M={size}: {1e6 * warm:.0f} ({1e6 * cold:.0f})")


if __name__ == "__main__":
    main()
