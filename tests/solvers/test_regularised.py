"""FIRM's weights: what Eq. 1, 2, 3, 9 and 54 imply, then oracles."""

import warnings

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.solvers import firm_weights, kkt_gap

sizes = st.integers(min_value=1, max_value=6)
betas = st.floats(min_value=1e-3, max_value=10.0)


@st.composite
def grams(draw, size=None, num_batches=None):
    """Gram matrices of M gradients in 1 to 8 dimensions, zero and parallel ones included."""
    num_objectives = draw(sizes) if size is None else size
    num_dimensions = draw(st.integers(1, 8))
    batch = () if num_batches is None else (num_batches,)
    shape = (*batch, num_objectives, num_dimensions)
    rows = draw(arrays(np.float64, shape, elements=st.floats(-4, 4, width=16)))
    return rows @ rows.swapaxes(-1, -2)


def normalized(gram: np.ndarray) -> np.ndarray:
    return gram / (np.trace(gram) / len(gram)) if np.trace(gram) > 0 else gram


@given(gram=grams(), beta=betas)
def test_weights_are_on_the_simplex_and_meet_the_optimality_conditions(gram, beta):
    weights = firm_weights(gram, beta=beta)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-14)
    assert kkt_gap(normalized(gram) + beta / 2 * np.eye(len(gram)), weights) < 1e-12


@given(gram=grams())
def test_unregularised_weights_meet_the_optimality_conditions_of_min_norm(gram):
    assert kkt_gap(gram, firm_weights(gram, beta=0.0)) < 1e-10


@given(gram=grams(size=4), beta=betas, order=st.permutations(range(4)))
def test_weights_move_with_their_objectives(gram, beta, order):
    moved = firm_weights(gram[np.ix_(order, order)], beta=beta)
    np.testing.assert_allclose(moved, firm_weights(gram, beta=beta)[list(order)], atol=1e-9)


@given(gram=grams(), beta=betas, exponent=st.floats(-8, 8))
def test_normalized_weights_do_not_depend_on_the_gradients_scale(gram, beta, exponent):
    scaled = firm_weights(10.0**exponent * gram, beta=beta)
    np.testing.assert_allclose(scaled, firm_weights(gram, beta=beta), atol=1e-9)


@given(gram=grams(size=3), beta=betas)
def test_duplicated_objectives_share_alike(gram, beta):
    twice = np.block([[gram, gram], [gram, gram]])
    weights = firm_weights(twice, beta=beta)
    np.testing.assert_allclose(weights[:3], weights[3:], atol=1e-9)
    # two copies at half the weight each halve the regulariser
    single = firm_weights(gram, beta=beta / 2)
    np.testing.assert_allclose(weights[:3] + weights[3:], single, atol=1e-9)


@given(gram=grams())
def test_large_beta_gives_uniform_weights(gram):
    np.testing.assert_allclose(firm_weights(gram, beta=1e12), 1 / len(gram), atol=1e-11)


@given(gram=grams(size=3))
def test_large_preference_strength_gives_the_preference(gram):
    weights = firm_weights(gram, preference=(1, 2, 5), preference_strength=1e12)
    np.testing.assert_allclose(weights, [0.125, 0.25, 0.625], atol=1e-11)


@given(gram=grams(size=4), beta=betas)
def test_an_objective_without_preference_is_as_if_it_were_not_there(gram, beta):
    weights = firm_weights(gram, beta=beta, preference=(2, 0, 1, 1))
    others = [0, 2, 3]
    assert weights[1] == 0.0
    alone = firm_weights(gram[np.ix_(others, others)], preference=(2, 1, 1))
    np.testing.assert_array_equal(weights[others], alone)


@given(gram=grams(size=3), beta=betas)
def test_uniform_preference_equals_the_beta_that_it_amounts_to(gram, beta):
    # p = 1/3: strength · Diag(3) is β/2 · I
    by_preference = firm_weights(gram, preference=(7, 7, 7), preference_strength=beta / 6)
    np.testing.assert_allclose(by_preference, firm_weights(gram, beta=beta), atol=1e-9)


