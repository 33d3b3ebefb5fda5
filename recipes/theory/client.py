"""T-FIRM's client: actor and critics on a tabular MDP. Algorithm 2 of FIRM (Nourzad et al.)."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from firm.base.fields import NOT_IN_PAPER, PositiveFloat, PositiveInt, configuration
from firm.base.quantities import Quantity, register
from firm.base.schema import Finite, Items, PerObjective, Share
from firm.federation import Adapter, Client, Gradients, State, derive_seed
from firm.gradients import combine
from firm.solvers import smoothed_weights
from recipes.theory.critic import CriticConfig, Transitions, sample_chain, td_critic, td_errors
from recipes.theory.exact import policy, td_fixed_point
from recipes.theory.mdp import Mdp

PARAMETER = "theta"
"""Name of the adapter's only tensor: the policy's logits, shape [d], float64."""

register(
    Quantity("theta", type=Items[Items[Finite]], may_leave=False),
    Quantity("jacobian", type=Items[PerObjective[Items[Finite]]], may_leave=False),
    Quantity("smoothed_weights", type=Items[PerObjective[Share]]),
)


@configuration(source=NOT_IN_PAPER)
class ActorCriticConfig:
    """Options of a client of T-FIRM."""

    batch_size: PositiveInt = 32
    """B, transitions per policy gradient."""
    step_size: PositiveFloat = 3.0
    """α, the actor's; gradients of a return scaled by 1 - γ are small."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critics."""


@dataclass(frozen=True)
class TransitionBatch:
    """The actor's transitions of one local step."""

    whole: Transitions

    def minibatches(self) -> Iterator[Transitions]:
        """Yields the whole batch: T-FIRM passes over it once."""
        yield self.whole


class TabularClient(Client):
    """A client of T-FIRM.

    A local step updates the critics (when the batch is drawn), computes the M policy gradients of
    Eq. 10, solves for the weights λ* of Eq. 11, averages them to λ_t, and takes a step of gradient
    *ascent* along it, as in Appendix F (Algorithm 2 prints a descent with the ascent gradient of
    Eq. 10). The Jacobian's rows are gradients of losses, -g^j, with the same Gram matrix.

    Not in the paper, but in Xu et al. (2020), arXiv:2004.12956, the source of its lemmas: the
    actor's chain has the kernel γP + (1 - γ)ρ₀, so that its stationary distribution is the
    discounted visitation of the policy gradient theorem, while δ uses s' ~ P(. | s, a). Both chains
    start from ρ₀ and continue across steps and rounds. The client's random stream is derived from
    the run's seed and the client's name.
    """

    def __init__(self, name: str, mdp: Mdp, cfg: ActorCriticConfig, *, seed: int) -> None:
        self.name = name
        self.num_examples = cfg.batch_size
        self.objectives = tuple(f"objective_{j}" for j in range(mdp.num_objectives))
        self._mdp, self._cfg = mdp, cfg
        self._generator = np.random.default_rng(derive_seed(seed, "client", name))
        first = self._generator.choice(mdp.num_states, size=2, p=mdp.start)
        self._actor_state, self._critic_state = map(int, first)
        self._critic = np.zeros((mdp.num_objectives, mdp.features.shape[1]))
        self._weights = torch.full((mdp.num_objectives,), 1 / mdp.num_objectives).double()
        self._num_steps = 0
        self.load({PARAMETER: torch.zeros(mdp.num_parameters, dtype=torch.float64)})

    def load(self, adapter: Adapter, round: int = 1) -> None:
        """Starts a local training from the server's θ."""
        self._theta = adapter[PARAMETER].clone()
        self._record: dict[str, list[Any]] = {"theta": [], "jacobian": [], "smoothed_weights": []}

    def batches(self, num_steps: int) -> Iterator[TransitionBatch]:
        """Yields the actor's transitions of each local step, after the critics' step."""
        for _ in range(num_steps):
            theta = self._theta.numpy()
            probabilities = policy(self._mdp, theta)
            if self._cfg.critic.name == "exact":
                self._critic = td_fixed_point(self._mdp, theta)
            else:
                self._critic, self._critic_state = td_critic(
                    self._mdp,
                    probabilities,
                    self._critic,
                    self._critic_state,
                    cfg=self._cfg.critic,
                    generator=self._generator,
                )
            batch = sample_chain(
                self._mdp,
                probabilities,
                self._actor_state,
                self._cfg.batch_size,
                generator=self._generator,
                survival=self._mdp.gamma,
            )
            self._actor_state = batch.last
            yield TransitionBatch(batch)

    def gradients(self, minibatch: Transitions) -> Gradients:
        """Returns -g^j of Eq. 10, [M, d], and minus the batch's mean rewards as losses, [M]."""
        errors = td_errors(self._mdp, self._critic, minibatch)
        jacobian = torch.from_numpy(
            -policy_gradients(self._mdp, self._theta.numpy(), minibatch, errors)
        )
        rewards = self._mdp.rewards[:, minibatch.states, minibatch.actions]
        return Gradients(jacobian, torch.from_numpy(-rewards.mean(axis=1)))

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        """Averages the weights, λ_t = (1 - 1/t) λ_{t-1} + λ*_t / t, and ascends along λ_t."""
        self._num_steps += 1
        self._weights = smoothed_weights(self._weights, weights, step=self._num_steps)
        self._record["theta"].append(self._theta.tolist())
        self._record["jacobian"].append(gradients.jacobian.tolist())
        self._record["smoothed_weights"].append(self._weights.tolist())
        direction = combine(gradients.jacobian, self._weights)
        self._theta = self._theta - self._cfg.step_size * direction

    def adapter(self) -> Adapter:
        """Returns a copy of θ."""
        return {PARAMETER: self._theta.clone()}

    def state(self) -> State:
        """Returns the critics, both chains, the λ average with its step t, and the generator."""
        return {
            "critic": torch.from_numpy(self._critic.copy()),
            "actor_state": self._actor_state,
            "critic_state": self._critic_state,
            "weights": self._weights.clone(),
            "num_steps": self._num_steps,
            "generator": copy.deepcopy(dict(self._generator.bit_generator.state)),
        }

    def restore(self, state: State) -> None:
        """Restores a state returned by ``state``."""
        self._critic = state["critic"].numpy().copy()
        self._actor_state, self._critic_state = state["actor_state"], state["critic_state"]
        self._weights, self._num_steps = state["weights"].clone(), state["num_steps"]
        self._generator.bit_generator.state = copy.deepcopy(state["generator"])

    def metrics(self) -> dict[str, Any]:
        """Returns the inputs of each local step as nested lists.

        "theta" [K, d] before the step, "jacobian" [K, M, d] and "smoothed_weights" [K, M]; the
        federation adds λ* as "weights".
        """
        return dict(self._record)


def policy_gradients(
    mdp: Mdp, theta: np.ndarray, transitions: Transitions, errors: np.ndarray
) -> np.ndarray:
    """Returns g^j = (1/B) Σ_l δ_l^j ψ(s_l, a_l) of Eq. 10, from errors δ [M, B], shape [M, d]."""
    num_objectives, num_transitions = errors.shape
    cells = transitions.states * mdp.num_actions + transitions.actions
    sums = np.stack([np.bincount(cells, row, mdp.num_parameters) for row in errors])
    sums = sums.reshape(num_objectives, mdp.num_states, mdp.num_actions) / num_transitions
    # ψ(s, a) is the indicator of (s, a) minus π(. | s) in the rows of s
    gradients = sums - sums.sum(axis=-1, keepdims=True) * policy(mdp, theta)
    return gradients.reshape(num_objectives, mdp.num_parameters)
