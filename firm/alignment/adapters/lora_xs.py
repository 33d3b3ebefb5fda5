"""LoRA-XS: r² trained numbers per layer, between fixed matrices made from the layer's own weight.

ΔW = (α / r) · U R Uᵀ W, with U [out, r] the first left singular vectors of the frozen weight W, and
R [r, r] all that is trained and sent. That is arXiv:2405.17604, whose A and B of Wᵀ are (Uᵀ W)ᵀ =
V_r Σ_r and Uᵀ. As U and Uᵀ W are everybody's, the mean of R is the mean of ΔW. The paper draws R
with a deviation of 1e-5; here it is zero at first, as B of LoRA is, so that the policy starts as
the base model.

Below, a layer's A is Uᵀ W and does not change, its B is R, and U follows behind; a PEFT folder has
A and U R, an ordinary LoRA adapter of rank r.
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from firm.federation import Adapter

CACHED_SIZE = 512
"""Matrices of a side from here on take seconds, and are looked up."""


def outward(layer: Any, update: torch.Tensor) -> torch.Tensor:
    """Returns what a layer's B gives, [..., r] with LoRA-XS and [..., out] else, as [..., out]."""
    left = getattr(layer, "xs_left", None)
    return update if left is None else update @ left.T.to(update)


def make_small_(policy: Any) -> None:
    """Turns the fresh adapter that `add_adapter` makes into one of LoRA-XS, which changes nothing.

    Raises:
        ValueError: The rank is larger than a side of an adapted layer.
    """
    layers = {name: m for name, m in policy.named_modules() if isinstance(m, LoraLayer)}
    weights = {name: _weight(layer) for name, layer in layers.items()}
    rank = next(iter(layers.values())).r["default"]
    for name, weight in weights.items():
        if rank > min(weight.shape):
            raise ValueError(
                f"policy.lora.r must be at most {min(weight.shape)} with policy.adapter lora_xs, "
                f"the smaller side of {name.rsplit('.', 1)[-1]}, got {rank}."
            )
    lefts = _left_singular_vectors(weights, rank)
    for name, layer in layers.items():
        own: Any = layer
        left, weight = lefts[name], weights[name]
        first = own.lora_A["default"].weight
        first.requires_grad_(False)
        if not weight.is_meta:
            first.data = (left.T @ weight.double().to(left)).to(first)
        inner = nn.Linear(rank, rank, bias=False, device=first.device, dtype=first.dtype)
        nn.init.zeros_(inner.weight)
        own.lora_B["default"] = inner
        own.frozen_peft_weight_names = {"default": ("lora_A",)}
        own.register_buffer("xs_left", left.to(first), persistent=False)
        own.forward = partial(layer_output, own)


def layer_output(
    layer: Any,
    x: torch.Tensor,
    *args: Any,
    gated: Iterable[tuple[torch.Tensor, nn.Module]] = (),
    **options: Any,
) -> torch.Tensor:
    """Returns what a LoRA layer gives, of either kind.

    Args:
        layer: The layer.
        x: Its input, shape [b, ..., in].
        *args: Further arguments of the base layer.
        gated: Factors by row [b] of further matrices beside B, and these.
        **options: Those of the base layer.
    """
    result = layer.base_layer(x, *args, **options)
    if layer.disable_adapters:
        return result
    first = layer.lora_A["default"]
    hidden = first(layer.lora_dropout["default"](x.to(first.weight.dtype)))
    update = layer.lora_B["default"](hidden)
    for gate, matrix in gated:
        update = update + gate.to(update).view(-1, *[1] * (update.ndim - 1)) * matrix(hidden)
    update = outward(layer, update)
    return (result + update * layer.scaling["default"]).to(result.dtype)


def widened(policy: Any, state: Adapter) -> Adapter:
    """Returns an adapter with U R in place of each R, as a PEFT file has it; names are kept."""
    lefts = _lefts(policy)
    return {
        name: lefts[at].to(values) @ values if (at := _layer_of(name)) in lefts else values
        for name, values in state.items()
    }


def narrowed(policy: Any, adapter: Adapter, problem: str) -> Adapter:
    """Returns a PEFT file's adapter with R in place of each U R.

    Raises:
        ValueError: A matrix is no U R, or A is not Uᵀ W; the message opens with `problem`.
    """
    parts = dict(adapter)
    for at, left in _lefts(policy).items():
        pairs: Adapter = {f"{at}.lora_A.weight": policy.get_submodule(at).lora_A["default"].weight}
        for name in [name for name in adapter if _layer_of(name) == at]:
            if len(adapter[name]) == len(left):
                parts[name] = left.T.to(adapter[name]) @ adapter[name]
                pairs[name] = left.to(adapter[name]) @ parts[name]
        for name, own in pairs.items():  # what is missing or of another shape is found next
            given: torch.Tensor = adapter.get(name, own)
            if given.shape == own.shape and not torch.allclose(given, own.to(given), 1e-3, 1e-4):
                raise ValueError(
                    f"{problem}: {name} is not of the layer's own singular vectors: give an "
                    "adapter that was trained with policy.adapter lora_xs, or use lora."
                )
    return parts


def _lefts(policy: Any) -> dict[str, torch.Tensor]:
    return {
        name: left
        for name, layer in policy.named_modules()
        if (left := getattr(layer, "xs_left", None)) is not None
    }


def _layer_of(name: str) -> str:
    """Returns which layer a matrix B belongs to; nothing for others."""
    return name.partition(".lora_B")[0] if ".lora_B" in name else ""


def _weight(layer: Any) -> torch.Tensor:
    """Returns a layer's frozen weight, [out, in]."""
    base = layer.get_base_layer()
    return base.weight.detach().T if isinstance(base, Conv1D) else base.weight.detach()


def _left_singular_vectors(weights: Adapter, rank: int) -> Adapter:
    """Returns the first left singular vectors [out, r] of each weight, in float64.

    Their signs are fixed by their largest entries, so that all who have the weights agree. Where
    matrices are large they are looked up by the weights' hash, and kept.
    """
    if all(max(weight.shape) < CACHED_SIZE or weight.is_meta for weight in weights.values()):
        return {name: _vectors(weight, rank) for name, weight in weights.items()}
    digest = hashlib.sha256(f"{rank}".encode())
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = home / "firm" / "lora_xs" / f"{digest.hexdigest()[:32]}.safetensors"
    if path.is_file():
        return load_file(path)
    found = {name: _vectors(weight, rank) for name, weight in weights.items()}
    with suppress(OSError, SafetensorError):  # a place that cannot be written costs the time alone
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        save_file({name: values.contiguous() for name, values in found.items()}, draft)
        os.replace(draft, path)
    return found


def _vectors(weight: torch.Tensor, rank: int) -> torch.Tensor:
    if weight.is_meta:
        return torch.empty(len(weight), rank, device="meta", dtype=torch.float64)
    matrix = weight.double()
    vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * largest.sign()
