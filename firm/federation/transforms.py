"""The server's step from a round's updates: transformations that are composed, as in optax.

Some change which updates count and for how much, one takes their mean, others change the mean. Each
checks for itself what it can follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Protocol

import torch

from firm.federation.accounting import spend
from firm.federation.aggregation import (
    Aggregation,
    by_client,
    mean_where_trained,
    server_step,
    shares,
    update_lengths,
)
from firm.federation.client import Adapter, State
from firm.federation.lora import LoraMean
from firm.federation.messages import Update
from firm.federation.privacy import PrivacyConfig, server_noised
from firm.federation.robust import RobustConfig, robust_updates
from firm.federation.secure import Secure


@dataclass(frozen=True)
class ServerStep:
    """A server's step under way, from a round's accepted updates to θ_{t+1}."""

    start: Adapter
    """θ_t."""
    updates: Sequence[Update]
    """The updates that count; at least one."""
    round: int
    """The round, from 1."""
    sampled: Sequence[str]
    """Names of all clients that were asked."""
    num_clients: int
    """Clients in all, C."""
    num_refused: int
    """Clients whose answers were refused."""
    memory: State
    """The strategy's memory from round to round."""
    trained: Sequence[torch.Tensor | None] = ()
    """Which of the parameters each update's client trains, bool [d]; None: all."""
    weights: Sequence[float] = ()
    """Weight of each update, not scaled."""
    lengths: Sequence[float] | None = None
    """Divisor of each update; None leaves them as they are."""
    adapter: Adapter = field(default_factory=dict)
    """θ_{t+1}, once there is a mean."""
    learning_rate: float = 1.0
    """η that the step was taken with."""
    entries: State = field(default_factory=dict)
    """Entries of the round's row, JSON-able."""
    hidden: tuple[str, ...] = ()
    """Entries of the round's row that must not be logged."""


class Transform(Protocol):
    """One transformation of a server's step."""

    def check(self, before: Sequence["Transform"]) -> None:
        """Raises ``ValueError`` where it cannot follow one of those before it; names the keys."""
        ...

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the transformation applied."""
        ...


def chain(*transforms: Transform) -> Callable[[ServerStep], ServerStep]:
    """Returns the composition of transformations, from left to right, each of which may refuse."""
    for place, transform in enumerate(transforms):
        transform.check(transforms[:place])
    return lambda step: reduce(lambda so_far, transform: transform(so_far), transforms, step)


@dataclass(frozen=True)
class Robust:
    """Replaces the updates by what a robust rule makes of them; see ``robust_updates``."""

    cfg: RobustConfig

    def check(self, before: Sequence[Transform]) -> None:
        """Follows anything."""

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the updates that the rule gives, and the row's "robust"."""
        updates, entries = robust_updates(
            step.start, step.updates, self.cfg, num_refused=step.num_refused
        )
        return replace(step, updates=updates, entries={**step.entries, **entries})


@dataclass(frozen=True)
class UnitLengths:
    """Divides every update by its length; a zero update has no direction and stays zero."""

    def check(self, before: Sequence[Transform]) -> None:
        """Follows no robust rule."""
        if rule := _robust_rule(before):
            raise ValueError(
                "normalize_updates must be false with a robust rule, which sees to the updates' "
                f"lengths itself, got robust.rule {rule}; rule normalization has all at their "
                "median length."
            )

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the lengths, and the row's "zero_updates" where there are any."""
        lengths = update_lengths(step.start, step.updates)
        entries = {**step.entries, **zero_updates(step.updates, lengths)}
        return replace(step, lengths=lengths, entries=entries)


@dataclass(frozen=True)
class Count:
    """Says what each update counts for: the same, or its client's number of examples."""

    by: Aggregation

    def check(self, before: Sequence[Transform]) -> None:
        """Follows a robust rule only where all count alike."""
        if (rule := _robust_rule(before)) and self.by != "uniform":
            raise ValueError(
                "a robust rule counts all alike, since clients report their own number of "
                f"examples; aggregation must be uniform with robust.rule {rule}, got {self.by}."
            )

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the updates' weights."""
        return replace(step, weights=shares(step.updates, by=self.by))


@dataclass(frozen=True)
class Mean:
    """Takes the weighted mean of the updates; see ``server_step``."""

    of: LoraMean = "factors"
    """The part of a LoRA layer that is averaged."""
    learning_rate: float = 1.0
    """η, inside the sum."""

    def check(self, before: Sequence[Transform]) -> None:
        """Takes products of whole adapters alone, at their own lengths and with η = 1."""
        rule = _robust_rule(before)
        if self.of == "products" and rule not in (None, "multi_krum"):
            raise ValueError(
                "lora_mean products takes whole adapters, which of the robust rules only "
                f"multi_krum leaves several of; set lora_mean to factors with robust.rule {rule}."
            )
        if self.of == "products" and any(isinstance(each, UnitLengths) for each in before):
            raise ValueError(
                "lora_mean products is for the mean itself; normalize_updates must be false."
            )
        _check_rate_of_products(self.of, self.learning_rate)

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with θ_{t+1}."""
        adapters = [update.adapter for update in step.updates]
        if any(mask is not None for mask in step.trained):
            rate = self.learning_rate
            adapter = mean_where_trained(
                step.start, adapters, step.weights, step.trained, learning_rate=rate
            )
            return replace(step, adapter=adapter, learning_rate=rate)
        adapter = server_step(
            step.start,
            adapters,
            step.weights,
            learning_rate=self.learning_rate,
            lengths=step.lengths,
            lora_mean=self.of,
        )
        return replace(step, adapter=adapter, learning_rate=self.learning_rate)


@dataclass(frozen=True)
class Rate:
    """Steps from θ_t towards the mean by a server learning rate η: θ_t + η (θ̄ - θ_t)."""

    learning_rate: float

    def check(self, before: Sequence[Transform]) -> None:
        """Follows a mean of products only with η = 1."""
        for mean in (each for each in before if isinstance(each, Mean)):
            _check_rate_of_products(mean.of, self.learning_rate)

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with θ_{t+1} moved."""
        rate = self.learning_rate
        adapter = server_step(step.start, [step.adapter], [1.0], learning_rate=rate)
        return replace(step, adapter=adapter, learning_rate=rate)


