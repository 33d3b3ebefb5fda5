"""Requests of a secure sum and their answers, in the order of a round's five exchanges."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from annotated_types import Len
from pydantic import PlainValidator, ValidationInfo

from firm.base.schema import NonNegative
from firm.federation.client import Client
from firm.federation.messages import Answer, Count, Request, Sizes, Steps, Update
from firm.federation.options.secure.config import NUM_BYTES, Neighbours
from firm.federation.options.secure.masking import MAX_UPDATES
from firm.federation.options.secure.part import Part
from firm.federation.options.secure.protocol import (
    PublicKeys,
    SealedShares,
    Share,
    Signature,
)
from firm.federation.schema import Invalid, Metrics, Text, context, invalid, read_record
from firm.federation.tasks import task
from firm.federation.training import LocalTraining

Clients = Annotated[list[Text], Len(1, MAX_UPDATES)]


def _masked_numbers(value: Any) -> torch.Tensor:
    is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if not is_tensor or value.dtype != torch.uint8 or value.ndim != 2:
        raise invalid("a matrix of uint8", value)
    return value


def _public_keys(value: Any, info: ValidationInfo) -> PublicKeys:
    return read_record(PublicKeys, value, "", context(info))


Keys = Annotated[Any, PlainValidator(_public_keys)]
"""``PublicKeys``."""
MaskedNumbers = Annotated[torch.Tensor, PlainValidator(_masked_numbers)]
"""Masked numbers, one for each parameter of θ_t and one for the weight: uint8 [d + 1, 6 or 8]."""


# --- 1: train, and advertise keys -----------------------------------------------------------------


@dataclass(frozen=True)
class Trained(Answer):
    """Answer to a local training; the update stays at its site for now."""

    client: Text
    keys: Keys
    """Keys of the sum that the update will be in."""
    metrics: Metrics
    """Registered metrics of the local training."""


@dataclass(frozen=True, kw_only=True)
class MaskedTraining(LocalTraining):
    """Requests a local training, and keys of a sum of updates."""

    task: ClassVar[str] = "masked_training"
    answer: ClassVar[type[Answer]] = Trained

    aggregation: Literal["uniform", "by_examples"] = "uniform"
    """The client's weight w_c: 1, or its number of examples over EXAMPLES_PER_WEIGHT."""
    max_update_norm: NonNegative | None = None
    """Longest update that leaves the site."""
    num_colluders: Count | None = None
    """Clients that may collude with the server; None is a third of the federation's."""
    neighbours: Neighbours = "all"
    """Pairs of clients that share a mask: all, or each client and a few neighbours."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a masked number."""
        return NUM_BYTES[self.aggregation]

    def parameter_bytes(self, num_parameters: int, adapter_bytes: int) -> int:
        """Returns the size of the masked update that follows the training in bytes."""
        return self.num_bytes * num_parameters

    def plain(self, *, skipped: int = 0) -> LocalTraining:
        """Returns the request without masking, as the client itself receives it.

        Args:
            skipped: Batches to skip beyond those of the request.
        """
        values = {each.name: getattr(self, each.name) for each in fields(LocalTraining)}
        return LocalTraining(**{**values, "skipped_batches": self.skipped_batches + skipped})

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns an example answer; see ``parameter_bytes``."""
        update = self.plain().example(client, sizes)
        assert isinstance(update, Update)
        keys = PublicKeys("0" * 64, "0" * 64, "0" * 64, "0" * 512)
        return Trained(client, keys, update.metrics)


@dataclass(frozen=True, kw_only=True)
class SumRequest(Request):
    """Base class of the requests that follow the training; none needs the model."""

    tells_of_data: ClassVar[bool] = False  # the update in the sum is counted with its training

    def carried_out(self, part: Part) -> Answer:
        """Returns the answer of a client's part in the sum."""
        raise NotImplementedError


# --- 2: share keys --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedKeys(Answer):
    """A client's secrets in shares for its neighbours."""

    client: Text
    shares: Annotated[dict[Text, SealedShares], Len(0, MAX_UPDATES)]
    """By receiver."""


@dataclass(frozen=True, kw_only=True)
class ShareKeys(SumRequest):
    """Requests shares of a client's secrets, sealed for its neighbours."""

    task: ClassVar[str] = "share_keys"
    answer: ClassVar[type[Answer]] = SharedKeys

    keys: Annotated[dict[Text, Keys], Len(1, MAX_UPDATES)]
    """Public keys of all clients of the sum."""

    def carried_out(self, part: Part) -> Answer:
        """Returns the sealed shares."""
        return SharedKeys(part.client, part.share(self.keys))


