"""The proof's decompositions hold on recorded runs, and Lemma 1 on any gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.solvers import firm_weights
from recipes.theory import exact
from recipes.theory.laboratory import ExperimentConfig, run_experiment
from recipes.theory.mdp import MdpConfig
from recipes.theory.terms import Trace, largest_ratio, measure_lemma_1, measure_terms

RUN = ExperimentConfig(MdpConfig(num_states=4, num_objectives=3), num_steps=24)


@pytest.fixture(scope="module")
def recorded():
    """An MDP and the trace of a run on it."""
    return run_experiment(RUN, seed=0)


def exact_trace(mdp, thetas, weights):
    """Clients that have the exact gradients at their own θ, for one local step."""
    gradients = exact.return_gradients(mdp, thetas)
    return Trace(thetas[None], gradients[None], weights[None], weights[None])


def test_the_decompositions_of_the_proof_hold_in_every_step(recorded):
    terms = measure_terms(*recorded, beta=RUN.beta)
    slack = 1 + 1e-9
    assert (terms.t1 <= slack * 2 * (terms.t11 + terms.t12)).all()
    assert (terms.t11 <= slack * 2 * (terms.gradient_error + terms.drift)).all()
    assert (terms.drift_solved <= slack * terms.bound_solved).all()
    assert (terms.min_norm <= slack * terms.stationarity).all()
    for name, values in vars(terms).items():
        assert values.shape == (RUN.num_steps,), name
        assert values.max() > 0, name


def test_the_descent_of_eq_5_compares_the_mean_step_with_the_true_direction(recorded):
    mdp, trace = recorded
    terms = measure_terms(mdp, trace, beta=RUN.beta)
    step = 7
    gradients, weights = trace.gradients[step], trace.weights[step]
    mean_step = sum(w @ g for w, g in zip(weights, gradients, strict=True)) / RUN.num_clients
    mean_theta, mean_weights = trace.thetas[step].mean(axis=0), weights.mean(axis=0)
    goal = mean_weights @ exact.return_gradients(mdp, mean_theta)
    assert terms.stationarity[step] == pytest.approx(goal @ goal)
    assert terms.t1[step] == pytest.approx((mean_step - goal) @ (mean_step - goal))


def test_both_parts_of_eq_7_by_hand(recorded):
    mdp, trace = recorded
    terms = measure_terms(mdp, trace, beta=RUN.beta)
    step = 6
    gradients = trace.gradients[step]
    truth = exact.return_gradients(mdp, trace.thetas[step])

    def drift(gradients, weights):
        away = weights - weights.mean(axis=0)
        return (np.einsum("cj,cjd->d", away, gradients / RUN.num_clients) ** 2).sum()

    common = trace.weights[step].mean(axis=0)
    noise = sum(common @ (g - t) for g, t in zip(gradients, truth, strict=True)) / RUN.num_clients
    assert terms.gradient_error[step] == pytest.approx(noise @ noise)
    assert terms.drift[step] == pytest.approx(drift(gradients, trace.weights[step]))
    assert terms.drift_solved[step] == pytest.approx(drift(gradients, trace.solved[step]))
    noiseless = firm_weights(truth @ truth.swapaxes(1, 2), beta=RUN.beta, normalize=False)
    assert terms.drift_steps[step] == pytest.approx(drift(truth, noiseless))
    away = trace.solved[step] - trace.solved[step].mean(axis=0)
    squares = [((a @ g) ** 2).sum() for a, g in zip(away, gradients, strict=True)]
    assert terms.bound_solved[step] == pytest.approx(np.mean(squares))


def test_the_shortest_direction_is_the_shortest_of_all_weights(recorded):
    mdp, trace = recorded
    terms = measure_terms(mdp, trace, beta=RUN.beta)
    gradients = exact.return_gradients(mdp, trace.thetas[9].mean(axis=0))
    weights = np.random.default_rng(0).dirichlet(np.ones(3), size=20_000)
    shortest = ((weights @ gradients) ** 2).sum(axis=1).min()
    assert terms.min_norm[9] <= shortest
    assert terms.min_norm[9] == pytest.approx(shortest, rel=0.02)


def test_exact_gradients_at_one_policy_with_one_weight_leave_no_error(mdp, theta):
    thetas, weights = np.stack([theta] * 3), np.array([[0.3, 0.7]] * 3)
    terms = measure_terms(mdp, exact_trace(mdp, thetas, weights), beta=0.1)
    for name in ("t1", "t11", "t12", "gradient_error", "drift", "spread", "spread_steps"):
        assert getattr(terms, name) == pytest.approx(0, abs=1e-15), name
    goal = np.array([0.3, 0.7]) @ exact.return_gradients(mdp, theta)
    assert terms.stationarity == pytest.approx(goal @ goal)


def test_different_weights_alone_are_disagreement(mdp, theta):
    thetas, weights = np.stack([theta, theta]), np.array([[0.2, 0.8], [0.6, 0.4]])
    trace = exact_trace(mdp, thetas, weights)
    terms = measure_terms(mdp, trace, beta=0.1)
    assert terms.drift == pytest.approx(0, abs=1e-25)  # common gradients: deviations cancel
    first, second = trace.gradients[0, 0]
    deviation = 0.2 * (first - second)
    assert terms.bound_solved == pytest.approx(deviation @ deviation)
    assert terms.spread == pytest.approx((0.2**2 + 0.2**2) ** 0.5)


def test_clients_that_moved_apart_are_client_drift(mdp, theta):
    shift = np.random.default_rng(0).normal(size=theta.shape)
    thetas, weights = np.stack([theta + shift, theta - shift]), np.array([[0.5, 0.5]] * 2)
    terms = measure_terms(mdp, exact_trace(mdp, thetas, weights), beta=0.1)
    gap = exact.return_gradients(mdp, thetas).mean(axis=0) - exact.return_gradients(mdp, theta)
    assert terms.t12 == pytest.approx((gap.mean(axis=0) ** 2).sum())
    assert terms.t12 == pytest.approx(terms.t1)
    assert terms.gradient_error == pytest.approx(0, abs=1e-25)
    assert terms.spread_steps > 0


def test_before_the_first_local_step_nothing_is_due_to_local_steps(recorded):
    terms = measure_terms(*recorded, beta=RUN.beta)
    is_first = np.arange(RUN.num_steps) % RUN.num_local_steps == 0
    for name in ("t12", "spread_steps"):
        assert getattr(terms, name)[is_first].max() < 1e-9 < getattr(terms, name)[~is_first].max()


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 8)),
    beta=st.floats(1e-3, 1e3),
    gap=st.floats(1e-6, 10),
)
def test_lemma_1_holds_for_any_gradients(seed, sizes, beta, gap):
    generator = np.random.default_rng(seed)
    first = generator.normal(size=sizes)
    both = np.stack([first, first + gap * generator.normal(size=sizes)])
    weights = firm_weights(both @ both.swapaxes(1, 2), beta=beta, normalize=False)
    left = np.linalg.norm(weights[0] - weights[1])
    radius = np.linalg.norm(both, axis=2).max()
    right = 4 * radius * sizes[0] / beta * np.linalg.norm(both[0] - both[1], axis=1).max()
    assert left <= right + 1e-12


def test_lemma_1_holds_in_every_step_of_a_run_and_its_sides_are_as_printed(recorded):
    mdp, trace = recorded
    lemma = measure_lemma_1(mdp, trace, beta=RUN.beta)
    assert lemma.left.shape == (24, 6)
    assert (lemma.left <= lemma.right).all()
    assert (lemma.right <= lemma.right_prior).all()
    assert lemma.left.max() > 1e-3
    # step 5, clients 1 and 3: the fifth of the pairs 01 02 03 12 13 23
    gradients = trace.gradients[5, [1, 3]]
    radius = np.linalg.norm(gradients, axis=2).max()
    gap = np.linalg.norm(gradients[0] - gradients[1], axis=1).max()
    assert lemma.right[5, 4] == pytest.approx(4 * radius * 3 / RUN.beta * gap)
    assert lemma.right_prior[5, 4] == pytest.approx(
        lemma.right[5, 4] / radius * exact.gradient_bound(mdp)
    )
    assert lemma.left[5, 4] == pytest.approx(
        np.linalg.norm(trace.solved[5, 1] - trace.solved[5, 3])
    )


def test_lemma_7_bounds_every_gradient_of_a_run(recorded):
    mdp, trace = recorded
    assert np.linalg.norm(trace.gradients, axis=-1).max() <= exact.gradient_bound(mdp)


def test_the_largest_ratio_passes_over_pairs_that_agree():
    assert largest_ratio(np.array([0.0, 1.0, 3.0]), np.array([0.0, 4.0, 4.0])) == 0.75


def test_lemma_1_needs_two_clients_and_a_regulariser(recorded):
    mdp, trace = recorded
    alone = Trace(*(part[:, :1] for part in vars(trace).values()))
    with pytest.raises(ValueError, match="got a single one"):
        measure_lemma_1(mdp, alone, beta=0.1)
    with pytest.raises(ValueError, match=r"positive beta, got 0\.0"):
        measure_lemma_1(mdp, trace, beta=0.0)
