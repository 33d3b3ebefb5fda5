"""Adapters of a rollout as two matrices per layer, in the dtype of the layer's base.

Training needs an adapter's parameters in float32, and a kind's own products. Sampling does not:
every linear kind is an ordinary LoRA adapter (`Lora.as_lora`), which is converted, scaled and cast
once per rollout, and each layer adds it by two products.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from firm.alignment.adapters.conditioned import Conditioned, gates
from firm.alignment.adapters.lora import Lora, PassRows, adapted_modules


class FoldedAdapters:
    """Matrices of C adapters of a policy.

    Args:
        policy: A policy that `folds`.
        kind: Kind of its adapter.
        adapters: Trained parameters of each adapter, by `adapter_parameters`' names; None for
            those in the policy's slot.
    """

    def __init__(
        self, policy: Any, kind: Lora, adapters: Sequence[Mapping[str, torch.Tensor] | None]
    ) -> None:
        self._policy, self._kind = policy, kind
        self._layers = adapted_modules(policy)
        names = kind.names if isinstance(kind, Conditioned) else []
        self._num_shares = len(names) + 1  # M of a conditioned adapter
        self._second_names = ["lora_B", *names]
        self._matrices = {
            layer: (torch.stack(first), torch.stack(second))
            for layer, first, second in self._matrices_of(adapters)
        }
        """A [C, in, r] and the scaled B [C, M r, out] of each layer."""
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None  # preferences, and factors

    def write_(self, adapters: Sequence[Mapping[str, torch.Tensor] | None]) -> None:
        """Overwrites the matrices by those of other adapters."""
        for layer, first, second in self._matrices_of(adapters):
            for place, matrices in zip(self._matrices[layer], (first, second), strict=True):
                torch.stack(matrices, out=place)

    def _matrices_of(self, adapters: Sequence[Mapping[str, torch.Tensor] | None]) -> Any:
        slot = {
            name.replace(".default.", "."): parameter.detach()
            for name, parameter in self._policy.named_parameters()
            if "lora_" in name
        }
        parts = []
        for adapter in adapters:
            own = {name: value.detach() for name, value in (adapter or {}).items()}
            parts.append(self._kind.as_lora(self._policy, {**slot, **own}))
        for name, layer in self._layers.items():
            dtype, device = _weight(layer).dtype, _weight(layer).device
            scale = layer.scaling["default"]
            first = [part[f"{name}.lora_A.weight"].T for part in parts]
            second = [
                scale * torch.cat([part[f"{name}.{own}.weight"] for own in self._second_names], 1).T
                for part in parts
            ]
            yield (
                layer,
                [each.to(device, dtype) for each in first],
                [each.to(device, dtype) for each in second],
            )

    def output(
        self, layer: Any, rows: PassRows, x: torch.Tensor, result: torch.Tensor
    ) -> torch.Tensor:
        """Returns a layer's output [N, ..., out] from its input and the base layer's output."""
        first, second = self._matrices[layer]
        inputs = x.to(first.dtype).flatten(1, -2)  # some attention has layers on [N, 1, L, in]
        members = rows.members
        if members is not None:
            members = members.to(first.device)
            first, second = first[members], second[members]
        else:
            inputs = inputs.reshape(len(first), -1, inputs.size(-1))
        hidden = torch.bmm(inputs, first)
        shares = self._shares(rows, hidden)
        if shares is not None:  # [N, 1, M] and [N, L, r], to [N, L, M r]
            each = hidden.view(len(shares), -1, 1, hidden.size(-1))
            hidden = (shares[:, None, :, None] * each).view(*hidden.shape[:2], -1)
        elif self._num_shares > 1:
            second = second[:, : hidden.size(-1)]  # equal shares: B_0 alone
        outputs = result.reshape(*hidden.shape[:2], -1).to(first.dtype)
        return torch.baddbmm(outputs, hidden, second).view(result.shape).to(result.dtype)

    def _shares(self, rows: PassRows, like: torch.Tensor) -> torch.Tensor | None:
        """Returns the factors of B_0 to B_{M-1}, [N, M]; computed once for the same preferences."""
        preferences = rows.preferences
        if preferences is None or self._num_shares == 1:
            return None
        if rows.is_overwritten:
            return self._factors(preferences).to(like)
        if self._latest is None or self._latest[0] is not preferences:
            self._latest = preferences, self._factors(preferences).to(like)
        return self._latest[1].to(like.device)

    @staticmethod
    def _factors(preferences: torch.Tensor) -> torch.Tensor:
        ones = preferences.new_ones(len(preferences), 1)
        return torch.cat([ones, gates(preferences)], 1)


def folds(policy: Any, kind: Lora) -> bool:
    """Returns whether all adapters of a policy are ordinary LoRA adapters, by `Lora.as_lora`."""
    layers = adapted_modules(policy)
    return (
        bool(layers)
        and kind.is_linear
        and all(
            type(_weight(layer).data) is torch.Tensor  # no shard
            and _weight(layer).is_floating_point()
            and not layer.merged
            and not layer.lora_variant
            and layer.active_adapters == ["default"]
            for layer in layers.values()
        )
    )


def _weight(layer: Any) -> torch.Tensor:
    return layer.get_base_layer().weight
