"""Sampling of chains, and the M linear critics of Algorithm 3 of FIRM (Nourzad et al.)."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np

from firm.base.fields import NOT_IN_PAPER, PositiveFloat, PositiveInt, configuration
from recipes.theory.exact import critic_radius
from recipes.theory.mdp import Mdp


@configuration(source=NOT_IN_PAPER)
class CriticConfig:
    """Training of the critics."""

    name: Literal["td", "exact"] = "td"
    """td: mini-batch TD learning, Algorithm 3; exact: its fixed point w*, without critic error."""
    num_iterations: PositiveInt = 10
    """N, TD updates per local step."""
    batch_size: PositiveInt = 16
    """D, transitions per TD update."""
    step_size: PositiveFloat = 0.5
    """α'."""


@dataclass(frozen=True, eq=False)
class Transitions:
    """Consecutive steps of a chain."""

    states: np.ndarray
    """s_l, shape [B]."""
    actions: np.ndarray
    """a_l, shape [B]."""
    next_states: np.ndarray
    """s'_l ~ P(. | s_l, a_l), shape [B]."""
    last: int
    """Current state of the chain, from which the next transition starts."""

    def __getitem__(self, rows: slice) -> "Transitions":
        parts = self.states[rows], self.actions[rows], self.next_states[rows]
        return Transitions(*parts, self.last)


def sample_chain(
    mdp: Mdp,
    probabilities: np.ndarray,
    state: int,
    num_steps: int,
    *,
    generator: np.random.Generator,
    survival: float = 1.0,
) -> Transitions:
    """Returns consecutive transitions of the chain of a policy.

    Args:
        mdp: The process.
        probabilities: π(a | s), shape [S, A].
        state: Current state of the chain.
        num_steps: Number of transitions.
        generator: Random generator; three uniforms per transition are drawn.
        survival: Probability that the chain continues from s'; otherwise it restarts from ρ₀. The
            stationary distribution is the discounted visitation for γ, and that of P_π for 1.
    """
    joint = (probabilities[:, :, None] * mdp.kernel).reshape(mdp.num_states, -1).cumsum(axis=1)
    joint[:, -1] = 1.0  # rounding must not leave a uniform beyond the last entry
    rows: list[list[float]] = joint.tolist()
    draws, fates, places = generator.random((3, num_steps))
    starts = np.searchsorted(mdp.start.cumsum()[:-1], places, side="right")
    restarts = np.where(fates < survival, -1, starts).tolist()
    num_states = mdp.num_states
    states, outcomes = [], []
    for draw, restart in zip(draws.tolist(), restarts, strict=True):
        outcome = bisect_right(rows[state], draw)
        states.append(state)
        outcomes.append(outcome)
        state = outcome % num_states if restart < 0 else restart
    actions, next_states = np.divmod(np.array(outcomes), num_states)
    return Transitions(np.array(states), actions, next_states, state)


def td_errors(mdp: Mdp, critic: np.ndarray, transitions: Transitions) -> np.ndarray:
    """Returns δ^j = r^j + γ φ(s')ᵀw^j - φ(s)ᵀw^j of Eq. 10, with w [M, d2], shape [M, B]."""
    values = critic @ mdp.features.T  # [M, S]
    rewards = mdp.rewards[:, transitions.states, transitions.actions]
    return rewards + mdp.gamma * values[:, transitions.next_states] - values[:, transitions.states]


def project_to_ball(critic: np.ndarray, radius: float) -> np.ndarray:
    """Returns min(1, R_w / ‖w^j‖) w^j for every row, [M, d2]; the paper's form omits the norm."""
    norms = np.linalg.norm(critic, axis=1, keepdims=True)
    return critic * (radius / np.maximum(norms, radius))


def td_critic(
    mdp: Mdp,
    probabilities: np.ndarray,
    critic: np.ndarray,
    state: int,
    *,
    cfg: CriticConfig,
    generator: np.random.Generator,
) -> tuple[np.ndarray, int]:
    """Returns the critics w [M, d2] after Algorithm 3, and the current state of their chain.

    Corrected: line 12's step size is α' (it prints β); line 13's projection divides by the norm of
    w; line 3's first state is the given one. Not in the paper: a mini-batch starts at the state
    after the last one's last transition, so that none is counted twice (line 3 starts at s_{k-1,D}
    again), and the chain is the critics' own, as the actor's restarts. The policy is given by its
    probabilities π(a | s), [S, A].
    """
    radius = critic_radius(mdp)
    steps = cfg.num_iterations * cfg.batch_size
    chain = sample_chain(mdp, probabilities, state, steps, generator=generator)
    for first in range(0, steps, cfg.batch_size):
        batch = chain[first : first + cfg.batch_size]
        update = td_errors(mdp, critic, batch) @ mdp.features[batch.states]  # [M, d2]
        critic = project_to_ball(critic + cfg.step_size / cfg.batch_size * update, radius)
    return critic, chain.last
