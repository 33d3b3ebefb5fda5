"""LoRA-XS: r² trained parameters per layer, between fixed matrices derived from its weight.

ΔW = (α / r) · U R Uᵀ W, with U [out, r] the first left singular vectors of the frozen weight W.
Only R [r, r] is trained and sent. In the notation of arXiv:2405.17604, for Wᵀ, A and B are (Uᵀ W)ᵀ
= V_r Σ_r and Uᵀ. All clients have the same U and Uᵀ W, so that the mean of R gives the exact mean
of ΔW. The paper initialises R with a standard deviation of 1e-5; here it is initialised to zero,
like B in LoRA, so that the policy starts as the base model.

In the code, a layer's A is Uᵀ W, which is frozen, its B is R, and U is the buffer `xs_left`. PEFT
folders contain A and U R, an ordinary LoRA adapter of rank r.
"""

import hashlib
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from firm.alignment.adapters.lora import (
    Lora,
    PassRows,
    adapted_modules,
    freeze_a_,
    register_adapter,
)
from firm.alignment.tensor_cache import cached_tensors
from firm.federation.client import Adapter

CACHED_SIZE = 512
"""Smallest side of matrices whose singular vectors, which take seconds to compute, are cached."""


@register_adapter
class LoraXS(Lora):
    """LoRA-XS with the rank, scale and layers of `policy.lora`."""

    name: ClassVar[str] = "lora_xs"
    has_factors: ClassVar[bool] = False

    def check(self, **run: Any) -> None:
        """Checks that a run can train this adapter; see `Lora.check`."""
        if self.settings.freeze_a:
            raise ValueError(
                "policy.lora.freeze_a must be false with policy.adapter lora_xs, which trains "
                "neither A nor B, got true."
            )
        super().check(**run)

    def prepare_(self, policy: Any) -> None:
        """Sets A to Uᵀ W and B to R = 0, so that the policy is still the base model.

        Raises:
            ValueError: When the rank exceeds the smaller side of an adapted layer.
        """
        layers = adapted_modules(policy)
        weights = {name: _weight(layer) for name, layer in layers.items()}
        rank = self.settings.r
        for name, weight in weights.items():
            if rank > min(weight.shape):
                raise ValueError(
                    f"policy.lora.r must be at most {min(weight.shape)} with policy.adapter "
                    f"lora_xs, the smaller side of {name.rsplit('.', 1)[-1]}, got {rank}."
                )
        lefts = _left_singular_vectors(weights, rank)  # [out, r] per layer
        for name, layer in layers.items():
            left, weight = lefts[name], weights[name]
            first = layer.lora_A["default"].weight
            if not weight.is_meta:
                first.data = (left.T @ weight.double().to(left)).to(first)
            inner = nn.Linear(rank, rank, bias=False, device=first.device, dtype=first.dtype)
            nn.init.zeros_(inner.weight)  # no effect at the start, as B in LoRA
            layer.lora_B["default"] = inner
            # not persistent, since it can be recomputed from the weight
            layer.register_buffer("xs_left", left.to(first), persistent=False)
        freeze_a_(policy)

    def update(self, layer: Any, rows: PassRows, x: torch.Tensor) -> torch.Tensor:
        """Returns U R A x, [b, ..., out]."""
        inner = super().update(layer, rows, x)  # [b, ..., r]
        return inner @ layer.xs_left.T.to(inner)  # [b, ..., out]

    def as_lora(self, policy: Any, adapter: Adapter) -> Adapter:
        """Returns the adapter with each R replaced by U R; names are kept."""
        lefts = _lefts(policy)
        return {
            name: lefts[at].to(values) @ values if (at := _layer_of(name)) in lefts else values
            for name, values in adapter.items()
        }

    def from_lora(self, policy: Any, adapter: Adapter, problem: str) -> Adapter:
        """Returns the adapter with each U R replaced by R.

        Raises:
            ValueError: When a matrix is not of the form U R, or A is not Uᵀ W; the message starts
                with `problem`.
        """
        parts = dict(adapter)
        for at, left in _lefts(policy).items():
            own_a = policy.get_submodule(at).lora_A["default"].weight
            pairs: Adapter = {f"{at}.lora_A.weight": own_a}
            for name in [name for name in adapter if _layer_of(name) == at]:
                if len(adapter[name]) == len(left):
                    parts[name] = left.T.to(adapter[name]) @ adapter[name]
                    pairs[name] = left.to(adapter[name]) @ parts[name]
            for name, own in pairs.items():
                # missing matrices and wrong shapes are rejected where the file is read
                given: torch.Tensor = adapter.get(name, own)
                if given.shape == own.shape and not torch.allclose(
                    given, own.to(given), 1e-3, 1e-4
                ):
                    raise ValueError(
                        f"{problem}: {name} is not made of the layer's singular vectors: use an "
                        "adapter trained with policy.adapter lora_xs, or set it to lora."
                    )
        return parts


def _lefts(policy: Any) -> dict[str, torch.Tensor]:
    return {
        name: left
        for name, layer in policy.named_modules()
        if (left := getattr(layer, "xs_left", None)) is not None
    }


def _layer_of(name: str) -> str:
    """Returns the layer's name of a matrix B; empty for other parameters."""
    return name.partition(".lora_B")[0] if ".lora_B" in name else ""


def _weight(layer: Any) -> torch.Tensor:
    """Returns a layer's frozen weight, [out, in]."""
    base = layer.get_base_layer()
    return base.weight.detach().T if isinstance(base, Conv1D) else base.weight.detach()


def _left_singular_vectors(weights: Adapter, rank: int) -> Adapter:
    """Returns the leading left singular vectors [out, r] of each weight, in float64.

    The largest entry of each vector is made positive, so that all clients have the same signs.
    Vectors of large matrices are cached in the user's cache folder by a hash of the weights.
    """
    if all(max(weight.shape) < CACHED_SIZE or weight.is_meta for weight in weights.values()):
        return {name: _vectors(weight, rank) for name, weight in weights.items()}
    digest = hashlib.sha256(f"{rank}".encode())
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(weight.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    shapes = {name: (len(weight), min(rank, len(weight))) for name, weight in weights.items()}
    return cached_tensors(
        "lora_xs",
        digest.hexdigest()[:32],
        lambda: {name: _vectors(weight, rank) for name, weight in weights.items()},
        is_sound=lambda found: {name: tuple(own.shape) for name, own in found.items()} == shapes,
    )


def _vectors(weight: torch.Tensor, rank: int) -> torch.Tensor:
    if weight.is_meta:
        return torch.empty(len(weight), rank, device="meta", dtype=torch.float64)
    matrix = weight.double()  # squared below, which halves the digits
    vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -rank:].flip(1)  # ascending
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))  # [1, r]
    return vectors * largest.sign()