@given(gram=grams(size=3, num_batches=4), beta=betas)
def test_a_batch_equals_a_loop(gram, beta):
    loop = np.stack([firm_weights(single, beta=beta) for single in gram])
    together = firm_weights(gram, beta=beta)
    np.testing.assert_allclose(together, loop, atol=1e-9)  # 1e-16 times the condition number
    deep = firm_weights(gram.reshape(2, 2, 3, 3), beta=beta)
    np.testing.assert_array_equal(deep, together.reshape(2, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_input_is_not_changed_and_gives_dtype_and_device(dtype):
    rows = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).double()
    gram = (rows @ rows.T).to(dtype).requires_grad_()
    before = gram.detach().clone()
    for options in ({}, {"preference": (1, 0, 2)}, {"normalize": False}):
        weights = firm_weights(gram, **options)
        assert weights.dtype == dtype
        assert weights.device == gram.device
        assert not weights.requires_grad
        assert torch.equal(gram, before)
        assert weights.sum().item() == pytest.approx(1, abs=4 * torch.finfo(dtype).eps)


def test_rounding_that_bends_the_two_triangles_apart_is_evened_out():
    for size in (2, 3):
        rows = np.random.default_rng(size).standard_normal((size, 9))
        bent = rows @ rows.T * (1 + 1e-8 * np.tri(size))
        np.testing.assert_array_equal(firm_weights(bent), firm_weights(bent.T.copy()))


def test_arrays_give_arrays_and_tensors_the_same_numbers():
    gram = np.array([[4.0, 1.0], [1.0, 2.0]], dtype=np.float32)
    weights = firm_weights(gram)
    assert weights.dtype == np.float32
    assert weights.tolist() == firm_weights(torch.from_numpy(gram)).tolist()


def test_one_objective_has_weight_exactly_one():
    for gram in (torch.tensor([[0.37]]), torch.zeros(1, 1), torch.ones(5, 1, 1)):
        assert torch.equal(firm_weights(gram), torch.ones(gram.shape[:-1]))


@pytest.mark.parametrize("normalize", [True, False])
def test_without_gradients_the_regulariser_alone_decides(normalize):
    for size in (2, 3):
        zeros = np.zeros((size, size))
        for beta in (0.0, 0.01):
            weights = firm_weights(zeros, beta=beta, normalize=normalize)
            np.testing.assert_allclose(weights, 1 / size, atol=1e-15)
    weights = firm_weights(np.zeros((3, 3)), preference=(1, 0, 3), normalize=normalize)
    np.testing.assert_allclose(weights, [0.25, 0, 0.75], atol=1e-15)


def test_two_objectives_by_hand():
    # g1 = (2, 0), g2 = (1, 1): G = [[4, 2], [2, 2]], trace mean 3
    gram = torch.tensor([[4.0, 2.0], [2.0, 2.0]], dtype=torch.float64)
    # β = 0: λ1 = (2 - 2) / (4 - 2·2 + 2) = 0
    assert firm_weights(gram, beta=0.0).tolist() == [0.0, 1.0]
    # Eq. 9, β = 1: Q = [[4/3 + 1/2, 2/3], [2/3, 2/3 + 1/2]]; λ1 = (1/2) / (7/6 + 1/2) = 3/10
    assert firm_weights(gram, beta=1.0).tolist() == pytest.approx([0.3, 0.7], abs=1e-15)
    # Eq. 2, β = 2: Q = [[5, 2], [2, 3]]; λ1 = (3 - 2) / (3 + 1) = 1/4
    assert firm_weights(gram, beta=2.0, normalize=False).tolist() == [0.25, 0.75]
    # Eq. 3, p = (3/4, 1/4): Q = [[4 + 4/3, 2], [2, 2 + 4]]; λ1 = 4 / (10/3 + 4) = 6/11
    weights = firm_weights(gram, preference=(3, 1), normalize=False)
    assert weights.tolist() == pytest.approx([6 / 11, 5 / 11], abs=1e-15)
    # Eq. 54, same p: Q = [[8/3, 2/3], [2/3, 14/3]]; λ1 = 4 / (2 + 4) = 2/3
    weights = firm_weights(gram, preference=(3, 1))
    assert weights.tolist() == pytest.approx([2 / 3, 1 / 3], abs=1e-15)
    # Eq. 54 at strength 1/2: Q = [[2, 2/3], [2/3, 8/3]]; λ1 = 2 / (4/3 + 2) = 3/5
    weights = firm_weights(gram, preference=(3, 1), preference_strength=0.5)
    assert weights.tolist() == pytest.approx([0.6, 0.4], abs=1e-15)


def test_three_orthogonal_gradients_by_hand():
    # weights are inversely proportional to the squared norms 1, 2, 4
    weights = firm_weights(np.diag([1.0, 2.0, 4.0]), beta=0.0)
    np.testing.assert_allclose(weights, [4 / 7, 2 / 7, 1 / 7], atol=1e-15)
    # β = 6 on the raw matrix adds 3 to each: 1/4, 1/5, 1/7 in proportion 35 : 28 : 20
    weights = firm_weights(np.diag([1.0, 2.0, 4.0]), beta=6.0, normalize=False)
    np.testing.assert_allclose(weights, [35 / 83, 28 / 83, 20 / 83], atol=1e-15)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("options", [{"beta": 0.01}, {"preference": (1.0, 2.0, 3.0, 4.0)}])
def test_weights_equal_those_in_rational_arithmetic(size, options, exact_oracle):
    rows = np.random.default_rng(size).standard_normal((size, 2))
    if "preference" in options:
        preference = np.array(options["preference"][:size])
        options = {"preference": preference}
        regulariser = preference.sum() / preference
    else:
        regulariser = np.full(size, 0.005)
    exact = exact_oracle(normalized(rows @ rows.T) + np.diag(regulariser))
    np.testing.assert_allclose(firm_weights(rows @ rows.T, **options), exact, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_weights_equal_those_of_cvxpy_with_clarabel(size):
    rows = np.random.default_rng(size).standard_normal((size, 20))
    gram = normalized(rows @ rows.T)
    variable = cvxpy.Variable(size, nonneg=True)
    objective = cvxpy.quad_form(variable, cvxpy.psd_wrap(gram + 0.005 * np.eye(size)))
    problem = cvxpy.Problem(cvxpy.Minimize(objective), [cvxpy.sum(variable) == 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cvxpy's own
        problem.solve(solver=cvxpy.CLARABEL)
    assert variable.value is not None
    # Clarabel stops at a relative objective of 1e-8, hence at weights good to its root
    np.testing.assert_allclose(firm_weights(rows @ rows.T), variable.value, atol=1e-4)


@pytest.mark.parametrize(
    ("gram", "message"),
    [
        (torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]]), "gram must be finite"),
        (torch.tensor([[float("inf"), 0.0], [0.0, 1.0]]), "gram must be finite"),
        (torch.tensor([[1.0, 0.5], [0.4, 1.0]]), "gram must be symmetric"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "positive semidefinite"),
        (torch.tensor([[-1.0]]), "positive semidefinite"),
        (torch.ones(2, 3), r"shape \[\.\.\., M, M\] with M >= 1, got \[2, 3\]"),
        (torch.ones(2), "shape"),
        (torch.ones(0, 0), "shape"),
        (torch.eye(2, dtype=torch.int64), "float tensor or array, got torch.int64"),
        ([[1.0]], "float tensor or array, got list"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(gram, message):
    with pytest.raises(ValueError, match=message):
        firm_weights(gram)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -0.1}, r"^beta must be non-negative, got -0\.1\.$"),
        ({"beta": float("nan")}, "beta must be non-negative"),
        ({"beta": float("inf")}, "beta must be finite"),
        (
            {"preference": (1, 1), "preference_strength": -1.0},
            "preference_strength must be non-neg",
        ),
        ({"preference": (1, -1)}, "non-negative and not all zero, got"),
        ({"preference": (0, 0)}, "not all zero"),
        ({"preference": (1, float("nan"))}, "preference must be finite"),
        ({"preference": (1, 1, 1)}, "one entry for each of the 2 objectives"),
        ({"preference": 1.0}, "one entry for each"),
        ({"preference": torch.tensor([0.5, -0.5])}, "non-negative"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        firm_weights(torch.eye(2), **options)


@given(gram=grams(size=3))
def test_unit_gradients_are_weighed_by_their_angles_alone(gram):
    """GAPO at power 1: the direction is that of the unit gradients, however long they were."""
    gram = gram + 0.1 * np.eye(3)
    norms = np.sqrt(gram.diagonal())
    unit = firm_weights(gram / np.outer(norms, norms), beta=0.3)
    weights = firm_weights(gram, beta=0.3, norm_power=1.0)
    assert weights.sum() == pytest.approx(1, abs=1e-14)
    # λⱼ gⱼ is proportional to the unit solution's μⱼ gⱼ/‖gⱼ‖
    np.testing.assert_allclose(weights * norms / (weights @ norms), unit, atol=1e-12)


def test_norm_power_by_hand():
    # norms 2 and 1: unit gradients share 1/2 each, so the weights are as 1/2 to 1
    gram = np.diag([4.0, 1.0])
    np.testing.assert_allclose(firm_weights(gram, beta=0.0, norm_power=1.0), [1 / 3, 2 / 3])
    # at power 1/2 the norms are √2 and 1: 1/3 to 2/3 on those, divided by √2 and 1
    expected = np.array([np.sqrt(0.5) / 3, 2 / 3])
    np.testing.assert_allclose(
        firm_weights(gram, beta=0.0, norm_power=0.5), expected / expected.sum(), atol=1e-15
    )
    assert firm_weights(gram, norm_power=0.0).tolist() == firm_weights(gram).tolist()


def test_a_zero_gradient_has_no_length_to_be_divided_by():
    weights = firm_weights(np.diag([4.0, 0.0]), beta=0.5, norm_power=1.0)
    assert np.isfinite(weights).all()
    assert weights.sum() == pytest.approx(1)
    assert firm_weights(np.zeros((2, 2)), norm_power=1.0).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("power", [-1.0, float("nan"), float("inf")])
def test_bad_powers_are_refused(power):
    with pytest.raises(ValueError, match="norm_power must be"):
        firm_weights(torch.eye(2), norm_power=power)
