"""Server side of ApproxGramJacobian, which estimates the Gram matrix of the mean Jacobian.

Algorithms 3, 6 and 9 of Askin et al. (2024), arXiv:2410.16398, and the subsequent local training
in Algorithms 1, 7 and 10. The client side is ``firm.federation.sharing``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from firm.base.state import State
from firm.federation.client import Reply
from firm.federation.fedcmoo.approx_gram import (
    TwoWayReply,
    broadcast,
    inner_products,
    one_way_gram,
    two_sample_gram,
    two_way_gram,
)
from firm.federation.rounds import Round, losses_problem
from firm.federation.server import ServerState
from firm.federation.sharing import CorrectionRequest, JacobianRequest, JacobianShare
from firm.federation.strategy_configs import GramConfig
from firm.gradients.compression import JacobianMessage
from firm.gradients.jacobian import gram_matrix
from firm.gradients.messages import COMPRESSORS, message_from_dict, message_to_dict


@dataclass(frozen=True)
class Estimate:
    """Estimated Gram matrix of the active objectives at θ_t, and the clients that train."""

    gram: torch.Tensor
    """G of the A active objectives, which have a loss in at least one batch, float64 [A, A]."""
    active: list[int]
    """Indices of the A active objectives; empty if no batch has a loss."""
    factors: list[float]
    """n / |R_j| by objective, which turns a mean over all clients into one over the clients R_j
    that serve j; 0 if there are none; shape [M]."""
    clients: list[str]
    """Names of the clients that train."""
    num_skipped: int = 0
    """Batches to skip in local training, since they were used for the estimate."""
    also: tuple[str, ...] = ()
    """Clients that drew batches but do not train."""
    losses: tuple[tuple[list[float], list[int]], ...] = ()
    """Losses [M] of each client, and the objectives it serves."""

    def spread(self, weights: Sequence[float]) -> list[float]:
        """Returns the A active objectives' weights, with zeros for the others, shape [M]."""
        by_index = dict(zip(self.active, weights, strict=True))
        return [by_index.get(j, 0.0) for j in range(len(self.factors))]


def estimate_gram(this_round: Round, state: ServerState, cfg: GramConfig) -> Estimate:
    """Returns the estimate of ApproxGramJacobian, Algorithms 3 and 6.

    An objective's gradient is averaged over the clients with losses for it in their batches, and
    its training over the clients that serve it. Unlike the paper, in which all clients answer, X of
    Eq. (14) is left out if the correction of any client is missing: it is about the sum of all.

    Raises:
        RoundFailed: When fewer than ``cfg.quorum`` clients sent the requested messages.
    """
    fields = {**cfg.jacobians(), "seed": this_round.seed("jacobians")}
    replies = _jacobians(this_round, this_round.sampled, fields, state, cfg)
    if cfg.communication == "two_way":
        messages = {reply.client: _message(reply) for reply in replies}
        budget = int(cfg.upload_budget * next(iter(messages.values())).shape[1])
        compressor: Any = COMPRESSORS[cfg.compressor]
        generator = torch.Generator().manual_seed(fields["seed"])
        answer = broadcast(list(messages.values()), compressor(budget), generator=generator)
        correction = {**fields, "broadcast": message_to_dict(answer)}
        corrections = this_round.ask(
            this_round.request(CorrectionRequest, correction), list(messages)
        )
        corrected = {correction.client for correction in corrections}
        replies = [reply for reply in replies if reply.client in corrected]
        second = [TwoWayReply(**vars(correction.content)) for correction in corrections]
        if len(second) < len(messages):  # the broadcast has parts of clients that are out now
            second = [replace(own, correction=torch.zeros_like(own.correction)) for own in second]
        gram = two_way_gram([messages[reply.client] for reply in replies], second)
    elif cfg.compressor == "none":
        gram = gram_matrix(_mean_jacobian(replies))
    else:
        gram = one_way_gram([_message(reply) for reply in replies])

    # averages only over clients that have the objective; the formulas average over all clients
    count = len(state.objectives)
    scale = _mean_factors([reply.content.in_batch for reply in replies], count)
    return Estimate(
        *_of_active(gram, scale, scale),
        _mean_factors([reply.content.served for reply in replies], count),
        [reply.client for reply in replies],
        losses=tuple(
            (reply.content.start_losses, reply.content.served)
            for reply in replies
            if cfg.reads_losses
        ),
    )


