"""Experiments are reproducible, share their MDP, and are traced in the order of the steps."""

from dataclasses import replace

import numpy as np
import pytest

from firm.solvers import firm_weights
from recipes.theory.client import ActorCriticConfig
from recipes.theory.laboratory import ExperimentConfig, run_experiment, summarise, trace_of
from recipes.theory.mdp import MdpConfig

RUN = ExperimentConfig(
    MdpConfig(num_states=3, num_actions=2),
    ActorCriticConfig(batch_size=8),
    num_clients=3,
    num_steps=12,
    num_local_steps=4,
)


def test_equal_seeds_give_equal_traces_and_others_do_not():
    (_, first), (_, again), (_, other) = (run_experiment(RUN, seed=seed) for seed in (0, 0, 1))
    for name, values in vars(first).items():
        assert np.array_equal(values, getattr(again, name)), name
        assert not np.array_equal(values, getattr(other, name)), name


def test_settings_of_one_seed_share_their_process():
    mdp, _ = run_experiment(RUN, seed=0)
    other, _ = run_experiment(replace(RUN, beta=3.0, num_clients=2), seed=0)
    assert np.array_equal(mdp.kernel, other.kernel)
    assert not np.array_equal(mdp.kernel, run_experiment(RUN, seed=1)[0].kernel)


def test_held_rounds_start_at_the_uniform_policy_and_learned_ones_where_the_last_one_ended():
    _, held = run_experiment(RUN, seed=0)
    _, learned = run_experiment(replace(RUN, trajectory="learned"), seed=0)
    for trace in (held, learned):
        assert (trace.thetas[::4] == trace.thetas[::4, :1]).all()  # all clients at the server's θ
        assert (trace.thetas[1] != trace.thetas[1, :1]).any()
    assert not held.thetas[::4].any()
    ends = learned.thetas[3] + RUN.client.step_size * np.einsum(
        "cj,cjd->cd", learned.weights[3], learned.gradients[3]
    )
    np.testing.assert_allclose(learned.thetas[4, 0], ends.mean(axis=0), atol=1e-15)


def test_weights_are_those_of_the_raw_gram_and_smoothed_over_all_steps():
    _, trace = run_experiment(RUN, seed=0)
    grams = trace.gradients @ trace.gradients.swapaxes(-1, -2)
    solved = firm_weights(grams, beta=RUN.beta, normalize=False)
    np.testing.assert_allclose(trace.solved, solved, atol=1e-12)
    counts = np.arange(1, 13)[:, None, None]
    np.testing.assert_allclose(trace.weights, trace.solved.cumsum(axis=0) / counts, atol=1e-12)


def test_a_trace_orders_rounds_steps_and_clients():
    def row(number, client):
        thetas = [[100.0 * number + 10 * step + client] for step in range(2)]
        weights = [[1.0]] * 2
        jacobian = [[[1.0]]] * 2
        return {
            "theta": thetas,
            "weights": weights,
            "smoothed_weights": weights,
            "jacobian": jacobian,
        }

    trace = trace_of([[row(number, client) for client in range(3)] for number in range(2)])
    assert trace.thetas[..., 0].tolist() == [
        [0, 1, 2],
        [10, 11, 12],
        [100, 101, 102],
        [110, 111, 112],
    ]
    assert (trace.gradients == -1).all()  # ascending


def test_summaries_are_means_and_leave_lemma_1_out_where_it_does_not_apply():
    run = run_experiment(RUN, seed=0)
    figures = summarise(*run, beta=RUN.beta)
    assert figures["lemma_1_violations"] == 0
    assert figures["lemma_1_comparisons"] == 12 * 3
    assert 0 < figures["lemma_1_prior_ratio"] < figures["lemma_1_ratio"] < 1
    norms = np.linalg.norm(run[1].gradients, axis=-1)
    assert figures["lemma_7_largest"] == norms.max() < figures["lemma_7_bound"]
    assert not any(name.startswith("lemma") for name in summarise(*run, beta=0.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 0}, "num_clients must be at least 1"),
        ({"num_steps": 10}, r"multiple of num_local_steps \(4\), got 10"),
        ({"beta": -0.1}, "beta must be non-negative"),
    ],
)
def test_configurations_name_the_key_at_fault(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(RUN, **changes)