# --- 3: send masked updates -----------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedUpdate(Answer):
    """An update that is hidden from the server."""

    client: Text
    numbers: MaskedNumbers
    """w_c (θ_c - θ_t) and w_c under masks."""


@dataclass(frozen=True, kw_only=True)
class SendMasked(SumRequest):
    """Requests the update under masks."""

    task: ClassVar[str] = "send_masked"
    answer: ClassVar[type[Answer]] = MaskedUpdate

    shares: Annotated[dict[Text, dict[Text, SealedShares]], Len(0, MAX_UPDATES)]
    """Sealed shares by receiver and sender; a client receives its own."""
    num_numbers: Steps
    """d + 1."""
    num_bytes: Literal[6, 8]
    """Bytes of each number."""

    def of(self, *clients: str) -> Self:
        """Returns the part of the request that concerns some clients."""
        own = {name: self.shares[name] for name in clients if name in self.shares}
        return replace(super().of(*clients), shares=own)

    def parameter_bytes(self, num_parameters: int, adapter_bytes: int) -> int:
        """Returns the size of the masked update in bytes."""
        return self.num_bytes * self.num_numbers

    def received(self, content: Any, client: str) -> Any:
        """Returns the answer; raises ``Invalid`` if its size is another."""
        size = (self.num_numbers, self.num_bytes)
        if isinstance(content, MaskedUpdate) and content.numbers.shape != size:
            raise Invalid(f"numbers must be uint8 of shape {list(size)}")
        return content

    def carried_out(self, part: Part) -> Answer:
        """Returns the masked update."""
        return MaskedUpdate(part.client, part.mask(self.shares.get(part.client, {})))


# --- 4: confirm the members -----------------------------------------------------------------------


@dataclass(frozen=True)
class Confirmed(Answer):
    """A client's signature of the members of a sum."""

    client: Text
    signature: Signature


@dataclass(frozen=True, kw_only=True)
class ConfirmMembers(SumRequest):
    """Requests a signature of the members of a sum."""

    task: ClassVar[str] = "confirm_members"
    answer: ClassVar[type[Answer]] = Confirmed

    members: Clients
    """Clients with masked updates that have arrived."""

    def carried_out(self, part: Part) -> Answer:
        """Returns the signature."""
        return Confirmed(part.client, part.confirm(self.members))


# --- 5: reveal shares -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Revealed(Answer):
    """Shares of secrets of a client's neighbours, which open the sum."""

    client: Text
    self_masks: Annotated[dict[Text, Share], Len(0, MAX_UPDATES)]
    """Shares of the seeds of members' self-masks."""
    masking_keys: Annotated[dict[Text, Share], Len(0, MAX_UPDATES)]
    """Shares of the masking keys of clients that dropped out."""


@dataclass(frozen=True, kw_only=True)
class RevealShares(SumRequest):
    """Requests the shares that open a sum."""

    task: ClassVar[str] = "reveal_shares"
    answer: ClassVar[type[Answer]] = Revealed

    members: Clients
    """Clients in the sum."""
    signatures: Annotated[dict[Text, Signature], Len(1, MAX_UPDATES)]
    """Signatures of the members, by client."""

    def carried_out(self, part: Part) -> Answer:
        """Returns the shares."""
        return Revealed(part.client, *part.reveal(self.members, self.signatures))


STEPS: tuple[type[SumRequest], ...] = (ShareKeys, SendMasked, ConfirmMembers, RevealShares)
"""Requests that follow the training, in order."""


def _without_a_site(client: Client, request: Request) -> Answer:
    raise RuntimeError(
        f"{client.name} has no keys of its own; ask it through a SecureEngine, which has them."
    )


for _kind in (MaskedTraining, *STEPS):
    task(_kind)(_without_a_site)


def transpose(shares: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns shares by receiver and sender, from shares by sender and receiver.

    Only shares for clients that have sent shares themselves are kept.
    """
    received: dict[str, dict[str, str]] = {name: {} for name in shares}
    for sender, sent in shares.items():
        for receiver, content in sent.items():
            if receiver in received:
                received[receiver][sender] = content
    return received
