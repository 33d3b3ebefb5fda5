"""A process that breaks an assumption of the paper is refused, with the assumption's name."""

from dataclasses import replace

import numpy as np
import pytest

from recipes.theory.mdp import MdpConfig, random_mdp


@pytest.mark.parametrize("features", ["tabular", "random"])
def test_random_processes_keep_the_assumptions(features):
    cfg = MdpConfig(features=features, num_objectives=3)
    mdp = random_mdp(cfg, generator=np.random.default_rng(0))
    np.testing.assert_allclose(mdp.kernel.sum(axis=-1), 1)
    assert mdp.kernel.min() >= cfg.uniform_share / cfg.num_states - 1e-12
    assert mdp.rewards.min() >= 0
    assert mdp.rewards.max() <= mdp.r_max
    assert np.linalg.norm(mdp.features, axis=1).max() == pytest.approx(1)
    assert mdp.num_parameters == cfg.num_states * cfg.num_actions


def test_in_full_conflict_one_objective_gains_what_the_other_loses(new_mdp):
    np.testing.assert_allclose(new_mdp(conflict=1.0).rewards.sum(axis=0), 1)
    assert new_mdp(conflict=0.0).rewards.sum(axis=0).std() > 0.1


def test_equal_generators_draw_equal_processes(new_mdp):
    assert np.array_equal(new_mdp(3).kernel, new_mdp(3).kernel)
    assert not np.array_equal(new_mdp(3).kernel, new_mdp(4).kernel)


def changed(mdp, name, entry, value):
    array = getattr(mdp, name).copy()
    array[entry] = value
    return {name: array}


@pytest.mark.parametrize(
    ("name", "entry", "value", "message"),
    [
        ("rewards", (1, 2, 0), -0.1, r"Assumption 1\(c\)"),
        ("rewards", (1, 2, 0), 1.1, r"Assumption 1\(c\)"),
        ("rewards", (1, 2, 0), np.nan, "rewards must be finite"),
        ("kernel", (0, 0, 1), 0.0, r"from state 0 by action 0 to 1.*Assumption 1\(b\)"),
        ("kernel", (0, 0, 1), 0.9, "kernel must sum to 1"),
        ("start", 1, 0.5, "start must sum to 1"),
        ("start", slice(0, 2), (1.5, -0.5), "start must be non-negative"),
        ("features", (2, 0), 1.5, r"Assumption 2\(b\).*state 2"),
        ("features", (slice(None), 1), 0.0, r"rank 3 with 4 features.*Assumption 2\(c\)"),
    ],
)
def test_what_breaks_an_assumption_is_refused(mdp, name, entry, value, message):
    with pytest.raises(ValueError, match=message):
        replace(mdp, **changed(mdp, name, entry, value))


def test_shapes_have_to_fit(mdp):
    with pytest.raises(ValueError, match=r"rewards must have shape \[2, 4, 3\], got \[2, 4, 2\]"):
        replace(mdp, rewards=mdp.rewards[:, :, :2])
    with pytest.raises(ValueError, match="gamma must be in"):
        replace(mdp, gamma=1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_states", 0),
        ("gamma", 1.0),
        ("conflict", 1.5),
        ("uniform_share", 0.0),
        ("num_features", 7),
    ],
)
def test_configurations_name_the_key_at_fault(key, value):
    with pytest.raises(ValueError, match=key):
        MdpConfig(features="random", **{key: value})
