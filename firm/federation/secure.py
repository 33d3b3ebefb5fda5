"""Secure aggregation: messages by which a server learns the mean of updates without reading them.

A client's site masks w_c (θ_c - θ_t) and w_c (``firm.federation.masking``), the server adds what
arrives, and one of the sites opens the sum: θ_t + Σ w_c (θ_c - θ_t) / Σ w_c. All sites have one
key, and the server has none. That hides single updates from a server that follows the protocol and
repeats no round; a hostile one has a client answer twice, or sums opened that differ by one client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

import numpy as np
import torch

from firm.federation import masking
from firm.federation.aggregation import Aggregation, flat, unflattened
from firm.federation.client import Adapter, Client, Reply
from firm.federation.messages import (
    DECIDED_BY_SERVER,
    Answer,
    MetricsByName,
    Request,
    Sizes,
    Update,
)
from firm.federation.schema import (
    Invalid,
    Items,
    Number,
    Optional,
    Parameters,
    Reading,
    Text,
    shown,
)
from firm.federation.tasks import task
from firm.federation.training import LocalTraining
from firm.quantities import Quantity, register
from firm.schema import Count, NonNegative

Secure = Literal["masks"]

FEWEST = 2
"""Fewest updates of which a server may learn the mean."""
EXAMPLES_PER_WEIGHT = 256
"""Examples of a client that weighs 1, where clients count by their number of examples: so large
weights and small ones are both exact enough."""


class SecureFigures(TypedDict):
    """Figures of a secure sum, in the row of its round."""

    num_updates: Count
    masked_bytes: NotRequired[Count]
    seconds: NotRequired[NonNegative]
    rounding: NotRequired[NonNegative]


register(Quantity("secure", kind="round", type=SecureFigures))


@dataclass(frozen=True)
class _MaskedNumbers:
    """Masked numbers, one for each parameter of θ_t and one for the weight: uint8 [d + 1, 6]."""

    def read(self, value: Any, path: str, reading: Reading) -> torch.Tensor:
        """Returns the tensor."""
        size = sum(parameter.numel() for parameter in reading.adapter.values())
        shape = (size + 1, masking.NUM_BYTES)
        is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not is_tensor or value.dtype != torch.uint8 or value.shape != shape:
            raise Invalid(f"{path} must be uint8 of shape {list(shape)}, got {shown(value)}")
        return value


@dataclass(frozen=True)
class _Nonce:
    """A nonce in hexadecimal digits."""

    def read(self, value: Any, path: str, reading: Reading) -> str:
        """Returns the text."""
        text = Text(max_length=2 * masking.NONCE_BYTES).read(value, path, reading)
        if len(text) != 2 * masking.NONCE_BYTES or set(text) - set("0123456789abcdef"):
            raise Invalid(f"{path} must be {2 * masking.NONCE_BYTES} hexadecimal digits")
        return text


@dataclass(frozen=True)
class MaskedUpdate(Answer):
    """The answer to a local training whose update the server must not see."""

    client: Annotated[str, Text()]
    masked: Annotated[torch.Tensor, _MaskedNumbers()]
    """w_c (θ_c - θ_t) and w_c under a mask, uint8 [d + 1, 6]."""
    nonce: Annotated[str, _Nonce()]
    """Which mask it is."""
    metrics: MetricsByName
    """Registered metrics of the local training."""


@dataclass(frozen=True, kw_only=True)
class MaskedTraining(LocalTraining):
    """Asks for an update after a local training, under a mask."""

    task: ClassVar[str] = "masked_training"
    answer: ClassVar[type[Answer]] = MaskedUpdate

    aggregation: Literal["uniform", "by_examples"] = "uniform"
    """What the client's weight w_c is: 1, or its number of examples over EXAMPLES_PER_WEIGHT."""
    max_update_norm: Annotated[float | None, Optional(Number(0))] = None
    """Longest update that leaves the site."""

    def parameter_bytes(self, num_parameters: int, adapter_bytes: int) -> int:
        """Returns the bytes of the masked numbers."""
        return masking.NUM_BYTES * num_parameters

    def plain(self) -> LocalTraining:
        """Returns the training that the client itself is asked for."""
        values = {each.name: getattr(self, each.name) for each in fields(LocalTraining)}
        return LocalTraining(**values)

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns an update but for its parameters' numbers; see ``parameter_bytes``."""
        update = self.plain().example(client, sizes)
        assert isinstance(update, Update)
        weight = torch.zeros(1, masking.NUM_BYTES, dtype=torch.uint8)
        return MaskedUpdate(client, weight, "0" * 2 * masking.NONCE_BYTES, update.metrics)


