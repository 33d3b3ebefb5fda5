"""Robust aggregation: bounds the influence of a few attackers on the mean of updates.

A rule takes the updates of N clients, up to f of which are attackers that may send any finite
values. It computes in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, TypeVar

import torch

from firm.base.fields import NOT_IN_PAPER, Hint, NonNegativeInt, PositiveFloat, configuration
from firm.base.registry import OneOf, Registry
from firm.base.state import State
from firm.federation.aggregation import ServerStep, Transform, moved
from firm.federation.client import Adapter, Failure
from firm.federation.messages import Update
from firm.federation.option import Need, Option
from firm.federation.round_config import RoundConfig

Function = TypeVar("Function", bound=Callable[..., tuple[list[Update], State]])


@dataclass(frozen=True)
class Rule:
    """A registered rule; see ``robust_rule``."""

    function: Callable[..., tuple[list[Update], State]]
    margin: int
    needs_attackers: bool


RULES: Registry[str, Rule] = Registry("robust rule")
"""Robust rules by name."""


def robust_rule(
    name: str, *, margin: int = 1, needs_attackers: bool = False
) -> Callable[[Function], Function]:
    """Returns a decorator that registers a robust rule.

    The function takes (θ_t, updates, ``RobustConfig``, number of attackers f). It returns the
    updates to be averaged by the server with equal weights, and an entry of the round's row.

    Args:
        name: Name of the rule, a value of ``strategy.robust.rule``.
        margin: m; the rule needs at least 2f + m updates in a round.
        needs_attackers: Whether the rule is meaningless without an assumed attacker.

    Raises:
        ValueError: The name is taken.
    """
    rule = partial(Rule, margin=margin, needs_attackers=needs_attackers)
    return lambda function: RULES.add(name, function, entry=rule(function))


@configuration(source=NOT_IN_PAPER)
class RobustConfig(Option):
    """Robust aggregation of updates; off by default.

    Covers updates only, not other messages of clients: FedCMOO's weights depend on all Jacobians,
    including those of attackers.
    """

    key: ClassVar[str] = "robust"
    scope: ClassVar[str] = "mean"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("aggregation", "uniform", "clients report their own number of examples"),
        Need(
            "normalize_updates",
            False,
            "robust rules handle the updates' norms; rule normalization scales all of them to "
            "their median",
        ),
    )

    rule: Annotated[str, OneOf(RULES, "none")] = "none"
    """none averages all updates. median and trimmed_mean aggregate coordinate-wise. krum selects
    the update closest to its neighbours, multi_krum averages the N - num_attackers closest ones.
    norm_clipping limits the updates' norms to clip_norm; normalization scales them to their
    median."""
    num_attackers: NonNegativeInt = 0
    """Number f of attackers assumed among the clients of a round, and of values that trimmed_mean
    removes on each side. A round needs 2f + 1 updates, 2f + 3 for krum and multi_krum."""
    clip_norm: Annotated[PositiveFloat | None, Hint("null uses the median norm")] = None
    """Maximum norm ‖θ_c - θ_t‖ of norm_clipping; null uses the median norm."""

    count_silent: bool = False
    """Count clients that do not answer as attackers, as those with rejected answers. A round then
    needs fewer updates; but honest clients may be silent too, and each leaves the rule prepared for
    one attacker fewer."""

    def __post_init__(self) -> None:
        if self.rule == "none" and self.num_attackers > 0:
            raise ValueError(
                f"num_attackers requires a robust rule, got {self.num_attackers} with rule none."
            )
        if self.rule != "none" and RULES[self.rule].needs_attackers and self.num_attackers < 1:
            raise ValueError(
                f"rule {self.rule} needs num_attackers of at least 1, got {self.num_attackers}."
            )
        if self.clip_norm is not None and self.rule != "norm_clipping":
            raise ValueError(
                f"clip_norm requires rule norm_clipping, got {self.clip_norm} with {self.rule}."
            )

    @property
    def min_updates(self) -> int:
        """Minimum number of updates if they include all assumed attackers."""
        return self.updates_needed(self.num_attackers)

    def updates_needed(self, num_attackers: int) -> int:
        """Returns the minimum number of updates if ``num_attackers`` are among them.

        Without attackers one update suffices for every rule.
        """
        if num_attackers == 0 or self.rule == "none":
            return 1
        return 2 * num_attackers + RULES[self.rule].margin

    def attackers_left(self, num_refused: int) -> int:
        """Returns the maximum number of attackers among the accepted updates.

        Every refused answer counts as one of the f assumed attackers. Clients that fail or do not
        answer are not counted, because honest clients may do so too, unless with ``count_silent``.
        """
        return max(0, self.num_attackers - num_refused)

    def check(self, cfg: RoundConfig) -> None:
        """Raises ``ValueError`` on a conflict with other keys of the strategy."""
        super().check(cfg)
        if cfg.clients_per_round is not None and cfg.clients_per_round < self.min_updates:
            raise ValueError(
                f"robust.rule {self.rule} with num_attackers {self.num_attackers} needs "
                f"clients_per_round of at least {self.min_updates}, got {cfg.clients_per_round}."
            )

    def exposes(self, failure: Failure) -> bool:
        """Returns whether a silent client counts as an attacker."""
        return self.count_silent and self.rule != "none"

    def quorum(self, num_refused: int) -> tuple[int, str]:
        """Returns the minimum number of updates with the remaining attackers among them."""
        left = self.attackers_left(num_refused)
        return self.updates_needed(left), f" of robust.rule {self.rule} with {left} attackers left"

    def steps(self, steps: Sequence[Transform], cfg: RoundConfig) -> Sequence[Transform]:
        """Returns the steps with the robust rule as the first."""
        return [self._chosen, *steps]

    def _chosen(self, step: ServerStep) -> ServerStep:
        updates, entries = robust_updates(
            step.start, step.updates, self, num_refused=step.num_refused
        )
        return replace(step, updates=updates, entries={**step.entries, **entries})


def robust_updates(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, *, num_refused: int = 0
) -> tuple[list[Update], State]:
    """Returns the updates to be averaged with equal weights, and an entry of the round's row.

    Coordinates, norms and distances are computed on LoRA's A and B, not on their products.

    Args:
        start: θ_t.
        updates: At least the number of updates that the rule needs with the remaining attackers,
            all finite and with the names and shapes of ``start``.
        cfg: Configuration of the rule.
        num_refused: Number of clients with refused answers, which count as attackers.

    Returns:
        The updates, and {"robust": ...} with "rule" and either the clients that were "chosen" or
        "clipped", or each client's distance from the result. Without a rule, the given updates and
        no entry. Equal updates are returned bitwise unchanged, unless they exceed a given
        ``clip_norm``.
    """
    if cfg.rule == "none":
        return list(updates), {}
    num_attackers = cfg.attackers_left(num_refused)
    needed = cfg.updates_needed(num_attackers)
    if len(updates) < needed:
        raise ValueError(
            f"{cfg.rule} needs {needed} updates with {num_attackers} attackers left, "
            f"got {len(updates)}."
        )
    counted, entry = RULES[cfg.rule].function(start, updates, cfg, num_attackers)
    return counted, {"robust": {"rule": cfg.rule, "num_attackers": num_attackers, **entry}}


def stacks(start: Adapter, updates: Sequence[Update]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields one parameter of all adapters at a time, float64 [N, ...], to save memory."""
    for name in start:
        yield name, torch.stack([update.adapter[name].double() for update in updates])


def scaled(start: Adapter, updates: Sequence[Update], factors: torch.Tensor) -> list[Update]:
    """Returns the updates with θ_t + a (θ_c - θ_t); θ_c itself where the factor a is 1."""
    return [
        update if factor == 1 else replace(update, adapter=moved(start, [update.adapter], [factor]))
        for update, factor in zip(updates, factors.tolist(), strict=True)
    ]


def merged_update(merged: Adapter, start: Adapter) -> Update:
    """Returns a single update that replaces all others, in the adapter's dtypes."""
    adapter = {name: merged[name].to(parameter.dtype) for name, parameter in start.items()}
    return Update("merged", adapter, 1, {})


def mean_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the mean over the rows, summed in their order, unlike ``torch.mean``."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total / len(rows)
