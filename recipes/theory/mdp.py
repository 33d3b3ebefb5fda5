"""Tabular Markov decision processes with several rewards and a known kernel."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from firm.base.fields import NOT_IN_PAPER, Fraction, PositiveInt, configuration

ROUNDING = 1e-9
"""Tolerance of sums of probabilities and norms of features."""


@dataclass(frozen=True, eq=False)
class Mdp:
    """A multi-objective MDP and the critics' feature map; Definition 1 of FIRM (Nourzad et al.).

    Raises:
        ValueError: A part has another shape, is not finite or breaks one of the paper's
            assumptions: rewards in [0, r_max] (Assumption 1(c)), a chain that is ergodic under
            every policy (1(b)), features of norm at most 1 (2(b)) and linearly independent, without
            which A_π cannot be negative definite (2(c)).
    """

    kernel: np.ndarray
    """P(s' | s, a), shape [S, A, S], every entry positive."""
    rewards: np.ndarray
    """r^j(s, a), shape [M, S, A], in [0, r_max]."""
    features: np.ndarray
    """φ(s), shape [S, d2], shared by the M critics."""
    start: np.ndarray
    """Distribution ρ₀ of the first state, shape [S]."""
    gamma: float
    """Discount, in (0, 1)."""
    r_max: float = 1.0
    """Bound on the rewards."""

    def __post_init__(self) -> None:
        num_states = self.kernel.shape[0]
        shapes = {
            "kernel": (num_states, *self.kernel.shape[1:2], num_states),
            "rewards": (*self.rewards.shape[:1], *self.kernel.shape[:2]),
            "features": (num_states, *self.features.shape[1:2]),
            "start": (num_states,),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value.shape != shape or 0 in value.shape:
                raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}.")
            if not np.isfinite(value).all():
                raise ValueError(f"{name} must be finite, got NaN or infinity.")
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma must be in (0, 1), got {self.gamma}.")
        if not self.kernel.min() > 0:
            state, action, after = np.unravel_index(self.kernel.argmin(), self.kernel.shape)
            raise ValueError(
                f"kernel must be positive everywhere, got {self.kernel.min():.3g} from state "
                f"{state} by action {action} to {after}; mix in a little of the uniform kernel, so "
                "that the chain is ergodic under every policy (Assumption 1(b))."
            )
        for name, rows in (("kernel", self.kernel.sum(axis=-1)), ("start", self.start.sum())):
            if np.abs(rows - 1).max() > ROUNDING:
                raise ValueError(f"{name} must sum to 1, got a sum {np.abs(rows - 1).max()} off.")
        if self.start.min() < 0:
            raise ValueError(f"start must be non-negative, got {self.start.min():.3g}.")
        if self.rewards.min() < 0 or self.rewards.max() > self.r_max:
            raise ValueError(
                f"rewards must be in [0, r_max = {self.r_max:g}] (Assumption 1(c)), got "
                f"{self.rewards.min():.3g} to {self.rewards.max():.3g}."
            )
        norms = np.linalg.norm(self.features, axis=1)
        if norms.max() > 1 + ROUNDING:
            raise ValueError(
                f"features must have norms of at most 1 (Assumption 2(b)), got {norms.max():.3g} "
                f"in state {norms.argmax()}; divide them by the largest norm."
            )
        if (rank := np.linalg.matrix_rank(self.features)) < self.features.shape[1]:
            raise ValueError(
                f"features must be linearly independent, got rank {rank} with "
                f"{self.features.shape[1]} features: A_π is not negative definite "
                "(Assumption 2(c)); drop the dependent ones."
            )

    @property
    def num_states(self) -> int:
        """S."""
        return self.kernel.shape[0]

    @property
    def num_actions(self) -> int:
        """A."""
        return self.kernel.shape[1]

    @property
    def num_objectives(self) -> int:
        """M."""
        return self.rewards.shape[0]

    @property
    def num_parameters(self) -> int:
        """The logits of a tabular softmax policy, d = S A."""
        return self.num_states * self.num_actions


@configuration(source=NOT_IN_PAPER)
class MdpConfig:
    """A random MDP; every seed draws another one."""

    num_states: PositiveInt = 6
    """S."""
    num_actions: PositiveInt = 3
    """A."""
    num_objectives: PositiveInt = 2
    """M."""
    gamma: Annotated[float, Interval(gt=0, lt=1)] = 0.9
    """Discount."""
    conflict: Fraction = 0.5
    """Conflict between the objectives: 0 draws their rewards independently; 1 removes their common
    part, so that gains in one objective are losses in the others."""
    uniform_share: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """Share of the uniform kernel in P, in (0, 1]: the chain is ergodic under every policy."""
    features: Literal["tabular", "random"] = "tabular"
    """One feature per state, with which a linear critic is exact, or random ones."""
    num_features: PositiveInt = 3
    """d2 of random features, at most num_states; unused with tabular ones."""

    def __post_init__(self) -> None:
        if self.features == "random" and self.num_features > self.num_states:
            raise ValueError(
                f"num_features must be at most num_states ({self.num_states}), got "
                f"{self.num_features}: more of them are linearly dependent."
            )


def random_mdp(cfg: MdpConfig, *, generator: np.random.Generator) -> Mdp:
    """Returns a random ergodic MDP with rewards in [0, 1].

    The kernel's rows are Dirichlet(1) mixed with the uniform one; ρ₀ is uniform. The rewards are
    logistic functions of normal variates, from which ``cfg.conflict`` times their mean over the
    objectives is subtracted.
    """
    sizes = cfg.num_states, cfg.num_actions
    rows = generator.dirichlet(np.ones(cfg.num_states), size=sizes)  # [S, A, S]
    kernel = (1 - cfg.uniform_share) * rows + cfg.uniform_share / cfg.num_states
    scores = generator.normal(size=(cfg.num_objectives, *sizes))
    if cfg.num_objectives > 1:
        scores -= cfg.conflict * scores.mean(axis=0)
    features = np.eye(cfg.num_states)
    if cfg.features == "random":
        features = generator.normal(size=(cfg.num_states, cfg.num_features))
        features /= np.linalg.norm(features, axis=1).max()
    return Mdp(
        kernel=kernel / kernel.sum(axis=-1, keepdims=True),
        rewards=1 / (1 + np.exp(-2 * scores)),  # 2: most of [0, 1] is used
        features=features,
        start=np.full(cfg.num_states, 1 / cfg.num_states),
        gamma=cfg.gamma,
    )