@dataclass(frozen=True)
class OpenedMean(Answer):
    """The mean of the clients' adapters."""

    adapter: Annotated[Adapter, Parameters()]
    """θ_t + Σ w_c (θ_c - θ_t) / Σ w_c."""


@dataclass(frozen=True, kw_only=True)
class OpenSum(Request):
    """Asks a client's site to open a sum of masked updates."""

    task: ClassVar[str] = "open_sum"
    answer: ClassVar[type[Answer]] = OpenedMean

    total: Annotated[torch.Tensor, _MaskedNumbers()]
    """The sum, uint8 [d + 1, 6]."""
    nonces: Annotated[list[str], Items(_Nonce(), 1, masking.MAX_MESSAGES)]
    """Of the updates that are in it."""

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns the request's own adapter; see ``Request``."""
        return OpenedMean(self.adapter)


@task(MaskedTraining)
def masked_training(client: Client, request: MaskedTraining) -> MaskedUpdate:
    """Raises ``RuntimeError``: the key is the site's, whose ``SecureEngine`` masks updates."""
    raise RuntimeError(f"{client.name} has no key of its own; ask it through a SecureEngine.")


@task(OpenSum)
def open_sum(client: Client, request: OpenSum) -> OpenedMean:
    """Raises ``RuntimeError``; see ``masked_training``."""
    raise RuntimeError(f"{client.name} has no key of its own; ask it through a SecureEngine.")


def secure_requests(
    training: Mapping[str, Any], *, aggregation: Aggregation, max_update_norm: float | None
) -> dict[type[Request], dict[str, Any]]:
    """Returns the fields of a round's requests, given those of its ``LocalTraining``."""
    return {
        MaskedTraining: {
            **training,
            "aggregation": aggregation,
            "max_update_norm": max_update_norm,
        },
        OpenSum: {"total": DECIDED_BY_SERVER, "nonces": DECIDED_BY_SERVER},
    }


def with_mean(replies: Sequence[Reply], mean: Adapter) -> list[Reply]:
    """Returns replies with the mean in the place of each update, which keeps any mean of them."""
    return [
        replace(reply, content=Update(reply.client, mean, 1, reply.content.metrics))
        for reply in replies
    ]


def masked_update(
    request: MaskedTraining, update: Update, key: masking.Key
) -> tuple[str, torch.Tensor]:
    """Returns the nonce and the masked numbers of a client's update.

    Raises:
        ValueError: It is too large to be added.
    """
    weight = 1.0
    if request.aggregation == "by_examples":
        weight = update.num_examples / EXAMPLES_PER_WEIGHT
    delta = flat(update.adapter, torch.float64) - flat(request.adapter, torch.float64)
    nonce, numbers = masking.masked(np.append(weight * delta.numpy(), weight), key)
    return nonce.hex(), numbers


def opened_mean(request: OpenSum, key: masking.Key) -> Adapter:
    """Returns θ_t + Σ w_c (θ_c - θ_t) / Σ w_c in the adapter's own types.

    Raises:
        ValueError: Under these masks there is no sum of updates.
    """
    nonces = [bytes.fromhex(nonce) for nonce in request.nonces]
    numbers = masking.opened(request.total, nonces, key)
    limit = len(nonces) * masking.LARGEST
    if not 0 < numbers[-1] <= limit or np.abs(numbers).max() > limit:
        raise ValueError(
            f"the sum is not that of these {len(nonces)} updates, or was masked with another key."
        )
    mean = flat(request.adapter, torch.float64) + torch.from_numpy(numbers[:-1] / numbers[-1])
    return unflattened(mean, request.adapter)
