"""One adapter for all preferences: what a LoRA layer adds is linear in the preference.

ΔW(p) = (α / r) · [B₀ + Σ_{j<M} (M p_j - 1) B_j] · A. At equal shares it is B₀ A, and any preference
folds into an ordinary LoRA adapter of the same rank. Each row of a batch carries a preference of
its own, by which the layer gates the B_j.

Policies conditioned on a preference are Panacea's (arXiv:2402.02030), through the singular values
of an adapter, and PARM's (ICML 2025), through a core between its two matrices.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from peft.tuners.lora import LoraLayer
from torch import nn

from firm.alignment.adapters.lora_xs import layer_output
from firm.federation import Adapter
from firm.fields import NOT_IN_PAPER, PositiveFloat, configuration


@configuration(source=NOT_IN_PAPER)
class ConditioningConfig:
    """Whether one adapter holds one trade-off, or all of them."""

    kind: Literal["none", "preference"] = "none"
    """none: one trade-off. preference: the adapter depends on the preference, and each prompt's
    replies are sampled, and compared, at a preference that is drawn for it."""
    concentration: PositiveFloat = 1.0
    """Of the Dirichlet distribution that preferences are drawn from: 1 is uniform on the simplex,
    less is nearer to its corners."""
    corner_share: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of the draws that ask for one objective alone, each as often as the others."""
    draw_per: Literal["prompt", "step"] = "prompt"
    """Whether each prompt has a preference of its own, or all prompts of a local step have one."""


def check_estimator(config: ConditioningConfig, name: str, *, replies_per_prompt: int) -> None:
    """Raises ``ValueError`` where a conditioned policy's replies would not be compared in groups.

    Rewards at different preferences differ by the preference, which no common mean takes off.
    """
    if config.kind == "preference" and replies_per_prompt < 2:
        raise ValueError(
            "policy.conditioning.kind preference needs an estimator that compares replies at the "
            f"same preference, such as critic_free, got estimator {name}."
        )


def draw_preferences(config: ConditioningConfig, count: int, corners: torch.Tensor) -> torch.Tensor:
    """Returns preferences between some corners, shape [count, M], by the global generator.

    Args:
        config: How their shares are drawn.
        count: How many.
        corners: Preferences that the others lie between, rows of sum 1, shape [K, M]: the identity
            for the whole simplex, a single one for a client with one preference.
    """
    num_draws = count if config.draw_per == "prompt" else 1
    concentrations = torch.full((len(corners),), config.concentration, dtype=torch.float64)
    shares = torch.distributions.Dirichlet(concentrations).sample((num_draws,))
    alone = torch.eye(len(corners), dtype=torch.float64)
    alone = alone[torch.randint(len(corners), (num_draws,))]
    is_corner = torch.rand(num_draws) < config.corner_share
    drawn = torch.where(is_corner[:, None], alone, shares) @ corners.double()
    return drawn.expand(count, -1).float()


def gates(preferences: torch.Tensor) -> torch.Tensor:
    """Returns by what B_1 to B_{M-1} are multiplied, M p_j - 1, shape [b, M - 1].

    Args:
        preferences: Rows of sum 1, shape [b, M].
    """
    return preferences.size(1) * preferences[:, :-1] - 1


