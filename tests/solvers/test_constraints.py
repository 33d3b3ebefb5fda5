"""Users' constraints on the weights: how they are written, and that weights meet them."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from firm.base.extras import install_command
from firm.solvers import firm_weights, linear_constraints
from firm.solvers import programs as module
from firm.solvers.programs import constrained_qp, linear_program
from firm.solvers.regularised import served_weights

NAMES = ["helpful", "harmless"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("harmless >= 0.3", [(0, -1, -0.3)]),
        ("harmless <= 0.3", [(0, 1, 0.3)]),
        ("0.3 <= harmless", [(0, -1, -0.3)]),
        ("helpful <= 2 * harmless", [(1, -2, 0)]),
        ("helpful - harmless/4 <= 1 - 0.5", [(1, -0.25, 0.5)]),
        ("helpful == harmless * 3", [(1, -3, 0), (-1, 3, 0)]),
        ("0.1 <= helpful <= 0.6", [(-1, 0, -0.1), (1, 0, 0.6)]),
        ("-helpful <= -0.2", [(-1, 0, -0.2)]),
        ("2 * (helpful + 0.1) <= 1.5", [(2, 0, 1.3)]),
    ],
)
def test_inequalities_become_rows(text, rows):
    found = linear_constraints([text], NAMES)
    np.testing.assert_allclose(found, np.array(rows, dtype=float), atol=1e-15)


def test_names_need_not_be_identifiers():
    names = ["reward-1", "reward-1-long", "Ray2333/gpt2"]
    rows = linear_constraints(["reward-1 - reward-1-long <= Ray2333/gpt2 - 0.1"], names)
    assert rows == ((1.0, -1.0, -1.0, -0.1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("harmless", r"'harmless' is not an inequality; write a linear inequality such as"),
        ("harmless >=", "is not an inequality"),
        ("harmless > 0.3", "needs <=, >= or =="),
        ("harmles >= 0.3", "names 'harmles', but the objectives are helpful, harmless"),
        ("harmless * helpful >= 0.3", "is not linear"),
        ("1 / harmless >= 0.3", "is not linear"),
        ("harmless / 0 >= 0.3", "is not linear"),
        ("max(harmless, helpful) >= 0.3", "is not linear"),
        ("__import__('os').system('true') >= 0.3", "is not linear"),
        ("harmless >= '0.3'", "is not linear"),
        ("harmless >= 1.3", "No non-negative .* satisfy all constraints: harmless >= 1.3"),
    ],
)
def test_what_is_no_linear_inequality_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        linear_constraints([text], NAMES)


def test_constraints_that_exclude_each_other_are_refused():
    with pytest.raises(
        ValueError, match=r"satisfy all constraints: helpful >= 0\.6; harmless >= 0"
    ):
        linear_constraints(["helpful >= 0.6", "harmless >= 0.6"], NAMES)


def test_weights_by_hand():
    # without constraints (1/5, 4/5)
    gram = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    options = {"beta": 0.0, "solver": "cvxpy"}
    for text, expected in [
        ("helpful >= 0.5", [0.5, 0.5]),
        ("harmless <= 0.7", [0.3, 0.7]),
        ("harmless <= 2 * helpful", [1 / 3, 2 / 3]),
        ("helpful >= 0.1", [0.2, 0.8]),
    ]:
        rows = linear_constraints([text], NAMES)
        weights = firm_weights(gram, constraints=rows, **options)
        np.testing.assert_allclose(weights, expected, atol=1e-8)


def test_a_zero_gradient_has_all_the_weight_that_a_constraint_leaves_it():
    gradients = np.array([[1.0, 0.3], [0.0, 0.0]])
    constraints = linear_constraints(["a <= 0.9"], ["a", "b"])
    gram = gradients @ gradients.T
    weights = firm_weights(gram, beta=0.0, solver="cvxpy", constraints=constraints)
    assert weights == pytest.approx([0, 1], abs=1e-5)


def test_without_constraints_cvxpy_finds_the_exact_weights(family, random_gram):
    is_unique = family in ("well conditioned", "nearly parallel", "tiny")
    generator = np.random.default_rng(0)
    for beta in (0.0, 0.5) if is_unique else (0.5,):
        for size in (2, 3, 6):
            gram = random_gram(family, size, generator)
            found = firm_weights(gram, beta=beta, solver="cvxpy")
            np.testing.assert_allclose(found, firm_weights(gram, beta=beta), atol=1e-6)


def test_constrained_weights_keep_their_constraints_and_are_best(random_gram):
    generator = np.random.default_rng(0)
    for _ in range(10):
        gram = random_gram("well conditioned", 4, generator)
        rows, bounds = generator.standard_normal((2, 4)), np.array([0.3, 0.3])
        feasible = [
            w for w in generator.dirichlet(np.ones(4), size=300) if (rows @ w <= bounds).all()
        ]
        if not feasible:
            continue
        weights = constrained_qp(gram, rows, bounds)
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        assert (rows @ weights <= bounds + 1e-6).all()
        value = weights @ gram @ weights
        assert all(value <= w @ gram @ w * (1 + 1e-9) for w in feasible)


def test_constraints_hold_beside_a_preference_and_in_a_batch():
    gram = torch.eye(3).double().repeat(2, 1, 1)
    gram[1, 0, 0] = 5
    rows = linear_constraints(["a >= 0.25", "c <= 2 * a"], ["a", "b", "c"])
    weights = firm_weights(gram, preference=(0.1, 0, 0.9), solver="cvxpy", constraints=rows)
    np.testing.assert_allclose(weights, [[1 / 3, 0, 2 / 3]] * 2, atol=1e-8)


def test_one_problem_serves_all_matrices_of_its_size(random_gram, monkeypatch):
    module._quadratic_problem.cache_clear()
    generator = np.random.default_rng(0)
    for _ in range(4):
        constrained_qp(random_gram("well conditioned", 3, generator), np.eye(3)[:1], np.ones(1))
    info = module._quadratic_problem.cache_info()
    assert (info.misses, info.hits) == (1, 3)


def test_weights_that_miss_the_optimum_or_a_constraint_are_never_returned(monkeypatch):
    for wrong in (np.array([0.5, 0.5]), np.array([0.2, 0.8]), None):  # not best, not allowed
        monkeypatch.setattr(
            module, "_quadratic_problem", lambda *sizes, found=wrong: lambda *data: found
        )
        with pytest.raises(RuntimeError, match="No optimal weights found by cvxpy"):
            constrained_qp(np.diag([4.0, 1.0]), np.array([[-1.0, 0.0]]), np.array([-0.3]))


def test_a_wrong_end_of_the_linear_programme_is_never_returned(monkeypatch):
    for wrong in (np.array([0.5, 0.5]), np.array([1.0, 0.0])):  # not best, not allowed
        duals = SimpleNamespace(marginals=np.zeros(1))
        end = SimpleNamespace(status=0, x=wrong, ineqlin=duals)
        monkeypatch.setattr(module, "linprog", lambda *data, found=end: found)
        with pytest.raises(RuntimeError, match="duality gap"):
            linear_program(np.array([1.0, 0.0]), np.array([[-1.0, 0.0]]), np.array([-0.8]))


def test_the_linear_programme_by_hand():
    gains, rows = np.array([1.0, 0.0]), np.array([[-1.0, 0.0], [0.0, 1.0]])
    found = linear_program(gains, rows, np.array([-0.8, -np.inf]))
    np.testing.assert_allclose(found, [0.8, 0.2], atol=1e-9)
    assert linear_program(gains, rows, np.array([-0.8, 0.3])) is not None
    assert linear_program(gains, rows, np.array([-0.8, 1.3])) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "scs"}, "solver must be 'exact' or 'cvxpy', got 'scs'"),
        ({"constraints": [(1, 0, 0.5)]}, "constraints require solver 'cvxpy'"),
        ({"solver": "cvxpy", "constraints": [(1, 0.5)]}, r"3 finite numbers.*row 0 is \[1, 0.5\]"),
        ({"solver": "cvxpy", "constraints": [(1, 0, float("nan"))]}, "finite numbers"),
        ({"solver": "cvxpy", "constraints": [(1, 1, 0.5)]}, "satisfy all constraints: rows"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        firm_weights(torch.eye(2), **options)


def test_constraints_name_the_command_that_installs_their_solver(monkeypatch):
    module._quadratic_problem.cache_clear()
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ModuleNotFoundError, match="needs the package cvxpy") as missing:
        constrained_qp(np.eye(2), np.eye(2)[:1], np.ones(1))
    assert install_command("cvxpy") in str(missing.value)


def test_constraints_on_objectives_without_a_weight_do_not_apply():
    gram = np.diag([1.0, 2.0, 3.0])
    rows = linear_constraints(["b >= 0.3", "c >= 0.7"], ["a", "b", "c"])
    options: Any = {"solver": "cvxpy", "constraints": rows}
    by_preference = firm_weights(gram, preference=(1, 0, 1), **options)
    assert by_preference == pytest.approx([0.3, 0, 0.7], abs=1e-6)
    tensor = torch.tensor(gram)
    two = served_weights(tensor, served=[0, 2], beta=0.0, **options).tolist()
    assert two == pytest.approx([0.3, 0, 0.7], abs=1e-6)
    assert served_weights(tensor, served=[0], **options).tolist() == [1, 0, 0]
