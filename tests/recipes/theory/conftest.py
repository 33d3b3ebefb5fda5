"""A small process and a policy on it that prefers nothing in particular."""

from dataclasses import replace

import numpy as np
import pytest

from recipes.theory.mdp import Mdp, MdpConfig, random_mdp

SMALL = MdpConfig(num_states=4, num_actions=3, num_objectives=2)


@pytest.fixture
def new_mdp():
    """Builds a process: ``new_mdp(seed=0, **changes of MdpConfig)``, starting in state 0."""

    def build(seed: int = 0, **changes) -> Mdp:
        mdp = random_mdp(replace(SMALL, **changes), generator=np.random.default_rng(seed))
        return replace(mdp, start=np.eye(mdp.num_states)[0])

    return build


@pytest.fixture
def mdp(new_mdp) -> Mdp:
    return new_mdp()


@pytest.fixture
def theta() -> np.ndarray:
    """Logits of the policy, shape [d]."""
    return np.random.default_rng(1).normal(size=12)
