"""FedAvg under constraints: objectives are maximised while others keep a minimum reward.

Dual ascent on expected rewards, as in Safe RLHF (Dai et al. 2024, arXiv:2310.12773, Section 3.3),
with any number of constraints and local training on clients.
"""

from collections.abc import Sequence
from dataclasses import field
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

from firm.base.fields import Hint, PositiveFloat, configuration
from firm.base.quantities import Quantity, register
from firm.base.registry import did_you_mean
from firm.base.schema import ByObjective, Finite, NonNegative
from firm.federation.engines.engine import Engine
from firm.federation.messages import DECIDED_BY_SERVER, Request, Update
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import StrategyConfig, strategy
from firm.solvers.checks import as_shares

register(
    Quantity("rewards", type=ByObjective[Finite | None]),
    Quantity(
        "multipliers",
        "Multipliers of the constraints",
        "multiplier",
        "A constraint's multiplier grows by multiplier_learning_rate times the reward that its "
        "objective lacks, and falls to zero while the constraint holds.",
        kind="round",
        type=ByObjective[NonNegative],
        section="training",
    ),
)


@configuration
class ConstrainedConfig(StrategyConfig):
    """Options of dual ascent on constraints."""

    name: Literal["constrained"] = "constrained"
    """Strategy."""
    min_rewards: dict[str, float] = field(default_factory=dict)
    """Constraints: the minimum expected reward in [0, 1] of objectives by name."""
    weights: Annotated[
        tuple[float, ...] | None, Hint("null weights those without a constraint equally")
    ] = None
    """Weight w of each objective in what is maximised, scaled to sum 1; null weights the objectives
    without a constraint equally, and the others by 0."""
    multiplier_learning_rate: PositiveFloat = 1.0
    """Step size η of the ascent on the constraints' multipliers. The default moves a multiplier by
    0.1 in a round in which its objective lacks a reward of 0.1."""

    reads_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, bound in self.min_rewards.items():
            if not 0 <= bound <= 1:
                raise ValueError(f"min_rewards.{name} must be in [0, 1], got {bound:g}.")
        if self.weights is not None:
            as_shares(self.weights, len(self.weights), name="weights")
        super().__post_init__()

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` if the constraints do not fit these objectives."""
        if not self.min_rewards:
            raise ValueError(
                "min_rewards must have at least one constraint, got none: set for example "
                "min_rewards {harmless: 0.6}, or use strategy fedavg."
            )
        for name in self.min_rewards:
            if name not in objectives:
                raise ValueError(
                    f"min_rewards has the unknown objective {name!r}; choose from "
                    f"{', '.join(objectives)}{did_you_mean(name, objectives)}"
                )
        if self.weights is None and len(self.min_rewards) == len(objectives):
            raise ValueError(
                "min_rewards constrains all objectives, so weights must say what is maximised, got "
                "null: set weights, or leave one objective without a constraint."
            )
        self.base_weights(objectives)

    def base_weights(self, objectives: Sequence[str]) -> list[float]:
        """Returns the weights w of what is maximised, shape [M], which sum to 1."""
        own = self.weights or [float(name not in self.min_rewards) for name in objectives]
        return as_shares(own, len(objectives), name="weights").tolist()

    def local_training(self) -> dict[str, Any]:
        """Returns the fields of each round's ``LocalTraining`` request, without the weights."""
        return {
            **self.training(),
            "weighting": "fixed",
            "weighting_options": DECIDED_BY_SERVER,
        }

    def requests(self, objectives: Sequence[str]) -> dict[type[Request], dict[str, Any]]:
        """Returns the requests of a round; see ``StrategyConfig``."""
        return self.training_requests(self.local_training())


@strategy
def constrained(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: ConstrainedConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of dual ascent, and the round's rows for the log.

    For the problem max Σ_j w_j R_j(θ) subject to R_j(θ) ≥ c_j, with multipliers ν, initially 0,

        λ = (w + ν) / Σ_j (w_j + ν_j),   ν_j ← max(0, ν_j + η (c_j - R̄_j)),

    clients train with the weights λ, and R̄_j is the mean over the clients that serve objective j of
    the rewards that their replies had in this round's training. Three departures from Safe RLHF:
    the server takes the ascent, from one number per client and objective, so that clients keep no
    multipliers; it is additive, so that a multiplier reaches 0; and local training replaces one
    gradient. With one local step it equals a step of every client whose multipliers are averaged,
    up to the projection at 0.
    """
    this_round = Round(state, clients, engine, cfg)
    multipliers = dict.fromkeys(cfg.min_rewards, 0.0) | state.memory.get("multipliers", {})
    base = cfg.base_weights(state.objectives)
    total = [w + multipliers.get(n, 0.0) for n, w in zip(state.objectives, base, strict=True)]
    weights = as_shares(total, len(total), name="weights").tolist()

    replies = this_round.train({**cfg.local_training(), "weighting_options": {"weights": weights}})

    updates = [reply.content for reply in replies]
    means = mean_rewards(updates, state.objectives) if multipliers else {}
    risen = {
        name: max(0.0, old + cfg.multiplier_learning_rate * (cfg.min_rewards[name] - means[name]))
        if name in means
        else old
        for name, old in multipliers.items()
    }
    memory = {**state.memory, "multipliers": risen}
    return this_round.finish(replies, memory=memory, entries={"multipliers": multipliers})


def mean_rewards(updates: Sequence[Update], objectives: Sequence[str]) -> dict[str, float]:
    """Returns the mean reward of each objective over the clients that have one.

    Raises:
        ValueError: No client sent its rewards.
    """
    rows = [update.metrics["rewards"] for update in updates if "rewards" in update.metrics]
    if not rows:
        raise ValueError(
            "strategy constrained needs the clients' mean rewards, but none of "
            f"{len(updates)} clients sent them; let the sites' list of metrics contain rewards."
        )
    found = {name: [row[name] for row in rows if row.get(name) is not None] for name in objectives}
    return {name: fmean(values) for name, values in found.items() if values}
