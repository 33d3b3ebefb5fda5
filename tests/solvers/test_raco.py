"""RACO's clipped CAGrad: against a grid, the paper's bounds, and cases without a correction."""

import numpy as np
import pytest

from firm.solvers import raco_weights


def grams(num_objectives, count=20):
    generator = np.random.default_rng(num_objectives)
    for _ in range(count):
        jacobian = generator.normal(size=(num_objectives, 9))
        scales = 10.0 ** generator.uniform(-2, 2, size=(num_objectives, 1))
        yield (jacobian * scales) @ (jacobian * scales).T


def test_two_objectives_against_a_grid():
    jacobian, w, c = np.array([[1.0, -4.0], [-1.0, 1.0]]), np.array([0.2, 0.8]), 0.5
    mean = w @ jacobian
    shares = np.linspace(0, 1, 200_001)[:, None]
    mixed = shares * jacobian[0] + (1 - shares) * jacobian[1]
    values = mixed @ mean + c * np.linalg.norm(mean) * np.linalg.norm(mixed, axis=1)
    best = shares[values.argmin(), 0]
    assert best == pytest.approx(0.3561, abs=1e-4)
    clipped = np.minimum([best, 1 - best], w)
    length = c * np.linalg.norm(mean) / np.linalg.norm(clipped @ jacobian)
    weights = raco_weights(jacobian @ jacobian.T, preference=[1.0, 4.0], c=c)
    np.testing.assert_allclose(weights, w + length * clipped, rtol=1e-4)


def test_the_correction_has_its_length_whatever_the_order_of_objectives():
    for num_objectives in (2, 3, 8):
        for gram in grams(num_objectives):
            w = np.random.default_rng(0).dirichlet(np.ones(num_objectives))
            correction = raco_weights(gram, preference=w, c=0.4) - w
            length = np.sqrt(correction @ gram @ correction)
            assert length == pytest.approx(0.4 * np.sqrt(w @ gram @ w), rel=1e-6)
            assert correction.min() > -1e-12
            permuted = np.random.default_rng(1).permutation(num_objectives)
            again = raco_weights(gram[np.ix_(permuted, permuted)], preference=w[permuted], c=0.4)
            np.testing.assert_allclose(again, (w + correction)[permuted], rtol=1e-3)


def test_without_a_radius_conflict_or_gradients_it_is_the_weighted_sum():
    (gram,) = grams(3, count=1)
    w = [0.5, 0.3, 0.2]
    np.testing.assert_allclose(raco_weights(gram, preference=w, c=0.0), w)
    opposed = np.array([[1.0, -1.0], [-1.0, 1.0]])
    for zero in (np.zeros((2, 2)), opposed, np.diag([1.0, 0.0])):
        np.testing.assert_allclose(raco_weights(zero), [0.5, 0.5])
    served = raco_weights(gram, preference=w, served=[0, 2])
    own = raco_weights(gram[np.ix_([0, 2], [0, 2])], preference=[0.5, 0.2])
    np.testing.assert_allclose(served, [own[0], 0.0, own[1]])
    with pytest.raises(ValueError, match="c must be at least 0 and less than 1, got 1"):
        raco_weights(gram, c=1.0)
    with pytest.raises(ValueError, match="not all zero"):
        raco_weights(gram, preference=[0, 0, 0])
