"""One experiment: T-FIRM on a random MDP, by the strategy ``firm`` on the local engine."""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, Literal

import numpy as np

from firm.base.fields import NOT_IN_PAPER, NumClients, PositiveInt, configuration
from firm.federation import LocalEngine, ServerState, derive_seed
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from recipes.theory.client import ActorCriticConfig, TabularClient
from recipes.theory.exact import gradient_bound
from recipes.theory.mdp import Mdp, MdpConfig, random_mdp
from recipes.theory.terms import Trace, largest_ratio, measure_lemma_1, measure_terms


@configuration(source=NOT_IN_PAPER)
class ExperimentConfig:
    """A run of T-FIRM."""

    mdp: MdpConfig = field(default_factory=MdpConfig)
    """The process, the same for all clients."""
    client: ActorCriticConfig = field(default_factory=ActorCriticConfig)
    """Batch and step sizes."""
    num_clients: NumClients = 4
    """C."""
    num_steps: PositiveInt = 64
    """T, local steps of each client; a multiple of num_local_steps."""
    num_local_steps: PositiveInt = 4
    """K, local steps per round."""
    beta: float = 0.1
    """β of Eq. 11, on the raw Gram matrix."""
    trajectory: Literal["learned", "held"] = "held"
    """learned: rounds start from the server's θ, as in T-FIRM; held: always from θ = 0, so that
    terms are measured at the same point for every step size."""

    def __post_init__(self) -> None:
        if self.num_steps % self.num_local_steps:
            raise ValueError(
                f"num_steps must be a multiple of num_local_steps ({self.num_local_steps}), got "
                f"{self.num_steps}: rounds are whole."
            )
        self.strategy()

    def strategy(self) -> FirmConfig:
        """Returns FIRM on the raw Gram matrix, as in Eq. 11 and Lemma 1."""
        return FirmConfig(
            num_local_steps=self.num_local_steps,
            beta=self.beta,
            normalize=False,
            solve_per="minibatch",
            quorum=self.num_clients,
        )


def run_experiment(cfg: ExperimentConfig, *, seed: int) -> tuple[Mdp, Trace]:
    """Returns the MDP of a seed and the trace of the clients; equal seeds give equal runs.

    The seed draws the MDP and every client's stream. The MDP depends on it and on ``cfg.mdp``
    alone, so that other settings are compared on the same one.

    Raises:
        RoundFailed: A client failed; with its reason.
    """
    mdp = random_mdp(cfg.mdp, generator=np.random.default_rng(derive_seed(seed, "mdp")))
    clients = [
        TabularClient(f"client_{c}", mdp, cfg.client, seed=seed) for c in range(cfg.num_clients)
    ]
    names = [client.name for client in clients]
    engine, strategy = LocalEngine(clients), cfg.strategy()
    start = clients[0].adapter()
    state = ServerState(adapter=start, objectives=clients[0].objectives, seed=seed)
    rows: list[list[dict[str, Any]]] = []
    for _ in range(cfg.num_steps // cfg.num_local_steps):
        state, metrics = firm_round(state, names, engine, strategy)
        rows.append(metrics["clients"])
        if cfg.trajectory == "held":
            state = replace(state, adapter=start)
    return mdp, trace_of(rows)


def trace_of(rounds: Sequence[Sequence[dict[str, Any]]]) -> Trace:
    """Returns the trace of rounds from their rows, one per client, in the same order."""

    def joined(key: str) -> np.ndarray:
        # [rounds, C, K, ...] to [T, C, ...]
        values = np.array([[row[key] for row in rows] for rows in rounds])
        return values.swapaxes(1, 2).reshape(-1, values.shape[1], *values.shape[3:])

    return Trace(
        thetas=joined("theta"),
        gradients=-joined("jacobian"),
        solved=joined("weights"),
        weights=joined("smoothed_weights"),
    )


def summarise(mdp: Mdp, trace: Trace, *, beta: float) -> dict[str, float]:
    """Returns the means over the local steps of all ``Terms``, and ``lemma_1_figures``."""
    figures = {k: float(v.mean()) for k, v in vars(measure_terms(mdp, trace, beta=beta)).items()}
    is_applicable = beta > 0 and trace.solved.shape[1] > 1
    return figures | (lemma_1_figures(mdp, trace, beta=beta) if is_applicable else {})


def lemma_1_figures(mdp: Mdp, trace: Trace, *, beta: float) -> dict[str, float]:
    """Returns statistics of Lemma 1 over all pairs of clients and local steps.

    Returns:
        "lemma_1_ratio" and "lemma_1_prior_ratio", the largest ratios of its left side to its right
        one (with this pair's R, and with Lemma 7's), "lemma_1_comparisons" and
        "lemma_1_violations", how many pairs there were and how many broke it,
        "lemma_7_bound" and "lemma_7_largest", Lemma 7's R and the largest gradient's norm.

    Raises:
        ValueError: With a single client, or without regularisation.
    """
    lemma = measure_lemma_1(mdp, trace, beta=beta)
    return {
        "lemma_1_ratio": largest_ratio(lemma.left, lemma.right),
        "lemma_1_prior_ratio": largest_ratio(lemma.left, lemma.right_prior),
        "lemma_1_comparisons": float(lemma.left.size),
        "lemma_1_violations": float((lemma.left > lemma.right).sum()),
        "lemma_7_bound": gradient_bound(mdp),
        "lemma_7_largest": float(np.linalg.norm(trace.gradients, axis=-1).max()),
    }
