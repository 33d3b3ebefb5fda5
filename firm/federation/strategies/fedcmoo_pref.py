"""FedCMOO-Pref: FedCMOO with weights that steer the losses towards preferred ratios.

Askin et al. (2024), arXiv:2410.16398: Algorithms 7 and 8.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal

import numpy as np

from firm.base.fields import configuration
from firm.federation.diagnostics import stationarity
from firm.federation.engines.engine import Engine
from firm.federation.gram_estimate import GramConfig, estimate_gram, train_on_sum
from firm.federation.rounds import Round
from firm.federation.server import ServerState
from firm.federation.strategy import strategy
from firm.solvers.fedcmoo import fedcmoo_pref_weights


@configuration
class FedCmooPrefConfig(GramConfig):
    """Options of FedCMOO-Pref."""

    name: Literal["fedcmoo_pref"] = "fedcmoo_pref"
    """Strategy."""
    communication: Literal["one_way", "two_way"] = "two_way"
    """Estimator of the Gram matrix. one_way: from one upload (Algorithm 3); two_way: corrected
    by a second upload after the server's broadcast (Algorithm 6)."""
    preference: tuple[float, ...] | None = None
    """Preference r, which targets losses with r₁F₁ = ... = r_M F_M; null targets equal losses."""
    threshold: float = 0.01
    """Divergence ε of the losses from the target ratios; at or below it, the sum of the losses is
    minimised."""
    min_weight: float | None = None
    """Minimum weight of an objective; null uses 1/(5M), the paper's practical improvement. 0
    imposes no minimum."""
    variant: Literal["printed", "released"] = "printed"
    """Linear programme of the weights: as printed in the paper, or as in the authors' released
    code. ``firm.solvers.fedcmoo_pref_weights`` lists the three differences."""

    preference_key: ClassVar[str | None] = "preference"
    reads_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.preference or ("",))

    def check(self, objectives: Sequence[Any]) -> None:
        """Raises ``ValueError`` if the preference does not fit these objectives."""
        self.find_weights(np.eye(len(objectives)), np.ones(len(objectives)))

    def find_weights(
        self, gram: np.ndarray, losses: np.ndarray, active: list[int] | None = None
    ) -> np.ndarray:
        """Returns the weights of the A active objectives (all by default), shape [A]."""
        multiples = np.array(self.preference or (1.0,) * len(gram))
        if active is not None and self.preference is not None:
            multiples = multiples[active]
        least = 1 / (5 * len(gram)) if self.min_weight is None else self.min_weight
        return fedcmoo_pref_weights(
            gram,
            losses,
            multiples,
            threshold=self.threshold,
            min_weight=least,
            variant=self.variant,
        )


@strategy
def fedcmoo_pref(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedCmooPrefConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedCMOO-Pref, and the rows for the log.

    Like ``fedcmoo``, but the weights also depend on the losses at θ_t, which clients send with
    their Jacobians. The row's "start_losses" are each objective's mean over the clients serving it.
    """
    this_round = Round(state, clients, engine, cfg)
    estimate = estimate_gram(this_round, state, cfg)
    losses = [
        fmean(row[j] for row, served in estimate.losses if j in served) for j in estimate.active
    ]
    weights = cfg.find_weights(estimate.gram.numpy(), np.array(losses), estimate.active).tolist()
    names = [state.objectives[j] for j in estimate.active]
    entries = {
        "start_losses": dict(zip(names, losses, strict=True)),
        "stationarity": stationarity([estimate.gram.tolist()]),
    }
    return train_on_sum(this_round, state, cfg, estimate, estimate.spread(weights), entries=entries)
