"""FedCMOO-Pref: FedCMOO with weights that steer the losses towards preferred ratios.

Askin et al. (2024), arXiv:2410.16398: Algorithms 7 and 8.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from firm.federation.diagnostics import stationarity
from firm.federation.engines.engine import Engine
from firm.federation.fedcmoo.gram_estimate import estimate_gram, train_on_sum
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.federation.strategy_configs import FedCmooPrefConfig
from firm.solvers.fedcmoo import fedcmoo_pref_weights


@strategy
def fedcmoo_pref(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedCmooPrefConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedCMOO-Pref, and the rows for the log.

    Like ``fedcmoo``, but the weights also depend on the losses at θ_t, which clients send with
    their Jacobians. The row's "start_losses" are each objective's mean over the clients serving it.
    If the round has no objective with a preference above zero, the preference is the weights.
    """
    this_round = Round(state, clients, engine, cfg)
    estimate = estimate_gram(this_round, state, cfg)
    losses = [
        fmean(row[j] for row, served in estimate.losses if j in served) for j in estimate.active
    ]
    names = [state.objectives[j] for j in estimate.active]
    entries: dict[str, Any] = {"start_losses": dict(zip(names, losses, strict=True))}
    whole = np.array(cfg.multiples(len(state.objectives)))
    multiples = whole[estimate.active]
    if not multiples.any():
        weights = (whole / whole.sum()).tolist()
        return train_on_sum(this_round, state, cfg, estimate, weights, entries=entries)
    weights = fedcmoo_pref_weights(
        estimate.gram.numpy(),
        np.array(losses),
        multiples,
        threshold=cfg.threshold,
        min_weight=cfg.least(len(multiples)),
        variant=cfg.variant,
    ).tolist()
    entries["stationarity"] = stationarity([estimate.gram.tolist()])
    return train_on_sum(this_round, state, cfg, estimate, estimate.spread(weights), entries=entries)
