"""Quantised uploads: updates with a few bits per parameter.

A client sends Q(θ_c - θ_t), and the server reconstructs θ_t + Q(θ_c - θ_t). With rounding to the
nearest level, the client keeps the rounding error and adds it to its next update. With this error
feedback, the sums of sent and of true updates differ by a single rounding error after any number
of rounds (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). With stochastic rounding,
every update is unbiased by itself (QSGD, Alistarh et al. 2017, arXiv:1610.02132).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Interval
from pydantic import PlainValidator, ValidationInfo

from firm.base.fields import NOT_IN_PAPER, configuration
from firm.base.randomness import derive_seed
from firm.federation.aggregation import flat, unflattened
from firm.federation.client import Client
from firm.federation.messages import DECIDED_BY_SERVER, Update, sent_form
from firm.federation.option import Option, Requests, Train, option
from firm.federation.round_config import RoundConfig
from firm.federation.schema import LARGEST_ENTRY, Invalid, context, invalid, shown
from firm.federation.training import LocalTraining
from firm.gradients.compression import FLOAT_BYTES
from firm.gradients.messages import message_from_dict, message_to_dict
from firm.gradients.quantization import MAX_BITS, QuantizingCompressor

CARRIED = "upload_error"
"""Name in ``Client.carried`` of the last update's rounding error, [d]."""


def _message(value: Any, info: ValidationInfo) -> dict[str, Any]:
    if not isinstance(value, Mapping) or value.get("kind") != "quantizing":
        raise invalid("a quantised update", value)
    try:
        count, num_columns = message_from_dict(dict(value)).shape
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise Invalid(f" cannot be read: {shown(str(error))}") from error
    size = context(info).num_parameters
    if count != 1 or num_columns > size:
        raise Invalid(f" must be of at most {size} numbers, got {count} x {num_columns}")
    return dict(value)


QuantizedMessage = Annotated[dict[str, Any], PlainValidator(_message)]
"""A quantised update in the form of ``message_to_dict``."""


@sent_form
@dataclass(frozen=True)
class QuantizedUpdate:
    """Quantised θ_c - θ_t, which is sent instead of θ_c."""

    quantized: QuantizedMessage
    """The deltas of the parameters that the client trains, as a Jacobian with one row
    (``message_to_dict``)."""


@option
@configuration(source=NOT_IN_PAPER)
class UploadConfig(Option):
    """Quantised uploads of the clients' updates."""

    key: ClassVar[str] = "upload"
    travels: ClassVar[bool] = True

    bits: Annotated[int, Interval(ge=2, le=MAX_BITS)] = 8
    """Bits per value of an update; each 128 values also take a scale of 4 bytes."""
    rounding: Literal["nearest", "random"] = "nearest"
    """nearest has the smallest error, which the client adds to its next update (error feedback);
    random is unbiased, without error feedback."""

    def num_bytes(self, num_parameters: int) -> int:
        """Returns the size in bytes of the quantised parameters and their scales."""
        num_scales = -(-num_parameters // QuantizingCompressor.bucket)
        return -(-num_parameters * self.bits // 8) + FLOAT_BYTES * num_scales

    def wrap(self, train: Train) -> Train:
        """Returns the training with its update quantised; the client keeps the rounding error."""

        def quantized_training(client: Client, request: Any) -> Update:
            update = train(client, request)
            trained = request.trained(client.name)
            kept = slice(None) if trained is None else trained
            delta = (flat(update.adapter) - flat(request.adapter))[kept]
            if self.rounding == "nearest" and CARRIED in client.carried:
                delta = delta + client.carried[CARRIED]
            compressor = QuantizingCompressor(bits=self.bits, rounding=self.rounding)
            seed = derive_seed(request.seed, "upload", client.name)
            message = compressor.compress(
                delta[None], generator=torch.Generator().manual_seed(seed)
            )
            if self.rounding == "nearest":
                client.carried[CARRIED] = delta - message.reconstruct()[0]
            return replace(update, adapter=QuantizedUpdate(message_to_dict(message)))

        return quantized_training

    def requests(self, requests: Requests, cfg: RoundConfig) -> Requests:
        """Returns the requests, with a seed in those of a training whose update is drawn."""
        if self.rounding == "nearest":
            return requests
        seeded = {**requests[LocalTraining], "seed": DECIDED_BY_SERVER}
        return {**requests, LocalTraining: seeded}

    def received(self, update: Update, request: Any) -> Update:
        """Returns the update with θ_t + Q(θ_c - θ_t); untrained parameters equal θ_t's.

        Raises:
            Invalid: The update is not quantised, has the wrong size, or leads to huge entries.
        """
        content = update.adapter
        if not isinstance(content, QuantizedUpdate):
            raise Invalid(f"its update must be quantised, got {type(content).__name__}")
        trained = request.trained(update.client)
        numbers = flat(request.adapter, None).clone()
        size = numbers.numel() if trained is None else int(trained.sum())
        kept = slice(None) if trained is None else trained
        message = message_from_dict(content.quantized)
        if message.shape != (1, size):
            raise Invalid(f"its update must be {size} numbers, got {message.shape[1]}")
        delta = message.reconstruct()[0].double()
        numbers[kept] = (numbers[kept].double() + delta).to(numbers.dtype)
        if not (numbers.abs() <= LARGEST_ENTRY).all():  # also catches NaN
            raise Invalid(f"its update leads to entries beyond {LARGEST_ENTRY:g}")
        return replace(update, adapter=unflattened(numbers, request.adapter))
