"""The min-norm weights: what MGDA and FedMGDA+ promise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.solvers import firm_weights, kkt_gap, min_norm_weights

ROWS = arrays(np.float64, (4, 6), elements=st.floats(-4, 4, width=16))


@given(rows=ROWS)
def test_a_step_along_the_direction_raises_no_loss(rows):
    direction = min_norm_weights(rows @ rows.T) @ rows
    squared = direction @ direction
    assert (rows @ direction).min() >= squared - 1e-11 * max(1.0, np.abs(rows).max() ** 2)


@given(rows=ROWS)
def test_no_other_weights_make_a_shorter_direction(rows):
    shortest = np.linalg.norm(min_norm_weights(rows @ rows.T) @ rows)
    for other in np.random.default_rng(0).dirichlet(np.full(4, 0.5), size=20):
        assert shortest <= np.linalg.norm(other @ rows) + 1e-12


@given(rows=ROWS, order=st.permutations(range(4)))
def test_weights_move_with_their_objectives(rows, order):
    gram = rows @ rows.T + 0.1 * np.eye(4)
    moved = min_norm_weights(gram[np.ix_(order, order)])
    np.testing.assert_allclose(moved, min_norm_weights(gram)[list(order)], atol=1e-11)


@given(rows=ROWS, exponent=st.floats(-60, 60))
def test_weights_do_not_depend_on_the_gradients_common_scale(rows, exponent):
    gram = rows @ rows.T + 0.1 * np.eye(4)
    scaled = min_norm_weights(10.0**exponent * gram)
    np.testing.assert_allclose(scaled, min_norm_weights(gram), atol=1e-11)


def test_firm_without_a_regulariser_is_min_norm(random_gram):
    gram = random_gram("well conditioned", 6, np.random.default_rng(0))
    np.testing.assert_allclose(firm_weights(gram, beta=0.0), min_norm_weights(gram), atol=1e-14)


def test_the_box_shrinks_to_its_center_and_grows_to_the_simplex(random_gram):
    gram = random_gram("well conditioned", 5, np.random.default_rng(0))
    center = np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    np.testing.assert_array_equal(min_norm_weights(gram, center=center, radius=0.0), center)
    np.testing.assert_allclose(
        min_norm_weights(gram, center=center, radius=1.0), min_norm_weights(gram), atol=1e-14
    )
    norms = []
    for radius in (0.0, 0.02, 0.1, 0.3, 1.0):
        weights = min_norm_weights(gram, center=center, radius=radius)
        assert np.abs(weights - center).max() <= radius + 1e-15
        assert kkt_gap(gram, weights, center=center, radius=radius) <= 1e-12
        norms.append(weights @ gram @ weights)
    assert norms == sorted(norms, reverse=True)
    assert norms[0] > 1.1 * norms[-1]


def test_a_box_by_hand():
    # without a box (1/5, 4/5); the box around (1/2, 1/2) stops at 0.6
    gram = torch.tensor([[4.0, 0.0], [0.0, 1.0]])
    assert min_norm_weights(gram, radius=0.1).tolist() == pytest.approx([0.4, 0.6])
    assert min_norm_weights(gram, radius=0.3).tolist() == pytest.approx([0.2, 0.8])
    # around (0.9, 0.1): at most 0.2 for the second
    weights = min_norm_weights(gram, center=(0.9, 0.1), radius=0.1)
    assert weights.tolist() == pytest.approx([0.8, 0.2])


def test_the_gap_in_a_box_is_blind_to_what_the_box_forbids():
    gram = np.diag([4.0, 1.0])
    weights = np.array([0.4, 0.6])
    assert kkt_gap(gram, weights) > 0.1
    assert kkt_gap(gram, weights, radius=0.1) == 0
    assert kkt_gap(gram, np.array([0.45, 0.55]), radius=0.1) > 0.01
    assert kkt_gap(gram, np.array([0.6, 0.4]), radius=0.1) > 0.1


def test_the_gap_in_the_whole_simplex_is_that_without_a_box_at_an_optimum_and_off_it(random_gram):
    generator = np.random.default_rng(0)
    gram = random_gram("well conditioned", 4, generator)
    assert kkt_gap(gram, min_norm_weights(gram), radius=1.0) < 1e-14
    for weights in generator.dirichlet(np.ones(4), size=5):
        assert kkt_gap(gram, weights, radius=1.0) >= kkt_gap(gram, weights) > 1e-3


@pytest.mark.parametrize("radius", [None, 0.2])
def test_a_batch_equals_a_loop(radius, random_gram):
    generator = np.random.default_rng(0)
    gram = np.array([random_gram("well conditioned", 4, generator) for _ in range(6)])
    loop = [min_norm_weights(single, radius=radius) for single in gram]
    together = min_norm_weights(gram.reshape(2, 3, 4, 4), radius=radius)
    np.testing.assert_allclose(together.reshape(6, 4), loop, atol=1e-14)


def test_the_type_is_kept_and_the_input_unchanged():
    gram = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    before = gram.clone()
    weights = min_norm_weights(gram, start=torch.tensor([0.0, 1.0]))
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([0.25, 0.75])
    assert torch.equal(gram, before)
    assert isinstance(min_norm_weights(gram.numpy()), np.ndarray)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": -0.1}, r"radius must be non-negative and finite, got -0\.1"),
        ({"radius": float("nan")}, "radius must be non-negative"),
        ({"center": (0.5, 0.5)}, "center requires a radius"),
        ({"center": (0.5, 0.3, 0.2), "radius": 0.1}, "entry for each of the 2 objectives"),
        ({"center": (0.5, float("nan")), "radius": 0.1}, "one finite entry"),
        (
            {"center": (0.9, 0.9), "radius": 0.1},
            r"box contains no weights.*between 1\.6 and 2, never to 1",
        ),
        ({"center": (0.1, 0.1), "radius": 0.1}, r"sum to between 0 and 0\.4"),
        ({"center": (-1.0, 0.5), "radius": 0.1}, r"never to 1"),
        ({"start": torch.tensor([1.0])}, r"start must have shape \[M\]"),
        ({"start": torch.tensor([0.0, -1.0])}, "positive entry"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        min_norm_weights(torch.eye(2), **options)


def test_a_bad_member_of_a_batch_is_named():
    gram = torch.eye(2).repeat(3, 1, 1)
    bad = gram.clone()
    bad[1] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(ValueError, match=r"eigenvalue -1 in batch entry \[1\]"):
        min_norm_weights(bad)
    bad = gram.clone()
    bad[2, 0, 1] = 0.5
    with pytest.raises(ValueError, match=r"0\.5 apart in batch entry \[2\]"):
        min_norm_weights(bad)
    bad = gram.clone()
    bad[0, 1, 1] = float("nan")
    with pytest.raises(ValueError, match=r"got nan at \[0, 1, 1\]"):
        min_norm_weights(bad)


@pytest.mark.parametrize("size", [2, 3, 5, 30])
def test_an_indefinite_matrix_is_refused_and_a_rounded_one_is_not(size):
    generator = np.random.default_rng(size)
    rows = generator.standard_normal((size, size))
    vectors, _ = np.linalg.qr(rows)
    values = np.linspace(0.5, 1.5, size)
    for smallest, is_fine in ((-1e-3, False), (-1e-8, True), (0.0, True)):
        values[0] = smallest
        gram = (vectors * values) @ vectors.T
        gram = (gram + gram.T) / 2
        if is_fine:
            assert min_norm_weights(gram).sum() == pytest.approx(1)
        else:
            with pytest.raises(ValueError, match=r"eigenvalue -0\.001"):
                min_norm_weights(gram)
