"""FedCMOO and FedCMOO-Pref: the server weighs the objectives once, the clients train on the sum.

Askin et al. (2024), "Federated Communication-Efficient Multi-Objective Optimization",
arXiv:2410.16398: Algorithms 1 to 3 and 6, 7 and 8 with preferences, 9 and 10 as in the theory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from firm.federation.client import Reply, State
from firm.federation.diagnostics import stationarity
from firm.federation.engines.engine import Engine
from firm.federation.messages import DECIDED_BY_SERVER, Request
from firm.federation.rounds import Round, losses_problem
from firm.federation.sampling import sample_clients
from firm.federation.server import ServerState
from firm.federation.sharing import CorrectionRequest, JacobianRequest, JacobianShare
from firm.federation.strategy import StrategyConfig, strategy
from firm.federation.training import LocalTraining
from firm.gradients import (
    COMPRESSORS,
    Message,
    TwoWayReply,
    broadcast,
    gram_matrix,
    message_from_dict,
    message_to_dict,
    one_way_gram,
    two_sample_gram,
    two_way_gram,
)
from firm.gradients.approx_gram import inner_products
from firm.solvers import (
    fedcmoo_pref_weights,
    fedcmoo_weights,
    firm_weights,
    project_to_simplex,
)
from firm.solvers.upgrad import upgrad_weights

CompressorName = Literal[
    "none", "low_rank", "top_k", "random_mask", "count_sketch", "hybrid", "quantizing"
]
ONE_WAY_ONLY = ("none", "count_sketch", "hybrid")
"""Exact already, or sketches, whose errors the two-way formula cannot correct."""
BIASED = ("low_rank", "top_k", "random_mask")
"""Compressors without the mean that Assumption 5 asks for."""


@dataclass(frozen=True)
class GramConfig(StrategyConfig):
    """What ApproxGramJacobian and the server's step leave to choose."""

    compressor: CompressorName = "low_rank"
    """How Jacobians travel; the paper's is low_rank, none sends them whole."""
    upload_budget: float = 1.0
    """Numbers that a Jacobian's message may take, in multiples of the shared parameters' number."""
    communication: Literal["one_way", "two_way", "two_sample"] = "two_way"
    """Whether the Gram matrix comes of one upload (Algorithm 3), is corrected after the server's
    answer (Algorithm 6), or comes of two other samples of clients (Algorithm 9, the theory's)."""

    def __post_init__(self) -> None:
        if self.compressor != "none" and self.compressor not in COMPRESSORS:
            raise ValueError(
                f"compressor must be none or one of {', '.join(COMPRESSORS)}, "
                f"got {self.compressor!r}."
            )
        if not 0 < self.upload_budget < inf:
            raise ValueError(
                f"upload_budget must be positive and finite, got {self.upload_budget}."
            )
        if self.aggregation != "uniform":
            raise ValueError(
                "the Gram matrix is that of the clients' plain mean; aggregation must be uniform, "
                f"got {self.aggregation}."
            )
        super().__post_init__()

    def jacobians(self) -> dict[str, Any]:
        """Returns the fields of a ``JacobianRequest`` that the configuration decides."""
        return {
            "compressor": None if self.compressor == "none" else self.compressor,
            "budget": self.upload_budget,
            "share_losses": self.reads_losses,
        }

    def requests(self, objectives: Sequence[str]) -> dict[type[Request], dict[str, Any]]:
        """Returns what a round asks of clients; see ``StrategyConfig``."""
        is_two_sample = self.communication == "two_sample"
        jacobians = {**self.jacobians(), "seed": DECIDED_BY_SERVER}
        training = {
            **self.training(),
            "weighting": "fixed",
            "weighting_options": DECIDED_BY_SERVER,
            "factors": DECIDED_BY_SERVER,
            "skipped_batches": 2 if is_two_sample else 0,
        }
        skipped = {"skipped_batches": DECIDED_BY_SERVER} if is_two_sample else {}
        asked = {LocalTraining: training, JacobianRequest: {**jacobians, **skipped}}
        if self.communication == "two_way":
            asked[CorrectionRequest] = {**jacobians, "broadcast": DECIDED_BY_SERVER}
        return asked


