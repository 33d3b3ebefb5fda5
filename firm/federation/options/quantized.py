"""Quantised updates: what a client sends, and how the server reads it (`UploadConfig`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import PlainValidator, ValidationInfo

from firm.base.randomness import derive_seed
from firm.federation.aggregation import flat, unflatten
from firm.federation.client import Client
from firm.federation.messages import Update, sent_form
from firm.federation.option import Train
from firm.federation.options.uploads import UploadConfig
from firm.federation.schema import LARGEST_ENTRY, Invalid, context, invalid, shown
from firm.gradients.messages import message_from_dict, message_to_dict
from firm.gradients.quantization import QuantizingCompressor

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


def quantized_training(cfg: UploadConfig, train: Train) -> Train:
    """Returns the training with its update quantised; the client keeps the rounding error."""

    def train_quantized(client: Client, request: Any) -> Update:
        update = train(client, request)
        trained = request.trained(client.name)
        kept = slice(None) if trained is None else trained
        delta = (flat(update.adapter) - flat(request.adapter))[kept]
        if cfg.rounding == "nearest" and CARRIED in client.carried:
            delta = delta + client.carried[CARRIED]
        compressor = QuantizingCompressor(bits=cfg.bits, rounding=cfg.rounding)
        seed = derive_seed(request.seed, "upload", client.name)
        message = compressor.compress(delta[None], generator=torch.Generator().manual_seed(seed))
        if cfg.rounding == "nearest":
            client.carried[CARRIED] = delta - message.reconstruct()[0]
        return replace(update, adapter=QuantizedUpdate(message_to_dict(message)))

    return train_quantized


def whole_update(update: Update, request: Any) -> Update:
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
    return replace(update, adapter=unflatten(numbers, request.adapter))
