"""Sharing of Jacobians.

The tasks are the client side of ApproxGramJacobian, Algorithms 3, 6 and 9 of Askin et al. (2024),
FedCMOO.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval, Len
from pydantic import PlainValidator, Strict, ValidationInfo

from firm.base.randomness import derive_seed
from firm.base.registry import OneOf
from firm.base.schema import Finite, PerObjective
from firm.federation.client import Adapter, Client
from firm.federation.fedcmoo.approx_gram import two_way_reply
from firm.federation.messages import Answer, Request, Sizes
from firm.federation.schema import (
    Invalid,
    Jacobian,
    Matrix,
    Reading,
    context,
    invalid,
    shown,
)
from firm.federation.tasks import task
from firm.federation.training import (
    RoundSeed,
    SkippedBatches,
    drawn_batches,
    served_objectives,
    start_losses,
)
from firm.gradients.compression import JacobianMessage
from firm.gradients.messages import COMPRESSORS, message_from_dict, message_to_dict

Objective = Annotated[int, Interval(ge=0, le=99)]


def _compressed(value: Any, info: ValidationInfo) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise invalid("a compressed Jacobian", value)
    reading = context(info)
    size = reading.num_parameters
    try:
        count, width = message_from_dict(dict(value)).shape
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise Invalid(f" cannot be read: {shown(str(error))}") from error
    if count != len(reading.objectives) or not 1 <= width <= size:
        raise Invalid(
            f" must be of {len(reading.objectives)} rows and at most {size} columns, got "
            f"{count} and {width}"
        )
    return dict(value)


Compressed = Annotated[dict[str, Any], PlainValidator(_compressed)]
"""A compressed Jacobian as a mapping; ``message_from_dict`` checks every field."""


@dataclass(frozen=True)
class JacobianShare(Answer):
    """A client's Jacobian, uncompressed or compressed, with its objectives and losses."""

    column_fields: ClassVar[tuple[str, ...]] = ("jacobian", "message")

    served: Annotated[list[Objective], Strict(False), Len(1, 100)]
    """Indices of the objectives that the client serves."""
    jacobian: Jacobian | None = None
    """Jacobian of the shared parameters, float32 [M, d]; None if compressed."""
    message: Compressed | None = None
    """Compressed Jacobian (``message_to_dict``); None if uncompressed."""
    start_losses: PerObjective[Finite] | None = None
    """Losses at θ_t, shape [M]; None if not requested."""
    scored: Annotated[list[Objective], Strict(False), Len(0, 100)] | None = None
    """Indices of the served objectives with losses in the batch; rows of the others are zero. None
    for all served objectives."""

    @property
    def in_batch(self) -> list[int]:
        """Indices of the objectives with gradients in the Jacobian."""
        return self.served if self.scored is None else self.scored

    def check(self, reading: Reading) -> None:
        """Raises ``Invalid`` for unknown objectives, or unless there is exactly one Jacobian."""
        count = len(reading.objectives)
        if len(set(self.served)) < len(self.served) or max(self.served) >= count:
            raise Invalid(f"served must be some of the {count} objectives, got {self.served}")
        if len(set(self.in_batch)) < len(self.in_batch) or not {*self.in_batch} <= {*self.served}:
            raise Invalid(f"scored must be some of the served {self.served}, got {self.scored}")
        if (self.jacobian is None) == (self.message is None):
            raise Invalid("the message must have either a jacobian or a compressed one")


@dataclass(frozen=True, kw_only=True)
class JacobianRequest(Request):
    """Requests the Jacobian at θ_t."""

    task: ClassVar[str] = "share_jacobian"
    answer: ClassVar[type[Answer]] = JacobianShare

    compressor: Annotated[str, OneOf(COMPRESSORS)] | None = None
    """Compressor; None sends the Jacobian uncompressed."""
    budget: Annotated[float, Interval(ge=0, le=1e6)] = 1.0
    """Size of the upload in 4-byte numbers, as a multiple of the number of shared parameters."""
    seed: RoundSeed = 0
    """Seed of the round."""
    skipped_batches: SkippedBatches = 0
    """Batches to draw and skip first."""
    share_losses: bool = False
    """Send the losses at θ_t too."""

    @property
    def takes_whole_batches(self) -> bool:
        """Returns True, because the Jacobian is computed on a whole batch."""
        return True

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns an answer with a random Jacobian; see ``Request``."""
        generator = torch.Generator().manual_seed(0)
        count = len(self.objectives)
        rows = torch.randn(count, sizes.num_columns, generator=generator)
        losses = [1 / 3] * count if self.share_losses else None
        if self.compressor is None:
            return JacobianShare(served=list(range(count)), jacobian=rows, start_losses=losses)
        content = message_to_dict(_message(client, rows, self))
        return JacobianShare(served=list(range(count)), message=content, start_losses=losses)


@dataclass(frozen=True)
class GramCorrection(Answer):
    """A client's second upload in two-way communication."""

    own_gram: Matrix
    """Gram matrix of the client's Jacobian, [M, M]."""
    correction: Matrix
    """Correction term (``TwoWayReply``), [M, M]."""


