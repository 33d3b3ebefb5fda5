"""Adapters conditioned on a preference: a layer's update is linear in the preference.

ΔW(p) = (α / r) · [B₀ + Σ_{j<M} (M p_j - 1) B_j] · A. At equal shares this is B₀ A, and at any
preference the adapter folds into an ordinary LoRA adapter of the same rank. Each row of a batch has
its own preference, which gates the B_j.

Other preference-conditioned policies are Panacea (arXiv:2402.02030), which conditions the singular
values of an adapter, and PARM (ICML 2025), which conditions a core between its two matrices.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from annotated_types import Interval

from firm.alignment.adapters.lora import Lora, PassRows, adapted_modules
from firm.base.fields import NOT_IN_PAPER, PositiveFloat, configuration
from firm.base.registry import OneOf, Registry

if TYPE_CHECKING:
    import torch

    from firm.base.randomness import RandomStream
    from firm.federation.client import Adapter

PREFERENCE_SAMPLERS: Registry[str, "PreferenceSampler"] = Registry("sampler")
"""Samplers by the value of `policy.conditioning.sampler`."""


@configuration(source=NOT_IN_PAPER)
class ConditioningConfig:
    """Conditioning of the adapter on a preference of the objectives."""

    kind: Literal["none", "preference"] = "none"
    """none trains a single trade-off. preference conditions the adapter on a preference; a prompt's
    replies are sampled and compared at a preference drawn for the prompt."""
    sampler: Annotated[str, OneOf(PREFERENCE_SAMPLERS)] = "dirichlet"
    """Distribution of the preferences, by its registered name
    (`firm.alignment.adapters.preference_sampler`)."""
    concentration: PositiveFloat = 1.0
    """Concentration of the Dirichlet distribution of the preferences: 1 is uniform on the simplex,
    smaller values are closer to its corners."""
    corner_share: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of preferences for a single objective, each objective equally often."""
    draw_per: Literal["prompt", "step"] = "prompt"
    """Scope of a drawn preference: one for each prompt, or one for all prompts of a local step."""

    def condition(self, kind: Lora, num_objectives: int) -> Lora:
        """Returns the kind of adapter, conditioned on a preference if configured."""
        return kind if self.kind == "none" else Conditioned(kind, num_objectives)

    def preferences(self, *arguments: Any, **options: Any) -> "PreferenceStream | None":
        """Returns a client's `PreferenceStream`; None if the policy is not conditioned."""
        return None if self.kind == "none" else PreferenceStream(self, *arguments, **options)


PreferenceSampler = Callable[[ConditioningConfig, int, "torch.Tensor"], "torch.Tensor"]
"""Returns `count` preferences [count, M] from the settings, `count` and corners [K, M].

Preferences are mixtures of the corners, whose rows sum to 1: the identity for the whole simplex, a
single row for a client with a fixed preference. Draws from torch's global generator.
"""

Sampler = TypeVar("Sampler", bound=PreferenceSampler)


def preference_sampler(name: str) -> Callable[[Sampler], Sampler]:
    """Returns a decorator that registers a sampler of preferences under a name.

    Raises:
        ValueError: When the name is taken.
    """
    return PREFERENCE_SAMPLERS.register(name)


@preference_sampler("dirichlet")
def dirichlet(config: ConditioningConfig, count: int, corners: "torch.Tensor") -> "torch.Tensor":
    """Returns mixtures of the corners with Dirichlet weights; some are a single corner."""
    import torch  # here, since settings are read without it

    concentrations = torch.full((len(corners),), config.concentration, dtype=torch.float64)
    shares = torch.distributions.Dirichlet(concentrations).sample((count,))  # [count, K]
    alone = torch.eye(len(corners), dtype=torch.float64)
    alone = alone[torch.randint(len(corners), (count,))]  # one corner per preference, [count, K]
    is_corner = torch.rand(count) < config.corner_share
    return torch.where(is_corner[:, None], alone, shares) @ corners.double()  # [count, M]


