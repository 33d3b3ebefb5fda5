"""Robust updates: a round's updates after a robust rule, and what the rules share.

Rules compute in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from firm.base.state import State
from firm.federation.aggregation import ServerStep, move_adapter
from firm.federation.client import Adapter
from firm.federation.messages import Update
from firm.federation.options.robust.rule import RULES, RobustConfig


@dataclass(frozen=True)
class RobustUpdates:
    """Replaces the updates by those of a robust rule, the first step of the server."""

    cfg: RobustConfig

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with the updates to average, and "robust" in the row."""
        updates, entries = robust_updates(
            step.start, step.updates, self.cfg, num_refused=step.num_refused
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
        "clipped", or each client's distance from the result. Equal updates are returned bitwise
        unchanged, unless they exceed a given ``clip_norm``.
    """
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


def scale_updates(start: Adapter, updates: Sequence[Update], factors: torch.Tensor) -> list[Update]:
    """Returns the updates with θ_t + a (θ_c - θ_t); θ_c itself where the factor a is 1."""
    return [
        update
        if factor == 1
        else replace(update, adapter=move_adapter(start, [update.adapter], [factor]))
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