@dataclass(frozen=True, kw_only=True)
class CorrectionRequest(JacobianRequest):
    """Requests the correction of the Gram matrix of compressed Jacobians."""

    task: ClassVar[str] = "correct_gram"
    answer: ClassVar[type[Answer]] = GramCorrection
    column_fields: ClassVar[tuple[str, ...]] = ("broadcast",)

    broadcast: Compressed
    """The server's broadcast (``message_to_dict``)."""

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns two unit matrices; see ``Request``."""
        unit = torch.eye(len(self.objectives))
        return GramCorrection(own_gram=unit, correction=unit)


@task(JacobianRequest)
def share_jacobian(client: Client, request: JacobianRequest) -> JacobianShare:
    """Returns a client's compressed Jacobian at the server's adapter.

    It is computed on the batch that the local training of the same round will draw first, because
    engines restore a client's accepted state before every task. Gradients of objectives that the
    client does not serve are zero.
    """
    rows, in_batch = _rows(client, request)
    losses = start_losses(client) if request.share_losses else None
    served = list(served_objectives(client))
    scored = None if in_batch is None or in_batch == served else in_batch
    common = {"served": served, "start_losses": losses, "scored": scored}
    if request.compressor is None:
        return JacobianShare(**common, jacobian=rows)
    return JacobianShare(**common, message=message_to_dict(_message(client.name, rows, request)))


@task(CorrectionRequest)
def correct_gram(client: Client, request: CorrectionRequest) -> GramCorrection:
    """Returns a client's second upload in two-way communication: two [M, M] matrices.

    The client repeats the deterministic computation of ``share_jacobian``, so that nothing has to
    be stored between the tasks.
    """
    rows, _ = _rows(client, request)
    broadcast = message_from_dict(request.broadcast)
    reply = two_way_reply(rows, _message(client.name, rows, request), broadcast)
    return GramCorrection(own_gram=reply.own_gram, correction=reply.correction)


def shared_columns(client: Client, adapter: Adapter) -> slice:
    """Returns the Jacobian's columns shared by all objectives, as a slice with explicit ends."""
    size = sum(parameter.numel() for parameter in adapter.values())
    start, stop, _ = client.shared.indices(size)
    return slice(start, stop)


def _rows(client: Client, request: JacobianRequest) -> tuple[torch.Tensor, list[int] | None]:
    """Returns the Jacobian's shared columns, float32 [M, d] on the CPU, and its objectives.

    These are the indices of the objectives with losses in the batch; None for all served ones.
    """
    client.load(request.adapter, request.round)
    client.keep_first_batch()  # for the training of the same round
    (batch,) = drawn_batches(client, 1, skipped=request.skipped_batches)
    gradients = client.gradients(batch.whole)
    columns = shared_columns(client, request.adapter)
    in_batch = list(gradients.served[0]) if gradients.served else None
    return gradients.jacobian[:, columns].float().cpu(), in_batch


def _message(client: str, rows: torch.Tensor, request: JacobianRequest) -> JacobianMessage:
    budget = int(request.budget * rows.size(1))
    if request.compressor is None or budget < 1:
        raise ValueError(
            f"an upload budget of {request.budget} times {rows.size(1)} shared parameters is less "
            "than one number; raise it."
        )
    compressor: Any = COMPRESSORS[request.compressor]
    seed = derive_seed(request.seed, client, request.skipped_batches)
    return compressor(budget).compress(
        rows, generator=torch.Generator().manual_seed(seed), shared_seed=request.seed
    )