def estimate_two_sample_gram(
    this_round: Round,
    state: ServerState,
    cfg: GramConfig,
    *,
    count: int | None,
) -> Estimate:
    """Returns the estimate of ApproxGramJacobian-T, Algorithm 9.

    It is Y₁Y₂ᵀ of two samples of n' clients (``count``; None takes all) with independent batches,
    and need not be symmetric.
    """
    samples, replies = [], []
    for index in range(2):
        sample = this_round.sample(this_round.seed(f"sample {index}"), count)
        fields = {**cfg.jacobians(), "seed": this_round.seed("jacobians"), "skipped_batches": index}
        samples.append(sample)
        replies.append(_jacobians(this_round, sample, fields, state, cfg))
    if cfg.compressor == "none":
        gram = inner_products(_mean_jacobian(replies[0]), _mean_jacobian(replies[1]))
    else:
        first, second = ([_message(reply) for reply in each] for each in replies)
        gram = two_sample_gram(first, second)
    scales = [
        _mean_factors([reply.content.in_batch for reply in each], len(state.objectives))
        for each in replies
    ]
    # an engine keeps only the state after a client's last task, and only if it was accepted
    last = [reply.client for reply in replies[1]]
    last += [reply.client for reply in replies[0] if reply.client not in samples[1]]
    return Estimate(
        *_of_active(gram, *scales),
        [1.0] * len(state.objectives),
        this_round.sampled,
        num_skipped=2,
        also=tuple(name for name in last if name not in this_round.sampled),
    )


def train_on_sum(
    this_round: Round,
    state: ServerState,
    cfg: GramConfig,
    estimate: Estimate,
    weights: list[float],
    *,
    entries: State,
    scale: float = 1.0,
    memory: State | None = None,
) -> tuple[ServerState, dict[str, Any]]:
    """Finishes a round with phase 2 of Algorithms 1, 7 and 10: local training on Σⱼ wⱼ fⱼ.

    Args:
        this_round: The round in progress.
        state: The server's state.
        cfg: The strategy's configuration.
        estimate: The clients that train, and their factors in each mean.
        weights: w, shape [M]; the task divides them by their sum.
        entries: Entries of the round's row in addition to "weights".
        scale: Factor of the local loss: the sum of the weights, if they must not be normalised.
        memory: The strategy's state for the next round; unchanged when None.
    """
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
    return this_round.finish(
        replies, memory=memory, also=estimate.also, entries={"weights": by_objective, **entries}
    )


def _mean_factors(having: Sequence[Sequence[int]], count: int) -> list[float]:
    """Returns factors that turn means over n clients into means over those with the objective.

    Args:
        having: Indices of the objectives that each client has.
        count: M.

    Returns:
        A factor per objective, shape [M].
    """
    counts = [sum(j in each for each in having) for j in range(count)]
    return [len(having) / number if number else 0.0 for number in counts]


def _of_active(
    gram: torch.Tensor, rows: Sequence[float], columns: Sequence[float]
) -> tuple[torch.Tensor, list[int]]:
    """Returns the scaled matrix [A, A] of the objectives in rows and columns, and their indices.

    Args:
        gram: Gram matrix of means over all clients, float64 [M, M].
        rows: Factors of the rows, 0 for objectives without gradients, shape [M].
        columns: Factors of the columns, shape [M].
    """
    active = [j for j in range(len(gram)) if rows[j] > 0 and columns[j] > 0]
    scales = [torch.tensor(each, dtype=torch.float64)[active] for each in (rows, columns)]
    return scales[0][:, None] * gram[active][:, active] * scales[1], active


def _mean_jacobian(replies: Sequence[Reply]) -> torch.Tensor:
    rows = torch.stack([reply.content.jacobian for reply in replies])
    return rows.double().mean(dim=0)


def _message(reply: Reply) -> JacobianMessage:
    return message_from_dict(reply.content.message)


def _jacobians(
    this_round: Round,
    clients: Sequence[str],
    fields: Mapping[str, Any],
    state: ServerState,
    cfg: GramConfig,
) -> list[Reply]:
    """Returns the clients' valid Jacobians, each of the same size."""
    request = this_round.request(JacobianRequest, fields)
    is_two_sample = cfg.communication == "two_sample"

    def check(content: JacobianShare) -> str | None:
        if is_two_sample and len(content.served) < len(state.objectives):
            return "communication two_sample requires clients that serve all objectives"
        if content.message is None:
            if cfg.compressor != "none":
                return f"its Jacobian is not compressed by {cfg.compressor}"
        elif content.message["kind"] != cfg.compressor:
            return f"its Jacobian is compressed by {content.message['kind']}, not {cfg.compressor}"
        elif content.message.get("shared_seed", request.seed) != request.seed:
            return "its Jacobian is compressed with another round's seed"
        return losses_problem(content.start_losses, state.objectives) if cfg.reads_losses else None

    return this_round.ask(request, clients, check=check, common=_columns)


def _columns(content: JacobianShare) -> str:
    """Returns the number of columns of a Jacobian, and of its sketch if it has one."""
    if content.jacobian is not None:
        return f"{content.jacobian.size(1)} columns"
    message = message_from_dict(content.message or {})
    sketch = getattr(message, "sketch", None)
    sketched = "" if sketch is None else f" in a sketch of {sketch.size(1)}"
    return f"{message.shape[1]} columns{sketched}"
