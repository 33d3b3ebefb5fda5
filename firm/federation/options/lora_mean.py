"""The mean of LoRA's products B·A, instead of separate means of A and B.

mean(B)·mean(A) differs from mean(B·A), which is computed here and truncated to rank r.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from firm.federation.aggregation import Mean, ServerStep, Transform
from firm.federation.client import Adapter
from firm.federation.option import Need, Option
from firm.federation.round_config import RoundConfig

RANK_TOLERANCE = 1e-8
"""Singular values below this share of the largest count as zero; float32 resolves 6e-8."""

NUM_HALVINGS = 100
"""Bisection steps; after about 64 the interval has no floats left between its ends."""

_FACTOR = re.compile(r"(.*\blora_)([AB])((?:\.[^.]+)?\.weight)")
_FURTHER = re.compile(r"(.*\blora_B)(\d+)((?:\.[^.]+)?\.weight)")


_WHY = "lora_mean products averages unmodified products of factors"


class LoraProducts(Option):
    """Averages the products B·A of LoRA layers."""

    key: ClassVar[str] = "lora_mean"
    scope: ClassVar[str] = "mean"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("server_learning_rate", 1.0, _WHY),
        Need("decay", 1.0, _WHY),
        Need("normalize_updates", False, _WHY),
    )

    def check(self, cfg: RoundConfig) -> None:
        """Raises ``ValueError`` on a conflict with other keys of the strategy."""
        super().check(cfg)
        rule = getattr(cfg, "robust").rule  # noqa: B009  # a key of strategies, not of rounds
        if rule not in ("none", "multi_krum"):
            raise ValueError(
                "lora_mean products averages whole adapters; multi_krum is the only robust rule "
                f"that keeps several of them; with robust.rule {rule} set lora_mean to factors."
            )

    def steps(self, steps: Sequence[Transform], cfg: RoundConfig) -> Sequence[Transform]:
        """Returns the steps with the mean taken over products."""
        return [_mean_of_products if isinstance(step, Mean) else step for step in steps]


def _mean_of_products(step: ServerStep) -> ServerStep:
    """Returns the step with θ_{t+1}, the weighted mean of the updates' products."""
    adapters = [update.adapter for update in step.updates]
    return replace(step, adapter=product_mean(adapters, step.weights), learning_rate=1.0)


@dataclass(frozen=True)
class LoraPair:
    """Parameter names of the two factors of a layer."""

    a: str
    """Name of A, shape [r, in]."""
    b: str
    """Name of B, shape [out, r]."""


def lora_pairs(adapter: Adapter) -> list[LoraPair]:
    """Returns the pairs of LoRA factors, identified by PEFT's names, in the order of their A.

    Other parameters, including LoRA factors of embeddings and biases, belong to no pair.

    >>> lora_pairs({"q.lora_A.weight": torch.zeros(1, 3), "q.lora_B.weight": torch.zeros(2, 1)})
    [LoraPair(a='q.lora_A.weight', b='q.lora_B.weight')]

    Raises:
        ValueError: A factor has no partner, or a pair's shapes are not [r, in] and [out, r].
    """
    pairs = []
    for name in adapter:
        if not (parts := _FACTOR.fullmatch(name)):
            continue
        head, letter, tail = parts.groups()
        pair = LoraPair(f"{head}A{tail}", f"{head}B{tail}")
        other = pair.b if letter == "A" else pair.a
        if other not in adapter:
            raise ValueError(
                f"{name!r} has no partner {other!r}, so there is no product to average; single "
                "factors are averaged without error: set lora_mean to factors."
            )
        if letter == "A":
            shape_a, shape_b = adapter[pair.a].shape, adapter[pair.b].shape
            if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1]:
                raise ValueError(
                    f"{pair.a!r} and {pair.b!r} must have shapes [r, in] and [out, r], got "
                    f"{list(shape_a)} and {list(shape_b)}; set lora_mean to factors."
                )
            pairs.append(pair)
    return pairs