@dataclass(frozen=True)
class Privacy:
    """Adds the server's noise to the mean, where it adds any, and accounts for ε."""

    cfg: PrivacyConfig | None
    """The limits; None leaves the step as it is."""
    has_regulars: bool
    """Whether some clients take part in every round, unsampled."""

    def check(self, before: Sequence[Transform]) -> None:
        """Follows the plain mean of updates that count alike."""
        if self.cfg is None:
            return
        _check_plain_mean(
            before,
            lengths="normalize_updates must be false with privacy, which limits the updates' "
            "lengths itself and has noise of that size",
            products="privacy clips A and B, whose products have no such limit",
            rules="privacy is accounted for the plain mean",
        )
        for count in (each for each in before if isinstance(each, Count)):
            if count.by != "uniform":
                raise ValueError(
                    "privacy needs clients that count alike, or one could change the mean by more "
                    f"than its share; aggregation must be uniform, got {count.by}."
                )

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with noise, the ledger in its memory, and the row's "privacy"."""
        if self.cfg is None:
            return step
        adapter = server_noised(
            step.adapter,
            self.cfg,
            num_updates=len(step.updates),
            learning_rate=step.learning_rate,
            round_number=step.round,
        )
        ledger, spent = spend(
            self.cfg,
            step.memory.get("privacy", {}),
            step.updates,
            asked=step.sampled,
            num_clients=step.num_clients,
            has_regulars=self.has_regulars,
        )
        # the drift is that of deltas without noise
        is_exact = self.cfg.at == "client" or self.cfg.statistics == "exact"
        return replace(
            step,
            adapter=adapter,
            memory={**step.memory, "privacy": ledger},
            entries={**step.entries, "privacy": spent},
            hidden=step.hidden if is_exact else (*step.hidden, "drift"),
        )


@dataclass(frozen=True)
class Secured:
    """Requires a step that needs no more than the mean, where that is all that the server has.

    Secure aggregation puts the mean in the place of each update (``Round.train``), which changes no
    mean of them.
    """

    how: Secure | None
    """How updates are hidden; None leaves the step as it is."""

    def check(self, before: Sequence[Transform]) -> None:
        """Follows the plain mean of updates."""
        if self.how is None:
            return
        _check_plain_mean(
            before,
            lengths="normalize_updates must be false with secure aggregation, where the server "
            "cannot tell an update's length",
            products="secure aggregation adds A and B, and not their products",
            rules="a robust rule compares single updates, which secure aggregation hides",
        )
        for privacy in (each.cfg for each in before if isinstance(each, Privacy)):
            if privacy is not None and privacy.at != "client":
                raise ValueError(
                    "a server that adds noise has to check that updates are clipped, which secure "
                    f"aggregation hides; privacy.at must be client, got {privacy.at}."
                )

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step without a drift in the log, for which updates would have to be known."""
        return step if self.how is None else replace(step, hidden=(*step.hidden, "drift"))


def zero_updates(
    updates: Sequence[Update], lengths: Sequence[float] | None
) -> dict[str, list[str]]:
    """Returns an entry of the round's row that names the clients whose updates have no direction.

    It is empty where all have one, and where there are no lengths because they do not matter.
    """
    if lengths is None:
        return {}
    names = [name for name, length in by_client(updates, lengths).items() if length == 0]
    return {"zero_updates": names} if names else {}


def _check_plain_mean(
    before: Sequence[Transform], *, lengths: str, products: str, rules: str
) -> None:
    """Raises ``ValueError``, for these reasons, unless updates are averaged as they are."""
    for each in before:
        if isinstance(each, UnitLengths):
            raise ValueError(f"{lengths}.")
        if isinstance(each, Mean) and each.of != "factors":
            raise ValueError(f"{products}; lora_mean must be factors, got {each.of}.")
    if rule := _robust_rule(before):
        raise ValueError(f"{rules}; robust.rule must be none, got {rule}.")


def _robust_rule(before: Sequence[Transform]) -> str | None:
    """Returns the robust rule among some transformations; None where updates stay as they are."""
    rules = [each.cfg.rule for each in before if isinstance(each, Robust)]
    return next((rule for rule in rules if rule != "none"), None)


def _check_rate_of_products(of: LoraMean, learning_rate: float) -> None:
    if of == "products" and learning_rate != 1:
        raise ValueError(
            "lora_mean products is for the mean itself; server_learning_rate must be 1, got "
            f"{learning_rate}."
        )