def weighted_by_preference(
    coefficients: torch.Tensor, own: torch.Tensor | None, wanted: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns by what each reply's gradient counts in the rows of a Jacobian.

    Args:
        coefficients: Of the objectives' gradients, c_jb, shape [M, b].
        own: The replies' preferences, shape [b, M]; None where they have none.
        wanted: Preferences to take the rows apart by, shape [K, M].

    Returns:
        Without preferences the coefficients. With the replies' own the fixed weights at them, M
        p_bj c_jb, whose mean over the objectives is Σ_j p_bj c_jb; [M, b]. With `wanted` the rows
        1[p_b = p_k] c_jb, [K M, b], objective by objective of each preference.
    """
    if own is None:
        return coefficients
    if wanted is None:
        return coefficients * len(coefficients) * own.T.to(coefficients)
    is_at = (own[None] == wanted[:, None]).all(2)  # [K, b]
    return (is_at[:, None] * coefficients).flatten(0, 1)


class Conditioning:
    """The preferences of the rows that are in a conditioned policy."""

    def __init__(self, num_objectives: int) -> None:
        self.num_objectives = num_objectives
        self.gates: torch.Tensor | None = None
        """Of the rows of the next passes, [b, M - 1]; None is equal shares for all."""

    def layer(self, layer: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Returns what a LoRA layer gives for x [b, ..., in]."""
        names = gated_names(self.num_objectives)
        matrices = (getattr(layer, name)["default"] for name in names)
        gated = () if self.gates is None else zip(self.gates.T, matrices, strict=True)
        return layer_output(layer, x, *args, gated=gated, **options)


def gated_names(num_objectives: int) -> list[str]:
    """Returns what the matrices B_1 to B_{M-1} of a layer are called."""
    return [f"lora_B{index}" for index in range(1, num_objectives)]


def condition_(policy: Any, num_objectives: int) -> None:
    """Gives every LoRA layer of a policy M - 1 further matrices B_j, which are zero.

    The adapter is the one that `add_adapter` makes. Without preferences the policy goes on as if it
    were not conditioned.

    Raises:
        ValueError: There are fewer than two objectives.
    """
    if num_objectives < 2:
        raise ValueError(
            "policy.conditioning.kind must be none with a single objective, got preference: there "
            "is nothing to trade off."
        )
    policy.conditioning = conditioning = Conditioning(num_objectives)
    for layer in [module for module in policy.modules() if isinstance(module, LoraLayer)]:
        own: Any = layer
        zeros = torch.zeros_like(own.lora_B["default"].weight)
        for name in gated_names(num_objectives):
            matrix = nn.Linear(zeros.size(1), zeros.size(0), bias=False, device="meta")
            matrix.weight = nn.Parameter(zeros.clone())
            own.add_module(name, nn.ModuleDict({"default": matrix}))
        own.forward = partial(conditioning.layer, own)


def set_preferences(model: Any, preferences: torch.Tensor | None) -> None:
    """Has the next passes of a policy read rows of these preferences [b, M]; None: equal shares.

    They stay until others are set, also for a backward pass that computes activations anew. A model
    that is not conditioned takes none.
    """
    conditioning = getattr(model, "conditioning", None)
    if conditioning is not None:
        conditioning.gates = None if preferences is None else gates(preferences)


def is_conditioned(name: str) -> bool:
    """Returns whether a parameter of an adapter is one of the B_j."""
    return "lora_B" in name and not name.endswith(("lora_B.weight", "lora_B.default.weight"))


def fold(adapter: Adapter, preference: Sequence[float]) -> Adapter:
    """Returns the ordinary LoRA adapter of a conditioned one at a preference.

    Args:
        adapter: With B₀ as ``lora_B`` and the B_j as ``lora_B1`` and so on.
        preference: Shares of the M objectives, not negative; scaled to sum 1.

    Raises:
        ValueError: The preference is no such vector, or has not one share per objective, or a layer
            lacks some of its matrices.
    """
    shares = torch.tensor(preference, dtype=torch.float64)
    if shares.ndim != 1 or not bool((shares >= 0).all() and 0 < shares.sum() < float("inf")):
        raise ValueError(
            f"a preference must be finite shares, not negative and not all zero, got {preference}."
        )
    numbers = {name.split("lora_B")[1].split(".")[0] for name in adapter if is_conditioned(name)}
    if len(numbers) != len(shares) - 1:
        raise ValueError(
            f"the adapter is conditioned on {len(numbers) + 1} objectives, got a preference "
            f"{list(preference)}: give one share for each."
        )
    weights = gates((shares / shares.sum())[None])[0].tolist()
    folded = {}
    for name, values in adapter.items():
        if is_conditioned(name):
            continue
        total = values.double()
        if "lora_B" in name:
            for index, weight in enumerate(weights, start=1):
                gated = adapter.get(name.replace("lora_B", f"lora_B{index}"))
                if gated is None or gated.shape != values.shape:
                    raise ValueError(
                        f"{name} has no B_{index} of its shape {list(values.shape)}: give the "
                        "conditioned adapter as it was saved."
                    )
                total = total + weight * gated.double()
        folded[name] = total.to(values.dtype)
    return folded
