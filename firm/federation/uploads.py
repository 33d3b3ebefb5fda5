"""Smaller uploads: a client's update in a few bits per number, or of a few ranks.

With ``UploadConfig`` a client sends Q(θ_c - θ_t), from which the server has θ_t + Q(θ_c - θ_t).
Rounded to the nearest level, what rounding took is kept and added to the client's next update:
error feedback, by which the updates that arrived and those that were meant differ by one rounding
error however many rounds there are (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847).
Rounded at random, every update is right in the mean by itself (QSGD, Alistarh et al. 2017,
arXiv:1610.02132). A client that trains the first ranks of each LoRA layer alone sends these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval

from firm.federation.aggregation import flat, unflattened
from firm.federation.client import Adapter, Client
from firm.federation.randomness import derive_seed
from firm.federation.schema import LARGEST_ENTRY, Invalid, Parameters, Reading, shown
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
class PartialUpdate:
    """Those numbers of θ_c that a client trains, as they travel in its place."""

    partial: torch.Tensor
    """The numbers one after the other, [k]."""


@dataclass(frozen=True)
class QuantizedUpdate:
    """θ_c - θ_t in a few bits per number, as it travels in the place of θ_c."""

    quantized: dict[str, Any]
    """The numbers that the client trains, as a Jacobian of one row (``message_to_dict``)."""


@dataclass(frozen=True)
class SentParameters:
    """θ_c with the names, shapes and types of θ_t, or what travels in its place."""

    def read(
        self, value: Any, path: str, reading: Reading
    ) -> Adapter | PartialUpdate | QuantizedUpdate:
        """Returns the adapter, or the update."""
        if isinstance(value, PartialUpdate | QuantizedUpdate):
            value = vars(value)
        size = sum(parameter.numel() for parameter in reading.adapter.values())
        match value:
            case {"partial": numbers, **others} if not others:
                return PartialUpdate(_checked_numbers(numbers, path, size))
            case {"quantized": content, **others} if not others:
                return QuantizedUpdate(_checked_message(content, path, size))
        return Parameters().read(value, path, reading)


def _checked_numbers(numbers: Any, path: str, size: int) -> torch.Tensor:
    is_tensor = isinstance(numbers, torch.Tensor) and numbers.layout == torch.strided
    if not is_tensor or not numbers.is_floating_point() or numbers.ndim != 1:
        raise Invalid(f"{path} must be a vector of floats, got {shown(numbers)}")
    if numbers.numel() > size:
        raise Invalid(f"{path} must be of at most {size} numbers, got {numbers.numel()}")
    if not (numbers.abs() <= LARGEST_ENTRY).all():  # NaN is not, either
        raise Invalid(f"{path} is not finite")
    return numbers


def _checked_message(content: Any, path: str, size: int) -> dict[str, Any]:
    if not isinstance(content, Mapping) or content.get("kind") != "quantizing":
        raise Invalid(f"{path} must be a quantised update, got {shown(content)}")
    try:
        count, num_columns = message_from_dict(dict(content)).shape
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise Invalid(f"{path} cannot be read: {shown(str(error))}") from error
    if count != 1 or num_columns > size:
        raise Invalid(f"{path} must be of at most {size} numbers, got {count} x {num_columns}")
    return dict(content)


def sent(
    client: Client,
    adapter: Adapter,
    start: Adapter,
    *,
    cfg: UploadConfig | None,
    trained: torch.Tensor | None,
    round: int,
) -> Adapter | PartialUpdate | QuantizedUpdate:
    """Returns a client's update as it is sent; the client keeps what rounding to nearest took.

    Args:
        client: The client.
        adapter: θ_c.
        start: θ_t.
        cfg: How numbers are rounded, if at all.
        trained: Which of the parameters the client trains, bool [d]; None: all.
        round: The round.
    """
    kept = slice(None) if trained is None else trained
    if cfg is None:
        if trained is None:
            return adapter
        return PartialUpdate(flat(adapter, None)[kept])
    delta = (flat(adapter) - flat(start))[kept]
    if cfg.rounding == "nearest" and client.upload_error is not None:
        delta = delta + client.upload_error
    compressor = QuantizingCompressor(bits=cfg.bits, rounding=cfg.rounding)
    generator = torch.Generator().manual_seed(derive_seed(0, "upload", client.name, round))
    message = compressor.compress(delta[None], generator=generator)
    if cfg.rounding == "nearest":
        client.upload_error = delta - message.reconstruct()[0]
    return QuantizedUpdate(message_to_dict(message))


def received(
    content: Adapter | PartialUpdate | QuantizedUpdate,
    start: Adapter,
    *,
    cfg: UploadConfig | None,
    trained: torch.Tensor | None,
) -> Adapter:
    """Returns θ_c, or θ_t + Q(θ_c - θ_t), of what ``sent`` gave; the arguments are its.

    Raises:
        Invalid: It was sent in another way.
    """
    wanted = QuantizedUpdate if cfg else dict if trained is None else PartialUpdate
    if not isinstance(content, wanted):
        raise Invalid(f"its update must come as {_NAMES[wanted]}, got {_NAMES[type(content)]}")
    if isinstance(content, dict):
        return content
    numbers = flat(start, None).clone()
    size = numbers.numel() if trained is None else int(trained.sum())
    kept = slice(None) if trained is None else trained
    if isinstance(content, PartialUpdate):
        if content.partial.shape != (size,) or content.partial.dtype != numbers.dtype:
            raise Invalid(f"its update must be {size} numbers, got {shown(content.partial)}")
        numbers[kept] = content.partial
    else:
        message = message_from_dict(content.quantized)
        if message.shape != (1, size):
            raise Invalid(f"its update must be {size} numbers, got {message.shape[1]}")
        delta = message.reconstruct()[0].double()
        numbers[kept] = (numbers[kept].double() + delta).to(numbers.dtype)
        if not (numbers.abs() <= LARGEST_ENTRY).all():  # NaN is not, either
            raise Invalid(f"its update leads to entries beyond {LARGEST_ENTRY:g}")
    return unflattened(numbers, start)


_NAMES = {dict: "an adapter", PartialUpdate: "some of its ranks", QuantizedUpdate: "quantised"}
