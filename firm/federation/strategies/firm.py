"""FIRM: every client resolves conflicts between its objectives, and the server averages updates.

Algorithm 1 of "FIRM: Federated In-client Regularized Multi-objective Alignment" (Nourzad et al.).
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch

from firm.base.fields import NOT_IN_PAPER, Paper, configuration
from firm.base.schema import Finite, Items, NonNegative
from firm.federation.aggregation import Count, Mean, Rate, Transform
from firm.federation.diagnostics import beta_alarm
from firm.federation.engines.engine import Engine
from firm.federation.messages import Request
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import StrategyConfig, strategy
from firm.federation.training import weighting
from firm.solvers.constraints import linear_constraints
from firm.solvers.regularised import Solver, firm_weights

PAPER_BETA = 0.01
"""β of the paper's experiments (A.1), which moves the weights by little."""


@configuration
class FirmConfig(StrategyConfig):
    """Options of FIRM."""

    name: Literal["firm"] = "firm"
    """Strategy."""
    beta: Annotated[float, Paper("A.1", (PAPER_BETA,))] = PAPER_BETA
    """Strength β of the regularisation towards uniform weights (Eq. 9); not used with a
    preference."""
    preference: tuple[float, ...] | None = None
    """Preference p of the objectives (Eq. 54), scaled to sum 1; 0 excludes an objective."""
    preferences: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Preferences of individual clients by name, which override the common preference."""
    preference_strength: float = 1.0
    """Factor of the preference term Diag(1/p); 1 in the paper."""
    normalize: Annotated[bool, Paper("A.1")] = True
    """Divide the Gram matrix by the mean of its diagonal (Eq. 9; false is Eq. 2)."""
    norm_power: Annotated[float, NOT_IN_PAPER] = 0.0
    """Each gradient is divided by this power of its norm for the solve: 0 as in the paper, 1 for
    unit gradients, as in GAPO (arXiv:2507.01915)."""
    solver: Solver = "exact"
    """Solver of the weights; cvxpy, an optional package, supports constraints, but takes
    milliseconds per solve."""
    constraints: Annotated[tuple[str, ...], NOT_IN_PAPER] = ()
    """Linear constraints on the weights, in terms of the objectives' names, such as 'harmless >=
    0.3' or 'helpful <= 2 * harmless'; require solver cvxpy."""
    solve_per: Annotated[Literal["minibatch", "batch"], NOT_IN_PAPER, NOT_IN_PAPER] = "minibatch"
    """Scope of a solve for weights: each minibatch, or once per batch; the latter needs only one
    backward pass per minibatch instead of one per objective."""

    preference_key: ClassVar[str | None] = "preference"
    sends_adapters_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        num_objectives = 1 if self.preference is None else max(1, len(self.preference))
        if self.constraints and self.solver == "exact":
            raise ValueError("constraints require solver cvxpy, got solver exact.")
        # the constraints are checked once the objectives' names are known
        options = {**self.weighting_options(), "solver": "exact"}
        firm_weights(np.eye(num_objectives), **options)
        for client in self.preferences:
            self.of_client(client)
        super().__post_init__()

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` if the options do not fit these objectives."""
        firm_weights(np.eye(len(objectives)), **self.weighting_options(objectives))
        for client in self.preferences:
            self.of_client(client).check(objectives)

    def steps(self, num_rounds: int) -> list[Transform]:
        """Returns the server's steps: a step towards the mean with learning rate η."""
        return [Count(self.aggregation), Mean(), Rate(self.server_learning_rate)]

    def alarms(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns an alarm if a β other than the paper's has almost no effect on the weights."""
        if self.preference is not None or self.beta == PAPER_BETA:
            return []
        solves = [row for row in rows if {"gradient_norms", "cosines"} <= row.keys()]
        alarm = beta_alarm(solves, self.beta)
        return [alarm] if alarm else []

    def of_client(self, name: str) -> Self:
        """Returns the options of a client, with its own preference if it has one."""
        preference = self.preferences.get(name, self.preference)
        return replace(self, preference=preference, preferences={})

    def weighting_options(self, objectives: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the arguments of ``firm_weights``, without constraints if objectives is None."""
        return {
            "beta": self.beta,
            "preference": self.preference,
            "preference_strength": self.preference_strength,
            "normalize": self.normalize,
            "norm_power": self.norm_power,
            "solver": self.solver,
            "constraints": linear_constraints(self.constraints, objectives)
            if self.constraints and objectives is not None
            else [],
        }

    def local_training(self, objectives: Sequence[str]) -> dict[str, Any]:
        """Returns the fields of each round's ``LocalTraining`` request."""
        return {
            **self.training(),
            "weighting": "firm",
            "weighting_options": self.weighting_options(objectives),
            "options_by_client": {
                name: self.of_client(name).weighting_options(objectives)
                for name in self.preferences
            },
            "solve_per": self.solve_per,
        }

    def requests(self, objectives: Sequence[str]) -> dict[type[Request], dict[str, Any]]:
        """Returns the requests of a round; see ``StrategyConfig``."""
        return self.training_requests(self.local_training(objectives))


@weighting(
    "firm",
    beta=NonNegative,
    preference=Items[NonNegative] | None,
    preference_strength=NonNegative,
    normalize=bool,
    norm_power=Finite,
    solver=Solver,
    constraints=Items[Items[Finite]],
)
def served_weights(gram: torch.Tensor, served: Sequence[int], **options: Any) -> torch.Tensor:
    """Returns FIRM's weights for the served objectives, and 0 for the others, shape [M].

    Objectives that are not served have zero gradients, which are the shortest: if they were
    included, they would get all the weight. If the preference is zero for all served objectives,
    all weights are 0. ``options`` are passed to ``firm_weights``.
    """
    rows = list(served)
    if len(rows) == len(gram):
        return firm_weights(gram, **options)
    if options.get("preference") is not None:
        options["preference"] = [options["preference"][j] for j in rows]
        if not any(options["preference"]):
            return torch.zeros(len(gram), dtype=gram.dtype)
    if options.get("constraints"):
        options["constraints"] = [
            [*(bounds[j] for j in rows), bounds[-1]] for bounds in options["constraints"]
        ]
    weights = torch.zeros(len(gram), dtype=gram.dtype)
    weights[rows] = firm_weights(gram[rows][:, rows], **options)
    return weights


@strategy
def firm_round(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FirmConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FIRM, and the round's rows for the log."""
    this_round = Round(state, clients, engine, cfg)

    # the server sends the adapter θ_t to the clients of this round, and each of them takes K local
    # steps along its own consensus direction λᵀJ
    replies = this_round.train(cfg.local_training(state.objectives))

    # the server averages the valid updates, or the output of a robust rule, and steps towards the
    # mean: θ_{t+1}
    return this_round.finish(replies)
