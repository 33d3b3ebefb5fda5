"""FIRM: every client resolves conflicts between its objectives, and the server averages updates.

Algorithm 1 of "FIRM: Federated In-client Regularized Multi-objective Alignment" (Nourzad et al.).
"""

from collections.abc import Sequence
from typing import Any

import torch

from firm.base.schema import Finite, Items, NonNegative
from firm.federation.engines.engine import Engine
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FirmConfig
from firm.federation.training import weighting
from firm.solvers.regularised import firm_weights
from firm.solvers.settings import Solver


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
