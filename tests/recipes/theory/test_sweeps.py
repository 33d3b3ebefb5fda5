"""Sweeps change one key each, and what they measure stands at its place."""

from dataclasses import replace

import numpy as np
import pytest

from firm.run import to_dict
from recipes.theory.critic import CriticConfig
from recipes.theory.laboratory import ExperimentConfig, run_experiment, summarise
from recipes.theory.mdp import MdpConfig
from recipes.theory.sweeps import (
    LAWS,
    SweepsConfig,
    fit_law,
    measure_convergence,
    measure_sweep,
    measure_time,
    positions,
    sample_pairs,
    sweeps,
)

TINY = SweepsConfig(
    ExperimentConfig(MdpConfig(num_states=3, num_actions=2), num_clients=2, num_steps=12),
    betas=(0.1, 1.0, 2.0),
    batch_sizes=(4, 16),
    local_steps=(2, 4),
    step_sizes=(1.0, 4.0),
    objectives=(2, 3),
    clients=(2, 3),
    num_convergence_steps=42,
    num_seeds=2,
    seed=5,
)


def leaves(tree, path=""):
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for key, sub in tree.items() for k, v in leaves(sub, f"{path}.{key}").items()}


def test_a_sweep_changes_its_own_key_alone():
    expected = {
        "beta": {".beta"},
        "batch_size": {".client.batch_size"},
        "num_local_steps": {".num_local_steps"},
        "step_size": {".client.step_size"},
        "num_objectives": {".mdp.num_objectives"},
        "num_clients": {".num_clients"},
        "exact_batch_size": {".client.batch_size"},
    }
    for sweep in sweeps(TINY):
        first, last = (leaves(to_dict(sweep.experiment(x))) for x in (sweep.xs[0], sweep.xs[-1]))
        assert {key for key in first if first[key] != last[key]} == expected[sweep.name]
        assert first[".client.critic.name"] == (
            "exact" if sweep.name in ("num_clients", "exact_batch_size") else "td"
        )


def test_values_stand_at_their_seed_and_point():
    sweep = next(s for s in sweeps(TINY) if s.name == "beta")
    values = measure_sweep(sweep, TINY)
    figures = summarise(*run_experiment(sweep.experiment(1.0), seed=6), beta=1.0)
    assert sweep.xs == (0.0, 0.1, 1.0, 2.0)
    assert values["beta", "spread"].shape == (2, 4)
    assert values["beta", "spread"][1, 2] == figures["spread"]
    assert values["beta", "lemma_1_ratio"].shape == (2, 3)  # none at beta = 0
    assert values["beta", "lemma_1_ratio"][1, 1] == figures["lemma_1_ratio"]


def test_the_drift_over_time_is_binned_by_powers_of_two():
    values = measure_time(TINY)["t", "drift_solved"]
    assert positions("t", TINY).tolist() == [1, 2, 3.5, 6.5, 10.5]  # 1, 2, 3-4, 5-8, 9-12
    client = replace(TINY.experiment.client, critic=CriticConfig(name="exact"))
    mdp, trace = run_experiment(replace(TINY.experiment, client=client), seed=5)
    whole = summarise(mdp, trace, beta=TINY.experiment.beta)["drift_solved"]
    assert values[0] @ [1, 1, 2, 4, 4] / 12 == pytest.approx(whole)


def test_convergence_is_a_running_mean_of_runs_that_learn():
    values = measure_convergence(TINY)
    horizons = positions("T", TINY)
    assert horizons[0] == 1
    assert horizons[-1] == 40  # the last whole round of 4
    experiment = replace(
        TINY.experiment,
        num_steps=40,
        trajectory="learned",
        client=replace(TINY.experiment.client, step_size=TINY.convergence_step_size),
    )
    figures = summarise(*run_experiment(experiment, seed=6), beta=experiment.beta)
    assert values["T", "stationarity"][1, -1] == pytest.approx(figures["stationarity"])
    assert values["T", "min_norm"][1, -1] == pytest.approx(figures["min_norm"])
    assert values["T", "lemma_1_comparisons"].tolist() == [[40.0], [40.0]]


def test_slopes_are_fitted_where_the_law_is_meant():
    law = next(law for law in LAWS if law.sweep == "beta")
    table = np.array([[9.0, 5.0, 1.0, 0.5], [3.0, 7.0, 4.0, 2.0]])  # at 0, 0.1, 1 and 2
    values = {("beta", law.quantity): table}
    cfg = replace(TINY, fit_betas_from=1.0)
    assert fit_law(law, values, cfg).mean == pytest.approx(-1)


def test_pairs_keep_lemma_1():
    pairs = sample_pairs(TINY, num_shown=6)
    assert len(pairs) == 3 * 6
    assert all(pair["left"] <= pair["right"] for pair in pairs)


def test_every_law_is_about_something_measured():
    names = {sweep.name for sweep in sweeps(TINY)} | {"t", "T"}
    assert {law.sweep for law in LAWS} == names
    assert len({(law.panel, law.quantity) for law in LAWS}) == len(LAWS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_seeds": 1}, "num_seeds must be at least 2"),
        ({"betas": (0.0, 1.0)}, "betas.0 must be positive, got 0"),
        ({"batch_sizes": (8,)}, "batch_sizes must be two or more"),
        ({"clients": (1, 2)}, "at least 2"),
        ({"local_steps": (2, 5)}, r"multiple of num_local_steps \(5\), got 12"),
        ({"experiment": ExperimentConfig(beta=0.0)}, r"experiment.beta must be positive, got 0\.0"),
        ({"fit_betas_from": 1.5}, "fit_betas_from must leave two"),
        ({"num_convergence_steps": 10}, "num_convergence_steps must be at least 20"),
    ],
)
def test_configurations_name_the_key_at_fault(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)
