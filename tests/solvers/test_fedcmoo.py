"""FedCMOO's weights: Algorithm 2 step by step, and the programme of Eq. 19."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.solvers import fedcmoo as module
from firm.solvers import (
    fedcmoo_pref_weights,
    fedcmoo_weights,
    kkt_gap,
    min_norm_weights,
)

ROWS = arrays(np.float64, (4, 6), elements=st.floats(-4, 4, width=16))


def test_one_step_is_one_projected_gradient_step():
    gram = np.array([[4.0, 1.0], [1.0, 2.0]])
    weights = fedcmoo_weights(np.array([0.5, 0.5]), gram, step_size=0.1, num_steps=1)
    # Gw = (2.5, 1.5); (0.25, 0.35) is raised by 0.2 each
    np.testing.assert_allclose(weights, [0.45, 0.55], atol=1e-15)


def test_many_steps_reach_the_min_norm_weights(random_gram):
    gram = random_gram("well conditioned", 5, np.random.default_rng(0))
    start = np.full(5, 0.2)
    gaps = [
        kkt_gap(gram, fedcmoo_weights(start, gram, step_size=0.01, num_steps=count))
        for count in (1, 10, 100, 2000)
    ]
    assert gaps == sorted(gaps, reverse=True)
    last = fedcmoo_weights(start, gram, step_size=0.01, num_steps=2000)
    np.testing.assert_allclose(last, min_norm_weights(gram), atol=1e-9)


def test_normalization_makes_the_step_blind_to_the_gradients_scale():
    gram, start = np.array([[4.0, 1.0], [1.0, 2.0]]), np.array([0.5, 0.5])
    options = {"step_size": 0.1, "num_steps": 3}
    plain, scaled = (fedcmoo_weights(start, c * gram, normalize=True, **options) for c in (1, 1e8))
    np.testing.assert_allclose(plain, scaled, atol=1e-12)
    # by the squared mean of the norms 2 and √2
    by_hand = fedcmoo_weights(start, gram / (1 + np.sqrt(0.5)) ** 2, **options)
    np.testing.assert_allclose(plain, by_hand, atol=1e-15)
    assert np.abs(plain - fedcmoo_weights(start, 1e8 * gram, **options)).max() > 0.1


def test_a_batch_equals_a_loop(random_gram):
    generator = np.random.default_rng(0)
    gram = np.array([random_gram("well conditioned", 3, generator) for _ in range(4)])
    start = generator.dirichlet(np.ones(3), size=4)
    options = {"step_size": 0.02, "num_steps": 5}
    loop = [fedcmoo_weights(w, g, **options) for w, g in zip(start, gram, strict=True)]
    np.testing.assert_allclose(fedcmoo_weights(start, gram, **options), loop, atol=1e-15)
    losses = generator.random((4, 3)) + 0.1
    loop = [fedcmoo_pref_weights(g, row, (1, 2, 3)) for g, row in zip(gram, losses, strict=True)]
    together = fedcmoo_pref_weights(gram.reshape(2, 2, 3, 3), losses.reshape(2, 2, 3), (1, 2, 3))
    np.testing.assert_allclose(together.reshape(4, 3), loop, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "step_size must be positive"),
        ({"step_size": float("inf")}, "step_size must be positive and finite"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"weights": torch.tensor([0.7, 0.7])}, "sum to 1"),
        ({"weights": torch.tensor([1.5, -0.5])}, "non-negative"),
        ({"weights": torch.ones(3) / 3}, r"shape \[2\] for this gram"),
    ],
)
def test_bad_steps_are_refused(options, message):
    usual = {"weights": torch.tensor([0.5, 0.5]), "step_size": 0.1, "num_steps": 1}
    arguments = {**usual, **options}
    with pytest.raises(ValueError, match=message):
        fedcmoo_weights(arguments.pop("weights"), torch.eye(2), **arguments)


def _towards(losses, preference):
    """a, and the divergence μ, as Algorithm 8 prints them."""
    shares = preference * losses / (preference @ losses)
    divergence = (shares * np.log(shares * len(losses))).sum()
    return preference * (np.log(shares * len(losses)) - divergence), divergence


@given(rows=ROWS, seed=st.integers(0, 10**6))
def test_the_programme_is_solved_within_its_constraints(rows, seed):
    generator = np.random.default_rng(seed)
    losses, preference = generator.random(4) + 0.1, generator.random(4) + 0.1
    gram = rows @ rows.T + 0.01 * np.eye(4)
    weights = fedcmoo_pref_weights(gram, losses, preference)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-14)

    towards, divergence = _towards(losses, preference)
    slack = 1e-6 * np.trace(gram)
    effect, worst = gram @ towards, (preference * losses).argmax()
    # what is worst does not rise, nor do others by more than towards alone would make them
    assert (gram @ weights)[worst] >= -slack
    for k in range(4):
        if k != worst and effect[k] <= 0:
            assert (gram @ weights)[k] >= effect[k] * (effect > 0).any() - slack
    # and no other weights that keep the constraints gain more
    gains = effect if divergence > 0.01 else gram.sum(axis=1)
    for other in [*np.eye(4), min_norm_weights(gram), *generator.dirichlet(np.ones(4), size=50)]:
        keeps = (gram @ other)[worst] >= 0 and all(
            (gram @ other)[k] >= effect[k] * (effect > 0).any()
            for k in range(4)
            if k != worst and effect[k] <= 0
        )
        if keeps:
            assert gains @ weights >= gains @ other - slack


def test_without_conflict_all_weight_goes_where_the_divergence_falls():
    # orthogonal gradients: a = r (log û M - μ) is largest for the largest rF
    gram, losses = np.eye(2), np.array([3.0, 1.0])
    assert fedcmoo_pref_weights(gram, losses, (1.0, 1.0)).tolist() == [1.0, 0.0]
    assert fedcmoo_pref_weights(gram, losses, (1.0, 9.0)).tolist() == [0.0, 1.0]


def test_below_the_threshold_the_sum_of_the_losses_falls_fastest():
    gram, losses = np.diag([1.0, 4.0]), np.array([1.01, 1.0])
    assert fedcmoo_pref_weights(gram, losses, (1, 1)).tolist() == [0.0, 1.0]
    assert fedcmoo_pref_weights(gram, losses, (1, 1), threshold=0.0).tolist() == [1.0, 0.0]


def test_a_direction_that_would_raise_the_worst_loss_is_not_taken():
    # -0.9: the second gradient alone would raise the first loss, which is worst
    gram = np.array([[1.0, -0.9], [-0.9, 4.0]])
    weights = fedcmoo_pref_weights(gram, np.array([1.0, 0.99]), (1, 1))
    assert (gram @ weights)[0] >= -1e-9
    # gains 0.1 and 3.1 pull to the second; the constraint holds w at 0.9/1.9
    np.testing.assert_allclose(weights, [0.9 / 1.9, 1 / 1.9], atol=1e-8)


def test_the_gradients_scale_does_not_matter(random_gram):
    gram = random_gram("well conditioned", 4, np.random.default_rng(3))
    losses, preference = np.array([1.0, 2.0, 0.5, 3.0]), (1, 1, 2, 0.5)
    usual = fedcmoo_pref_weights(gram, losses, preference)
    for scale in (1e-20, 1e20):
        scaled = fedcmoo_pref_weights(scale * gram, losses, preference)
        np.testing.assert_allclose(scaled, usual, atol=1e-8)


def test_a_minimum_weight_is_a_euclidean_projection():
    gram, losses = np.eye(3), np.array([3.0, 1.0, 1.0])
    weights = fedcmoo_pref_weights(gram, losses, (1, 1, 1), min_weight=1 / 15)
    np.testing.assert_allclose(weights, [13 / 15, 1 / 15, 1 / 15], atol=1e-12)
    equal = fedcmoo_pref_weights(gram, losses, (1, 1, 1), min_weight=1 / 3)
    np.testing.assert_allclose(equal, [1 / 3] * 3, atol=1e-12)
    # 0.9/1.9 and 1/1.9 without a minimum: one below that leaves them
    gram = np.array([[1.0, -0.9], [-0.9, 4.0]])
    for least, expected in ((0.4, [0.9 / 1.9, 1 / 1.9]), (0.5, [0.5, 0.5]), (0.48, [0.48, 0.52])):
        weights = fedcmoo_pref_weights(gram, np.array([1.0, 0.99]), (1, 1), min_weight=least)
        np.testing.assert_allclose(weights, expected, atol=1e-8)


@pytest.mark.parametrize(("first_loss", "threshold"), [(0.95, 0.0), (0.85, 0.01)])
def test_the_released_code_keeps_more_losses_from_rising(first_loss, threshold):
    gram, losses = np.array([[1.0, -0.9], [-0.9, 4.0]]), np.array([first_loss, 1.0])
    printed, released = (
        fedcmoo_pref_weights(gram, losses, (1, 1), threshold=threshold, variant=variant)
        for variant in ("printed", "released")
    )
    # the second loss is the worst, and lowering it may raise the first one as far as a would
    towards, _ = _towards(losses, np.ones(2))
    assert (gram @ printed)[0] == pytest.approx((gram @ towards)[0], abs=1e-8)
    assert (gram @ printed)[0] < -0.01
    # within 0.9 of the worst, or below the threshold, it may not: w is held at 0.9/1.9
    np.testing.assert_allclose(released, [0.9 / 1.9, 1 / 1.9], atol=1e-8)


def test_the_released_code_has_the_printed_constraints_elsewhere():
    gram, losses = np.array([[1.0, -0.9], [-0.9, 4.0]]), np.array([0.85, 1.0])
    printed = fedcmoo_pref_weights(gram, losses, (1, 1), threshold=0.0)
    released = fedcmoo_pref_weights(gram, losses, (1, 1), threshold=0.0, variant="released")
    np.testing.assert_allclose(released, printed, atol=1e-12)


def test_the_released_code_mixes_with_uniform_weights():
    gram, losses = np.eye(3), np.array([3.0, 1.0, 1.0])
    options = {"min_weight": 1 / 15, "variant": "released"}
    weights = fedcmoo_pref_weights(gram, losses, (1, 1, 1), **options)
    np.testing.assert_allclose(weights, 0.8 * np.array([1, 0, 0]) + 0.2 / 3, atol=1e-12)
    losses = np.ones(3)  # inside already: drawn together, where a projection would leave them
    plain = fedcmoo_pref_weights(np.diag([1.0, 2.0, 4.0]), losses, (1, 1, 1), variant="released")
    weights = fedcmoo_pref_weights(np.diag([1.0, 2.0, 4.0]), losses, (1, 1, 1), **options)
    np.testing.assert_allclose(weights, 0.8 * plain + 0.2 / 3, atol=1e-12)


def test_an_objective_without_preference_is_left_out(random_gram):
    gram, losses = random_gram("well conditioned", 3, np.random.default_rng(0)), np.ones(3)
    weights = fedcmoo_pref_weights(gram, losses, (1, 0, 2))
    alone = fedcmoo_pref_weights(gram[np.ix_([0, 2], [0, 2])], losses[:2], (1, 2))
    np.testing.assert_allclose(weights, [alone[0], 0, alone[1]], atol=1e-12)


def test_a_zero_loss_and_zero_gradients_have_weights():
    weights = fedcmoo_pref_weights(np.eye(2), np.array([0.0, 1.0]), (1, 1))
    assert weights.tolist() == [0.0, 1.0]
    assert fedcmoo_pref_weights(np.zeros((2, 2)), np.ones(2), (1, 3)).tolist() == [0.5, 0.5]
    assert fedcmoo_pref_weights(np.eye(2), np.zeros(2), (1, 1)).sum() == 1
    assert fedcmoo_pref_weights(np.eye(1), np.ones(1), (1,)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("losses", "preference", "options", "message"),
    [
        ([1.0, -0.1], (1, 1), {}, r"losses must be non-negative, got -0\.1"),
        ([1.0, float("nan")], (1, 1), {}, "losses must be finite"),
        ([1.0, 1.0, 1.0], (1, 1), {}, r"losses must have shape \[2\]"),
        ([1.0, 1.0], (1, -1), {}, "non-negative and not all zero"),
        ([1.0, 1.0], (0, 0), {}, "not all zero"),
        ([1.0, 1.0], (1,), {}, "one entry for each of the 2"),
        ([1.0, 1.0], (1, 1), {"threshold": -1.0}, "threshold must be non-negative"),
        ([1.0, 1.0], (1, 1), {"variant": "coded"}, "variant must be 'printed' or 'released'"),
        ([1.0, 1.0], (1, 1), {"min_weight": 0.6}, "between 0 and 1/2"),
        ([1.0, 1.0], (1, 1), {"min_weight": -0.1}, "between 0 and 1/2"),
    ],
)
def test_bad_preferences_are_refused(losses, preference, options, message):
    with pytest.raises(ValueError, match=message):
        fedcmoo_pref_weights(np.eye(2), np.array(losses), preference, **options)


def test_an_infeasible_programme_gives_the_min_norm_weights_and_a_word_in_the_log(
    monkeypatch, caplog
):
    gram = np.array([[2.0, -1.0], [-1.0, 1.0]])
    wanted = fedcmoo_pref_weights(gram, np.array([3.0, 1.0]), [1.0, 1.0])
    assert not np.allclose(wanted, min_norm_weights(gram))
    assert not caplog.records
    # rounding alone makes one infeasible, which no matrix does every time
    monkeypatch.setattr(module, "linear_program", lambda *_: None)
    found = fedcmoo_pref_weights(gram, np.array([3.0, 1.0]), [1.0, 1.0])
    np.testing.assert_allclose(found, min_norm_weights(gram), atol=1e-12)
    assert "min-norm" in caplog.text
