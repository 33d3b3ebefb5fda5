"""Robust aggregation: bounds the influence of a few attackers on the mean of updates.

A rule takes the updates of N clients, up to f of which are attackers that may send any finite
values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from firm.base.fields import NOT_IN_PAPER, Hint, NonNegativeInt, PositiveFloat, configuration
from firm.base.registry import OneOf, Registry
from firm.federation.option import Need, Option
from firm.federation.round_config import RoundConfig

if TYPE_CHECKING:
    from firm.federation.aggregation import Transform
    from firm.federation.client import Failure

Function = TypeVar("Function", bound=Callable[..., tuple[list[Any], dict[str, Any]]])


@dataclass(frozen=True)
class Rule:
    """A registered rule; see ``robust_rule``."""

    function: Callable[..., tuple[list[Any], dict[str, Any]]]
    margin: int
    needs_attackers: bool


_PACKAGE = "firm.federation.options.robust"
RULES: Registry[str, Rule] = Registry(
    "robust rule",
    {
        "multi_krum": f"{_PACKAGE}.krum",
        "krum": f"{_PACKAGE}.krum",
        "median": f"{_PACKAGE}.median",
        "norm_clipping": f"{_PACKAGE}.norm_clipping",
        "normalization": f"{_PACKAGE}.normalization",
        "trimmed_mean": f"{_PACKAGE}.trimmed_mean",
    },
)
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
        if num_attackers == 0:
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

    def exposes(self, failure: "Failure") -> bool:
        """Returns whether a silent client counts as an attacker."""
        return self.count_silent

    def quorum(self, num_refused: int) -> tuple[int, str]:
        """Returns the minimum number of updates with the remaining attackers among them."""
        left = self.attackers_left(num_refused)
        return self.updates_needed(left), f" of robust.rule {self.rule} with {left} attackers left"

    def steps(self, steps: "Sequence[Transform]", cfg: RoundConfig) -> "Sequence[Transform]":
        """Returns the steps with the robust rule as the first."""
        from firm.federation.options.robust.updates import RobustUpdates

        return [RobustUpdates(self), *steps]
