"""Quantised uploads: a client's update in a few bits per number.

What a client sends is Q(θ_c - θ_t), from which the server has θ_t + Q(θ_c - θ_t). Rounded to the
nearest level, what rounding took is kept and added to the client's next update: error feedback, by
which the updates that arrived and those that were meant differ by one rounding error however many
rounds there are (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). Rounded at random,
every update is right in the mean by itself (QSGD, Alistarh et al. 2017, arXiv:1610.02132).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval

from firm.federation.aggregation import flat
from firm.federation.client import Adapter, Client
from firm.federation.randomness import derive_seed
from firm.federation.schema import Invalid, Parameters, Reading, shown
from firm.fields import NOT_IN_PAPER, configuration
from firm.gradients import QuantizingCompressor, message_from_dict, message_to_dict
from firm.gradients.compression import FLOAT_BYTES
from firm.gradients.quantization import MAX_BITS


@configuration(source=NOT_IN_PAPER)
class UploadConfig:
    """How many bits clients' updates are sent in."""

    bits: Annotated[int, Interval(ge=2, le=MAX_BITS)] = 8
    """Bits of each number of an update; a scale of 4 bytes for every 128 of them comes on top."""
    rounding: Literal["nearest", "random"] = "nearest"
    """nearest has the smallest error, which a client keeps and adds to its next update; random is
    right in the mean, and nothing is kept."""

    def num_bytes(self, num_parameters: int) -> int:
        """Returns the bytes of so many numbers and their scales."""
        num_scales = -(-num_parameters // QuantizingCompressor.bucket)
        return -(-num_parameters * self.bits // 8) + FLOAT_BYTES * num_scales


@dataclass(frozen=True)
class QuantizedUpdate:
    """θ_c - θ_t in a few bits per number, as it travels in the place of θ_c."""

    quantized: dict[str, Any]
    """The numbers one after the other, as a Jacobian of one row (``message_to_dict``)."""

    def applied(self, start: Adapter) -> Adapter:
        """Returns θ_t + Q(θ_c - θ_t), in the types of θ_t."""
        delta = message_from_dict(self.quantized).reconstruct()[0].double()
        parts = delta.split([parameter.numel() for parameter in start.values()])
        return {
            name: (parameter.double() + part.view(parameter.shape)).to(parameter.dtype)
            for (name, parameter), part in zip(start.items(), parts, strict=True)
        }


@dataclass(frozen=True)
class SentParameters:
    """θ_c with the names, shapes and types of θ_t, or an update that is quantised."""

    def read(self, value: Any, path: str, reading: Reading) -> Adapter | QuantizedUpdate:
        """Returns the adapter, or the update."""
        if isinstance(value, QuantizedUpdate):
            value = vars(value)
        if not isinstance(value, Mapping) or set(value) != {"quantized"}:
            return Parameters().read(value, path, reading)
        content = value["quantized"]
        size = sum(parameter.numel() for parameter in reading.adapter.values())
        if not isinstance(content, Mapping) or content.get("kind") != "quantizing":
            raise Invalid(f"{path} must be a quantised update, got {shown(content)}")
        try:
            shape = message_from_dict(dict(content)).shape
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise Invalid(f"{path} cannot be read: {shown(str(error))}") from error
        if shape != (1, size):
            raise Invalid(f"{path} must be of {size} numbers, got {shown(shape)}")
        return QuantizedUpdate(dict(content))


def quantized(
    client: Client, adapter: Adapter, start: Adapter, cfg: UploadConfig, round: int
) -> QuantizedUpdate:
    """Returns a client's update as it is sent, and has the client keep what rounding took of it."""
    delta = flat(adapter) - flat(start)
    if cfg.rounding == "nearest" and client.upload_error is not None:
        delta = delta + client.upload_error
    compressor = QuantizingCompressor(bits=cfg.bits, rounding=cfg.rounding)
    generator = torch.Generator().manual_seed(derive_seed(0, "upload", client.name, round))
    message = compressor.compress(delta[None], generator=generator)
    if cfg.rounding == "nearest":
        client.upload_error = delta - message.reconstruct()[0]
    return QuantizedUpdate(message_to_dict(message))