class PreferenceStream:
    """Draws the preferences of a client's prompts.

    Args:
        config: Distribution of the preferences.
        stream: Random stream, not used for anything else.
        num_objectives: M.
        corners: Non-negative preferences to mix, scaled to sum 1; by default the single-objective
            preferences, whose mixtures cover the simplex.
    """

    def __init__(
        self,
        config: ConditioningConfig,
        stream: "RandomStream",
        num_objectives: int,
        corners: Sequence[Sequence[float]] | None = None,
    ) -> None:
        import torch

        self._config, self._stream = config, stream
        shares = torch.tensor(corners or torch.eye(num_objectives).tolist(), dtype=torch.float64)
        self._corners = shares / shares.sum(1, keepdim=True)

    def draw(self, count: int) -> "torch.Tensor":
        """Returns the preferences of the next prompts, [count, M], with rows that sum to 1."""
        num_draws = count if self._config.draw_per == "prompt" else 1
        with self._stream:
            sampler = PREFERENCE_SAMPLERS[self._config.sampler]
            drawn = sampler(self._config, num_draws, self._corners)
        return drawn.expand(count, -1).float()

    def state(self) -> dict[str, Any]:
        """Returns a copy of the random stream's state."""
        return self._stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state`."""
        self._stream.restore(state)


def check_estimator(name: str, *, compares: bool) -> None:
    """Raises ``ValueError`` unless the estimator compares several replies to the same prompt.

    Rewards depend on the preference; only a comparison of replies at the same preference removes
    this effect.
    """
    if not compares:
        raise ValueError(
            "policy.conditioning.kind preference needs an estimator that compares replies at the "
            f"same preference, such as critic_free or dpo, got estimator {name}."
        )


def gates(preferences: "torch.Tensor") -> "torch.Tensor":
    """Returns the factors of B_1 to B_{M-1}, M p_j - 1, shape [b, M - 1].

    Args:
        preferences: Rows that sum to 1, shape [b, M].
    """
    return preferences.size(1) * preferences[:, :-1] - 1  # 0 at equal shares


def weighted_by_preference(
    coefficients: "torch.Tensor", own: "torch.Tensor", wanted: "torch.Tensor | None" = None
) -> "torch.Tensor":
    """Returns the coefficients of the replies' gradients in the rows of a Jacobian.

    Args:
        coefficients: Coefficients c_jb of the objectives' gradients, shape [M, b].
        own: The replies' preferences, shape [b, M].
        wanted: Preferences by which to separate the rows, shape [K, M].

    Returns:
        The fixed weights at the replies' own preferences, M p_bj c_jb, whose mean over the
        objectives is Σ_j p_bj c_jb; [M, b]. With `wanted` the rows 1[p_b = p_k] c_jb, [K M, b],
        objective by objective of each preference.
    """
    if wanted is None:
        return coefficients * len(coefficients) * own.T.to(coefficients)
    is_at = (own[None] == wanted[:, None]).all(2)  # [K, b]
    return (is_at[:, None] * coefficients).flatten(0, 1)  # [K M, b]


class Conditioned(Lora):
    """Extends a linear kind of adapter by M - 1 matrices B_j, gated by the preference.

    Args:
        kind: Kind to extend; its B is B₀.
        num_objectives: M.

    Raises:
        ValueError: When there are fewer than two objectives, or the kind is not linear.
    """

    def __init__(self, kind: Lora, num_objectives: int) -> None:
        if num_objectives < 2:
            raise ValueError(
                "policy.conditioning.kind must be none with a single objective, got preference."
            )
        if not kind.is_linear:
            raise ValueError(
                f"policy.conditioning.kind must be none with policy.adapter {kind.name}, whose "
                "update is not linear in a matrix B, got preference."
            )
        super().__init__(kind.settings)
        self.kind = kind
        self.names = [f"lora_B{index}" for index in range(1, num_objectives)]
        """Names of B_1 to B_{M-1} in a layer."""

    def check(self, *, start: Collection[str], **run: Any) -> None:
        """Checks that a run can train this adapter; see `Lora.check`."""
        if start:
            raise ValueError(
                f"start must be empty with policy.conditioning.kind preference, got {list(start)}."
            )
        self.kind.check(start=start, **run)

    def peft_options(self) -> dict[str, Any]:
        """Returns the kind's options; see `Lora.peft_options`."""
        return self.kind.peft_options()

    def prepare_(self, policy: Any) -> None:
        """Adds the B_j, initialised to zero, so that the preference has no effect yet."""
        import torch
        from torch import nn

        self.kind.prepare_(policy)
        for layer in adapted_modules(policy).values():
            zeros = torch.zeros_like(layer.lora_B["default"].weight)  # [out, r] for LoRA
            for name in self.names:
                matrix = nn.Linear(zeros.size(1), zeros.size(0), bias=False, device="meta")
                matrix.weight = nn.Parameter(zeros.clone())
                layer.add_module(name, nn.ModuleDict({"default": matrix}))

    def output(
        self, layer: Any, rows: PassRows, x: "torch.Tensor", result: "torch.Tensor"
    ) -> "torch.Tensor":
        """Returns the kind's output with B(p) instead of B, [b, ..., out]."""
        return self.kind.output(layer, _AtPreferences(rows, self.names), x, result)

    def as_lora(self, policy: Any, adapter: "Adapter") -> "Adapter":
        """Returns the adapter with B₀ and B_j as LoRA matrices, for `fold`."""
        return self.kind.as_lora(policy, adapter)

    def from_lora(self, policy: Any, adapter: "Adapter", problem: str) -> "Adapter":
        """Converts a PEFT file's adapter to the kind's parameters."""
        return self.kind.from_lora(policy, adapter, problem)


class _AtPreferences:
    """Wraps rows to multiply them by B(p) = B₀ + Σ_{j<M} (M p_j - 1) B_j instead of B."""

    def __init__(self, rows: PassRows, names: Sequence[str]) -> None:
        self.preferences, self.members = rows.preferences, rows.members
        self.is_overwritten = rows.is_overwritten
        self.is_base, self.dropped = rows.is_base, rows.dropped
        self._rows, self._names = rows, names

    def product(self, layer: Any, name: str, x: "torch.Tensor") -> "torch.Tensor":
        total = self._rows.product(layer, name, x)
        if name != "lora_B" or self.preferences is None:
            return total
        for gate, further in zip(gates(self.preferences).T, self._names, strict=True):
            gate = gate.to(total).view(-1, *[1] * (total.ndim - 1))  # [b, 1, ...]
            total = total + gate * self._rows.product(layer, further, x)
        return total


def is_conditioned(name: str) -> bool:
    """Returns whether an adapter's parameter is one of the B_j."""
    return "lora_B" in name and not name.endswith(("lora_B.weight", "lora_B.default.weight"))


def fold(adapter: "Adapter", preference: Sequence[float]) -> "Adapter":
    """Folds a conditioned adapter into an ordinary LoRA adapter at a preference.

    Args:
        adapter: Conditioned adapter with B₀ as ``lora_B`` and the B_j as ``lora_B1`` etc.
        preference: Shares of the M objectives, non-negative; scaled to sum 1.

    Raises:
        ValueError: When the preference is invalid or does not have one share per objective, or a
            layer lacks one of its matrices.
    """
    import torch

    shares = torch.tensor(preference, dtype=torch.float64)
    if shares.ndim != 1 or not bool((shares >= 0).all() and 0 < shares.sum() < float("inf")):
        raise ValueError(
            f"a preference must be finite, non-negative and not all zero, got {preference}."
        )
    numbers = {name.split("lora_B")[1].split(".")[0] for name in adapter if is_conditioned(name)}
    if len(numbers) != len(shares) - 1:
        raise ValueError(
            f"the adapter is conditioned on {len(numbers) + 1} objectives, got a preference "
            f"{list(preference)}: provide one share for each."
        )
    weights = gates((shares / shares.sum())[None])[0].tolist()
    folded = {}
    for name, values in adapter.items():
        if is_conditioned(name):
            continue
        total = values.double()  # a sum of M matrices, rounded once
        if "lora_B" in name:
            for index, weight in enumerate(weights, start=1):
                gated = adapter.get(name.replace("lora_B", f"lora_B{index}"))
                if gated is None or gated.shape != values.shape:
                    raise ValueError(
                        f"{name} has no B_{index} of its shape {list(values.shape)}: use the "
                        "conditioned adapter as it was saved."
                    )
                total = total + weight * gated.double()
        folded[name] = total.to(values.dtype)
    return folded