def product_mean(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """Returns an adapter with the rank-r approximation of the mean products Σ wᵢ BᵢAᵢ / Σ wᵢ.

    The mean product has rank up to C·r; it is replaced by its best approximation of rank r (Eckart
    and Young, 1936). It depends only on the clients' products, and so is invariant to the basis in
    which clients represent their factors (Bᵢ Q, Q⁻¹ Aᵢ).

    The product determines its factors up to an invertible [r, r] matrix. They are chosen close to
    the plain means Ā and B̄, so that the optimizer moments, which clients keep per coordinate,
    remain meaningful: A is Ā projected onto the product's row space, B follows from it, and
    directions in which one factor would become small and the other large are rescaled
    (``_scales``). Balanced factors are not suitable: early in training B is much smaller than A,
    and balancing would shrink A in the first round.

    A conditioned adapter's further matrices B₁ to B_{M-1} are stacked below its B, so that all
    products with A are averaged together.

    Computes in float64 on the CPU, without forming an [out, in] matrix. Weights, names and shapes
    are as for ``weighted_mean``; parameters outside of pairs are averaged plainly.

    Raises:
        ValueError: There are no pairs, or a factor has no partner.
    """
    if any(_FURTHER.fullmatch(name) for name in adapters[0]):
        return _apart(product_mean([_stack(own) for own in adapters], weights), adapters[0])
    first = adapters[0]
    if not (pairs := lora_pairs(first)):
        raise ValueError(
            "the adapter has no pairs of lora_A and lora_B to average products of; its first "
            f"parameter is {next(iter(first), None)!r}; set lora_mean to factors."
        )
    mean = {}
    for name in first:
        terms = [w * adapter[name].double() for adapter, w in zip(adapters, weights, strict=True)]
        mean[name] = torch.stack(terms).sum(dim=0) / sum(weights)
    for pair in pairs:
        product = mean_product(pair, adapters, weights)
        mean[pair.a], mean[pair.b] = _factors(product, mean[pair.a], mean[pair.b])
    return {name: mean[name].to(parameter.dtype) for name, parameter in first.items()}


def _stack(adapter: Adapter) -> Adapter:
    """Stacks the B of each layer and its further matrices vertically, [M out, r]."""
    stacked = {}
    for name, values in adapter.items():
        parts = _FURTHER.fullmatch(name)
        if parts is None:
            stacked[name] = [values]
        else:
            stacked[f"{parts[1]}{parts[3]}"].append(values)
    return {
        name: torch.cat(values) if len(values) > 1 else values[0]
        for name, values in stacked.items()
    }


def _apart(stacked: Adapter, like: Adapter) -> Adapter:
    """Inverts ``_stack``: splits an adapter into the names and shapes of ``like``."""
    left = dict(stacked)
    apart = {}
    for name, values in like.items():
        parts = _FURTHER.fullmatch(name)
        base = f"{parts[1]}{parts[3]}" if parts else name
        apart[name], left[base] = left[base][: len(values)], left[base][len(values) :]
    return apart


@dataclass(frozen=True)
class Product:
    """left · core · rightᵀ, where left and right have orthonormal columns."""

    left: torch.Tensor  # [out, k]
    core: torch.Tensor  # [k, l], both at most C r
    right: torch.Tensor  # [in, l]


def mean_product(pair: LoraPair, adapters: Sequence[Adapter], weights: Sequence[float]) -> Product:
    """Returns P = [w₁B₁ .. w_C B_C] · [A₁; ..; A_C] of one layer, by QR of both."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    scaled = [s * adapter[pair.b].double() for adapter, s in zip(adapters, shares, strict=True)]
    left, upper = torch.linalg.qr(torch.cat(scaled, dim=1))  # [out, C r]
    stacked = torch.cat([adapter[pair.a].double() for adapter in adapters])  # [C r, in]
    right, lower = torch.linalg.qr(stacked.T)
    return Product(left, upper @ lower.T, right)


def _factors(
    product: Product, mean_a: torch.Tensor, mean_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A [r, in] and B [out, r] of the best rank-r approximation, near the plain means."""
    rank = len(mean_a)
    u, sizes, vh = torch.linalg.svd(product.core, full_matrices=False)
    kept = min(rank, int((sizes > RANK_TOLERANCE * sizes[0]).sum()))
    rows = product.right @ vh[:kept].T  # [in, kept]
    columns = product.left @ (u[:, :kept] * sizes[:kept])  # [out, kept]

    # if the product's rank is below r, A is completed with directions of mean_a, and B with zeros
    rest = torch.linalg.svd(mean_a - (mean_a @ rows) @ rows.T, full_matrices=False).Vh.T
    spare = rest[:, : rank - kept]
    rows = torch.cat([rows, spare], dim=1)
    columns = torch.cat([columns, columns.new_zeros(len(columns), spare.size(1))], dim=1)

    # mean_a in the basis of these rows is X diag(lengths) Yᵀ, which pairs directions of A and B
    x, lengths, yh = torch.linalg.svd(mean_a @ rows, full_matrices=False)
    rows, columns = rows @ yh.T, columns @ yh.T
    scales = _scales(lengths, (mean_b @ x).norm(dim=0), columns.norm(dim=0))
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (x * scales) @ rows.T, (columns * inverse) @ x.T


def _scales(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Returns the s that minimises (s - a)² + (product / s - b)² in each direction.

    It is a root of s⁴ - a s³ + b product s - product², which is non-positive at 0 and non-negative
    at a + √product. If a · b equals the product, it is a.
    """
    low, high = torch.zeros_like(a), a + product.sqrt()
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_below = middle**3 * (middle - a) + product * (b * middle - product) < 0
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return high