@dataclass(frozen=True)
class FedCmooConfig(GramConfig):
    """What FedCMOO leaves to choose."""

    name: Literal["fedcmoo"] = "fedcmoo"
    """The strategy."""
    gram_clients: int | None = None
    """Clients in each of the two samples, n'; null takes as many as train."""
    solver: Literal["steps", "exact", "upgrad"] = "steps"
    """How weights are found: by projected gradient steps from the last round's (Algorithm 2),
    exactly (Eq. 3), or as UPGrad does (``upgrad_weights``), which is another algorithm and needs
    the extra torchjd."""
    step_size: float = 0.001
    """Step size β of Algorithm 2."""
    num_steps: int = 1000
    """Steps K of Algorithm 2; the theory has 1."""
    normalize_gram: bool = True
    """Whether the Gram matrix is divided by the square of the mean gradient norm for the steps,
    which gives the step size a scale, as in the authors' experiments; for the exact solution by the
    mean of its diagonal, which gives β one (Eq. 9 of FIRM). Not in the paper."""
    beta: float = 0.0
    """Strength of the pull of the exact solution towards uniform weights, FIRM's β. Not in the
    paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver not in ("steps", "exact", "upgrad"):
            raise ValueError(f"solver must be steps, exact or upgrad, got {self.solver!r}.")
        if self.solver == "upgrad":
            upgrad_weights(torch.eye(1))  # or TorchJD is missing
        firm_weights(np.eye(1), beta=self.beta)
        if self.beta > 0 and self.solver != "exact":
            raise ValueError(f"beta belongs to solver exact, got {self.beta} with {self.solver}.")
        _check_communication(self)
        num_steps = min(1, self.num_steps)
        fedcmoo_weights(np.ones(1), np.eye(1), step_size=self.step_size, num_steps=num_steps)
        if self.communication != "two_sample":
            if self.gram_clients is not None:
                raise ValueError("gram_clients belongs to communication two_sample.")
            return
        if self.gram_clients is not None and self.gram_clients <= len(self.always):
            raise ValueError(
                f"gram_clients must be more than the {len(self.always)} that always take part, "
                f"got {self.gram_clients}."
            )
        if self.compressor in BIASED:
            raise ValueError(
                f"communication two_sample needs an unbiased compressor, got {self.compressor}; "
                "use quantizing, count_sketch, hybrid or none."
            )
        if self.solver != "steps" or self.normalize_gram:
            raise ValueError(
                "communication two_sample gives a matrix that need not be positive semidefinite; "
                "use solver steps and normalize_gram false, as the theory does."
            )


@dataclass(frozen=True)
class FedCmooPrefConfig(GramConfig):
    """What FedCMOO-Pref leaves to choose."""

    name: Literal["fedcmoo_pref"] = "fedcmoo_pref"
    """The strategy."""
    communication: Literal["one_way", "two_way"] = "two_way"
    """Whether the Gram matrix comes of one upload (Algorithm 3), or is corrected after the
    server's answer (Algorithm 6)."""
    preference: tuple[float, ...] | None = None
    """r: losses in inverse proportion are aimed at, r₁F₁ = ... = r_M F_M; null asks for equal
    ones."""
    threshold: float = 0.01
    """Divergence ε of the losses from the wanted ratios below which their sum is lowered."""
    min_weight: float | None = None
    """Least weight of an objective; null takes 1/(5M), the paper's practical improvement, and 0
    follows the preference alone."""
    variant: Literal["printed", "released"] = "printed"
    """The programme of the weights as the paper prints it, or as the authors' released code has it:
    see ``firm.solvers.fedcmoo_pref_weights`` for their three differences."""

    reads_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_communication(self)
        self._weights(np.eye(len(self.preference or (1.0,))), np.ones(len(self.preference or (1,))))

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` on a preference that does not fit these objectives."""
        self._weights(np.eye(len(objectives)), np.ones(len(objectives)))

    def find_weights(
        self, gram: torch.Tensor, losses: Sequence[float], active: list[int]
    ) -> list[float]:
        """Returns the weights of the active objectives, shape [A]; FindWeights-Pref."""
        return self._weights(gram.numpy(), np.array(losses), active).tolist()

    def _weights(
        self, gram: np.ndarray, losses: np.ndarray, active: list[int] | None = None
    ) -> np.ndarray:
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
def fedcmoo(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedCmooConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedCMOO, and the round's rows for the log.

    A client that fails in the first phase takes no part in the second. Its gradients are those of
    the batch that it draws first in the second phase, so that it may reuse them there; only with
    communication two_sample are the batches others, as the theory asks for.

    An objective that none of the round's clients serves has weight 0, and one that some serve is
    averaged over those. The row's "weights" are w by objective, "stationarity" is min wᵀGw: of the
    mean gradients of the drawn batches, which compressed messages estimate.

    UPGrad's weights sum to 1 or more, and the local loss is Σ wⱼfⱼ with them as they are: after one
    local step of SGD the server has moved by the local learning rate times UPGrad's direction.


    Raises:
        RoundFailed: When fewer than ``cfg.quorum`` clients finished a phase.
    """
    this_round = Round(state, clients, engine, cfg)

    # phase 1: the Gram matrix of the mean Jacobian, from compressed messages
    if cfg.communication == "two_sample":
        estimate = _two_sample_gram(this_round, state, clients, cfg)
    else:
        estimate = _gram(this_round, state, cfg)

    # FindWeights, from where the round before left them
    last = state.memory.get("weights", [1 / len(state.objectives)] * len(state.objectives))
    weights, kept = _next_weights(last, estimate, cfg)

    # phase 2: local training on Σ w_j f_j, and the server's step
    is_symmetric = cfg.communication != "two_sample"  # or there is no minimum to tell
    entries = {"stationarity": stationarity([estimate.gram.tolist()])} if is_symmetric else {}
    memory = {**state.memory, "weights": kept}
    scale = sum(weights) if cfg.solver == "upgrad" else 1.0
    return _train(
        this_round, state, cfg, estimate, weights, scale=scale, memory=memory, entries=entries
    )


@strategy
def fedcmoo_pref(
    state: ServerState, clients: Sequence[str], engine: Engine, cfg: FedCmooPrefConfig
) -> tuple[ServerState, dict[str, Any]]:
    """Returns the server's state after one round of FedCMOO-Pref, and the rows for the log.

    As ``fedcmoo``, but the weights come of the losses at θ_t too, which clients tell with their
    Jacobians: the means over those that serve an objective, in the row's "start_losses". The
    programme is the printed one, from which the authors' released code departs: ``cfg.variant``.


    Raises:
        RoundFailed: When fewer than ``cfg.quorum`` clients finished a phase, or told losses that
            are finite and not negative.
    """
    this_round = Round(state, clients, engine, cfg)
    estimate = _gram(this_round, state, cfg)
    losses = [
        fmean(row[j] for row, served in estimate.losses if j in served) for j in estimate.active
    ]
    found = cfg.find_weights(estimate.gram, losses, estimate.active)
    names = [state.objectives[j] for j in estimate.active]
    entries = {
        "start_losses": dict(zip(names, losses, strict=True)),
        "stationarity": stationarity([estimate.gram.tolist()]),
    }
    return _train(this_round, state, cfg, estimate, estimate.spread(found), entries=entries)


@dataclass(frozen=True)
class _Estimate:
    """What phase 1 tells: the served objectives' matrix, and who goes on."""

    gram: torch.Tensor
    """G of the A objectives that someone serves, float64 [A, A]."""
    factors: list[float]
    """n / |R_j|, which makes a mean over all clients one over those that serve j; 0 where nobody
    does; shape [M]."""
    clients: list[str]
    """Who trains."""
    num_skipped: int = 0
    """Batches that the training leaves out, since they were used for the matrix."""
    also: tuple[str, ...] = ()
    """Clients that drew batches and do not train."""
    losses: tuple[tuple[list[float], list[int]], ...] = ()
    """Each client's losses [M] and the objectives that it serves."""

    @property
    def active(self) -> list[int]:
        """The A objectives' indices."""
        return [j for j, factor in enumerate(self.factors) if factor > 0]

    def spread(self, found: Sequence[float]) -> list[float]:
        """Returns the A objectives' weights among zeros for the others, shape [M]."""
        by_index = dict(zip(self.active, found, strict=True))
        return [by_index.get(j, 0.0) for j in range(len(self.factors))]


def _gram(
    this_round: Round, state: ServerState, cfg: FedCmooConfig | FedCmooPrefConfig
) -> _Estimate:
    """ApproxGramJacobian, Algorithms 3 and 6."""
    fields = {**cfg.jacobians(), "seed": this_round.seed("jacobians")}
    replies = _jacobians(this_round, this_round.sampled, fields, state, cfg)
    if cfg.communication == "two_way":
        messages = {reply.client: _message(reply) for reply in replies}
        answer = broadcast(
            list(messages.values()),
            _compressor(cfg, next(iter(messages.values()))),
            generator=torch.Generator().manual_seed(fields["seed"]),
        )
        correction = {**fields, "broadcast": message_to_dict(answer)}
        corrections = this_round.ask(
            this_round.request(CorrectionRequest, correction), list(messages)
        )
        kept = {correction.client for correction in corrections}
        replies = [reply for reply in replies if reply.client in kept]
        gram = two_way_gram(
            [messages[reply.client] for reply in replies],
            [TwoWayReply(**vars(correction.content)) for correction in corrections],
        )
    elif cfg.compressor == "none":
        gram = gram_matrix(_mean_jacobian(replies))
    else:
        gram = one_way_gram([_message(reply) for reply in replies])

    # averages over those that serve an objective, where the formulas take all clients
    served = [reply.content.served for reply in replies]
    counts = [sum(j in one for one in served) for j in range(len(state.objectives))]
    factors = [len(replies) / count if count else 0.0 for count in counts]
    active = [j for j, count in enumerate(counts) if count]
    scale = torch.tensor(factors, dtype=torch.float64)[active]
    return _Estimate(
        scale[:, None] * gram[active][:, active] * scale,
        factors,
        [reply.client for reply in replies],
        losses=tuple(
            (reply.content.start_losses, reply.content.served)
            for reply in replies
            if cfg.reads_losses
        ),
    )


def _two_sample_gram(
    this_round: Round, state: ServerState, clients: Sequence[str], cfg: FedCmooConfig
) -> _Estimate:
    """ApproxGramJacobian-T, Algorithm 9: Y₁Y₂ᵀ of two samples of clients with their own batches."""
    samples, replies = [], []
    for index in range(2):
        sample = sample_clients(
            clients,
            seed=this_round.seed(f"sample {index}"),
            round_number=this_round.number,
            count=cfg.gram_clients or cfg.clients_per_round,
            always=cfg.always,
        )
        fields = {
            **cfg.jacobians(),
            "seed": this_round.seed("jacobians"),
            "skipped_batches": index,
        }
        samples.append(sample)
        replies.append(_jacobians(this_round, sample, fields, state, cfg))
    if cfg.compressor == "none":
        gram = inner_products(_mean_jacobian(replies[0]), _mean_jacobian(replies[1]))
    else:
        first, second = ([_message(reply) for reply in each] for each in replies)
        gram = two_sample_gram(first, second)
    # an engine keeps what a client's last task left, and only if that one was accepted
    last = [reply.client for reply in replies[1]]
    last += [reply.client for reply in replies[0] if reply.client not in samples[1]]
    return _Estimate(
        gram,
        [1.0] * len(state.objectives),
        this_round.sampled,
        num_skipped=2,
        also=tuple(name for name in last if name not in this_round.sampled),
    )


def _next_weights(
    last: list[float], estimate: _Estimate, cfg: FedCmooConfig
) -> tuple[list[float], list[float]]:
    """Returns the round's weights [M], and those that the next round starts from.

    Objectives that nobody serves have weight 0 in the round and keep theirs for later ones.
    """
    active = estimate.active
    mass = sum(last[j] for j in active)
    first = [last[j] / mass if mass > 0 else 1 / len(active) for j in active]
    found = _find_weights(torch.tensor(first, dtype=torch.float64), estimate.gram, cfg)
    weights = estimate.spread(found)
    if len(active) == len(last):
        return weights, weights
    return weights, [mass * weights[j] if j in active else last[j] for j in range(len(last))]


def _find_weights(last: torch.Tensor, gram: torch.Tensor, cfg: FedCmooConfig) -> list[float]:
    """FindWeights, Algorithm 2, on a matrix [A, A]; or Eq. 3, or UPGrad."""
    if cfg.solver == "exact":
        return firm_weights(gram, beta=cfg.beta, normalize=cfg.normalize_gram).tolist()
    if cfg.solver == "upgrad":
        return upgrad_weights(gram).tolist()
    if cfg.communication == "two_sample":  # not symmetric, which Algorithm 2 does not mind
        for _ in range(cfg.num_steps):
            last = project_to_simplex(last - cfg.step_size * gram @ last)
        return last.tolist()
    return fedcmoo_weights(
        last,
        gram,
        step_size=cfg.step_size,
        num_steps=cfg.num_steps,
        normalize=cfg.normalize_gram,
    ).tolist()


def _train(
    this_round: Round,
    state: ServerState,
    cfg: GramConfig,
    estimate: _Estimate,
    weights: list[float],
    *,
    entries: State,
    scale: float = 1.0,
    memory: State | None = None,
) -> tuple[ServerState, dict[str, Any]]:
    """Phase 2 of Algorithms 1, 7 and 10, with weights that the task divides by their sum."""
    factors = [scale * factor for factor in estimate.factors]
    fields = {
        **cfg.training(),
        "weighting": "fixed",
        "weighting_options": {"weights": weights},
        "factors": None if set(factors) == {1.0} else factors,
        "skipped_batches": estimate.num_skipped,
    }
    replies = this_round.train(fields, clients=estimate.clients)
    by_objective = dict(zip(state.objectives, weights, strict=True))
    return this_round.aggregate(
        replies, memory=memory, also=estimate.also, entries={"weights": by_objective, **entries}
    )


def _mean_jacobian(replies: Sequence[Reply]) -> torch.Tensor:
    rows = torch.stack([reply.content.jacobian for reply in replies])
    return rows.double().mean(dim=0)


def _message(reply: Reply) -> Message:
    return message_from_dict(reply.content.message)


def _compressor(cfg: GramConfig, message: Message) -> Any:
    """The server's own, of the clients' budget."""
    compressor: Any = COMPRESSORS[cfg.compressor]
    return compressor(int(cfg.upload_budget * message.shape[1]))


def _check_communication(cfg: FedCmooConfig | FedCmooPrefConfig) -> None:
    ways = ["one_way", "two_way"] + ["two_sample"] * isinstance(cfg, FedCmooConfig)
    if cfg.communication not in ways:
        raise ValueError(
            f"communication must be one of {', '.join(ways)}, got {cfg.communication!r}."
        )
    if cfg.communication == "two_way" and cfg.compressor in ONE_WAY_ONLY:
        raise ValueError(
            f"compressor {cfg.compressor} goes one way only; set communication to one_way."
        )


def _jacobians(
    this_round: Round,
    clients: Sequence[str],
    fields: Mapping[str, Any],
    state: ServerState,
    cfg: GramConfig,
) -> list[Reply]:
    """The clients' valid Jacobians, of as many columns each."""
    request = this_round.request(JacobianRequest, fields)
    is_two_sample = cfg.communication == "two_sample"

    def check(content: JacobianShare) -> str | None:
        if is_two_sample and len(content.served) < len(state.objectives):
            return "communication two_sample is for clients that serve all objectives"
        if content.message is None:
            if cfg.compressor != "none":
                return f"its Jacobian is not compressed by {cfg.compressor}"
        elif content.message["kind"] != cfg.compressor:
            return f"its Jacobian is compressed by {content.message['kind']}, not {cfg.compressor}"
        elif content.message.get("shared_seed", request.seed) != request.seed:
            return "its Jacobian is compressed with another round's seed"
        return losses_problem(content.start_losses, state.objectives) if cfg.reads_losses else None

    return this_round.ask(request, clients, check=check, common=_num_columns)


def _num_columns(content: JacobianShare) -> int:
    if content.jacobian is not None:
        return content.jacobian.size(1)
    return message_from_dict(content.message or {}).shape[1]
