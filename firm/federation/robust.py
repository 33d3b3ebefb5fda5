"""Robust aggregation: means that a few attacking clients cannot move at will.

The rules take the updates of N clients, f of whom may send anything finite, and compute in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Annotated, Literal

import torch

from firm.federation.aggregation import by_client, moved, update_lengths
from firm.federation.client import Adapter, State
from firm.federation.messages import Update
from firm.fields import NOT_IN_PAPER, Hint, NonNegativeInt, PositiveFloat, configuration

Rule = Literal[
    "none", "median", "trimmed_mean", "krum", "multi_krum", "norm_clipping", "normalization"
]


@configuration(source=NOT_IN_PAPER)
class RobustConfig:
    """Robust aggregation; by default the mean is that of all updates, as they are.

    What clients send beside their updates is not covered: FedCMOO's weights come of all Jacobians,
    an attacker's among them.
    """

    rule: Rule = "none"
    """none: all updates. median, trimmed_mean: one that is merged coordinate by coordinate. krum,
    multi_krum: the one, or the N - num_attackers, with the nearest neighbours. norm_clipping: all,
    none longer than clip_norm. normalization: all, each with their median length."""
    num_attackers: NonNegativeInt = 0
    """Clients among those of a round that may send anything, f; what trimmed_mean leaves out on
    each side. A round needs 2f + 1 updates, 2f + 3 for krum and multi_krum."""
    clip_norm: Annotated[PositiveFloat | None, Hint("null takes the median length")] = None
    """Length ‖θ_c - θ_t‖ that norm_clipping clips to; null takes the median of the lengths."""

    def __post_init__(self) -> None:
        if self.rule == "none" and self.num_attackers > 0:
            raise ValueError(
                f"num_attackers needs a rule that bears them, got {self.num_attackers} with rule "
                "none."
            )
        if self.rule in ("trimmed_mean", "krum", "multi_krum") and self.num_attackers < 1:
            raise ValueError(
                f"rule {self.rule} needs num_attackers of at least 1, got {self.num_attackers}."
            )
        if self.clip_norm is not None and self.rule != "norm_clipping":
            raise ValueError(
                f"clip_norm belongs to rule norm_clipping, got {self.clip_norm} with {self.rule}."
            )

    @property
    def min_updates(self) -> int:
        """The fewest updates that the rule needs with all attackers among them."""
        return self.updates_needed(self.num_attackers)

    def updates_needed(self, num_attackers: int) -> int:
        """Returns the fewest updates that the rule needs with so many attackers among them.

        Without an attacker left one is enough, for every rule.
        """
        if num_attackers == 0:
            return 1
        return 2 * num_attackers + (3 if self.rule in ("krum", "multi_krum") else 1)

    def attackers_left(self, num_refused: int) -> int:
        """Returns how many attackers can be among the updates that were accepted.

        Every refused answer is that of one of the f assumed attackers. A client that fails or is
        silent is not counted: an honest one may.
        """
        return max(0, self.num_attackers - num_refused)


def robust_updates(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, *, num_refused: int = 0
) -> tuple[list[Update], State]:
    """Returns the updates whose plain mean the server takes, and an entry of the round's row.

    Coordinates, lengths and distances are those of LoRA's A and B, not of their products.

    Args:
        start: θ_t.
        updates: As many as the rule needs with the attackers that are left, all finite and with the
            start's names and shapes.
        cfg: The rule.
        num_refused: Clients whose answers were refused; they count as attackers.

    Returns:
        The updates, and {"robust": ...} with "rule" and who was "chosen", or "clipped", or how far
        from the result each was. Without a rule the updates themselves and no entry; equal updates
        come back bit for bit, unless they are longer than a given ``clip_norm``.
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
    counted, entry = _RULES[cfg.rule](start, updates, cfg, num_attackers)
    return counted, {"robust": {"rule": cfg.rule, "num_attackers": num_attackers, **entry}}


def coordinate_median(rows: torch.Tensor) -> torch.Tensor:
    """Returns the median of each coordinate, [N, ...] to float64 [...].

    It lies between the two middle values where N is even. Yin et al. (2018), "Byzantine-Robust
    Distributed Learning: Towards Optimal Statistical Rates", arXiv:1803.01498, Definition 1: with f
    < N/2 attackers every coordinate stays within the range of the honest ones. It is the same for
    any order of the rows, bit for bit.
    """
    ordered = rows.double().sort(dim=0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def trimmed_mean(rows: torch.Tensor, num_trimmed: int) -> torch.Tensor:
    """Returns the mean of each coordinate without its b smallest and largest, [N, ...] to [...].

    Yin et al. (2018), arXiv:1803.01498, Definition 2, with b = βN values off each side, b < N/2.
    With f ≤ b attackers every coordinate stays within the range of the honest ones. Values are
    summed in float64 from the smallest up: any order of the rows gives the same, bit for bit.
    """
    if not 0 <= 2 * num_trimmed < len(rows):
        raise ValueError(
            f"num_trimmed must be at least 0 and less than half of the {len(rows)} rows, got "
            f"{num_trimmed}."
        )
    ordered = rows.double().sort(dim=0).values
    return _mean(ordered[num_trimmed : len(rows) - num_trimmed])


def squared_distances(rows: torch.Tensor) -> torch.Tensor:
    """Returns the squared distances of all pairs of rows, [N, ...] to float64 [N, N].

    They are of differences, not of inner products, which lose all digits where rows are close.
    """
    squares = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        for j in range(i):
            difference = row.double() - rows[j].double()
            squares[i, j] = squares[j, i] = difference.square().sum()
    return squares


def krum_scores(squares: torch.Tensor, num_attackers: int) -> torch.Tensor:
    """Returns each update's score: the sum of its squared distances to its nearest others.

    Blanchard et al. (2017), "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NIPS 2017 (preprint arXiv:1703.02757): the N - f - 2 nearest others, so that an update
    that looks honest has honest ones near. It tolerates f attackers where N ≥ 2f + 3.

    Args:
        squares: Squared distances of all pairs, shape [N, N].
        num_attackers: f, from 0 to (N - 3)/2.

    Returns:
        float64 [N], non-negative.
    """
    count = len(squares)
    if num_attackers < 0 or count < 2 * num_attackers + 3:
        raise ValueError(
            f"Krum needs 2f + 3 updates for f = {num_attackers} attackers, f not negative, got "
            f"{count}."
        )
    others = squares.double().clone().fill_diagonal_(inf)
    return others.sort(dim=1).values[:, : count - num_attackers - 2].sum(dim=1)


def krum(squares: torch.Tensor, num_attackers: int, *, num_chosen: int = 1) -> list[int]:
    """Returns which updates Krum chooses: those of the smallest scores, in the given order.

    One (m = 1) is Krum, which gives one update and its client's noise as they are; more, up to N,
    is Multi-Krum. Its authors leave m open; ``robust_updates`` takes N - f, as many as are honest.
    Of equal scores the first counts.
    """
    scores = krum_scores(squares, num_attackers)
    if not 1 <= num_chosen <= len(scores):
        raise ValueError(f"num_chosen must be from 1 to {len(scores)}, got {num_chosen}.")
    return sorted(scores.argsort(stable=True)[:num_chosen].tolist())


def clip_factors(lengths: torch.Tensor, clip_norm: float | None = None) -> torch.Tensor:
    """Returns what each update is multiplied by so that none is longer than a limit.

    Norm clipping as in Sun et al. (2019), "Can You Really Backdoor Federated Learning?",
    arXiv:1911.07963. An attacker turns the mean by no more than limit / N. The median of the
    lengths as the limit, which is not in that paper, follows the honest updates as they grow
    shorter; it lies between honest lengths where N ≥ 2f + 1.

    Args:
        lengths: ‖u_c‖, shape [N], non-negative.
        clip_norm: The limit; None takes the lengths' median.

    Returns:
        float64 [N], from 0 to 1; exactly 1 for updates within the limit.
    """
    lengths = lengths.double()
    limit = coordinate_median(lengths) if clip_norm is None else lengths.new_tensor(clip_norm)
    return torch.where(lengths > limit, limit / lengths, 1.0)


def normalization_factors(lengths: torch.Tensor) -> torch.Tensor:
    """Returns what each update is multiplied by so that all have the median length, float64 [N].

    FedMGDA+'s normalisation (Hu et al. 2022, arXiv:2006.11489, Algorithm 1), by which a client
    counts by its direction alone. The common length is an addition: unit updates would ask for
    another server learning rate, and would not shrink where training converges. Factors are exactly
    1 where all lengths are equal; an update of length 0 has no direction and stays 0.
    """
    lengths = lengths.double()
    return torch.where(lengths > 0, coordinate_median(lengths) / lengths, 0.0)


def _median(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    merged = {name: coordinate_median(rows) for name, rows in _stacks(start, updates)}
    distances = update_lengths(merged, updates)
    return [_as_update(merged, start)], {"distances": by_client(updates, distances)}


def _trimmed_mean(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    merged, trimmed = {}, torch.zeros(len(updates), dtype=torch.int64)
    for name, rows in _stacks(start, updates):
        merged[name] = trimmed_mean(rows, num_attackers)
        order = rows.argsort(dim=0, stable=True)
        outer = torch.cat([order[:num_attackers], order[len(order) - num_attackers :]])
        trimmed += outer.flatten().bincount(minlength=len(updates))
    size = sum(parameter.numel() for parameter in start.values())
    return [_as_update(merged, start)], {
        "trimmed": by_client(updates, trimmed.tolist()),
        "num_coordinates": size,
    }


def _krum(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    count = len(updates)
    squares = torch.zeros(count, count, dtype=torch.float64)
    for _, rows in _stacks(start, updates):
        squares += squared_distances(rows)
    if count < 3:  # no attacker is left among them, and nobody has two neighbours to compare
        return list(updates), {"chosen": [update.client for update in updates]}
    num_chosen = 1 if cfg.rule == "krum" else count - num_attackers
    chosen = [updates[i] for i in krum(squares, num_attackers, num_chosen=num_chosen)]
    return chosen, {
        "chosen": [update.client for update in chosen],
        "scores": by_client(updates, krum_scores(squares, num_attackers).tolist()),
    }


def _clip(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    lengths = torch.tensor(update_lengths(start, updates), dtype=torch.float64)
    factors = clip_factors(lengths, cfg.clip_norm)
    limit = coordinate_median(lengths).item() if cfg.clip_norm is None else cfg.clip_norm
    clipped = [update.client for update, f in zip(updates, factors, strict=True) if f < 1]
    return _scaled(start, updates, factors), {
        "clip_norm": limit,
        "clipped": clipped,
        "lengths": by_client(updates, lengths.tolist()),
    }


def _normalize(
    start: Adapter, updates: Sequence[Update], cfg: RobustConfig, num_attackers: int
) -> tuple[list[Update], State]:
    lengths = torch.tensor(update_lengths(start, updates), dtype=torch.float64)
    return _scaled(start, updates, normalization_factors(lengths)), {
        "length": coordinate_median(lengths).item(),
        "lengths": by_client(updates, lengths.tolist()),
    }


_RULES: dict[str, Callable[..., tuple[list[Update], State]]] = {
    "median": _median,
    "trimmed_mean": _trimmed_mean,
    "krum": _krum,
    "multi_krum": _krum,
    "norm_clipping": _clip,
    "normalization": _normalize,
}


def _stacks(start: Adapter, updates: Sequence[Update]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each parameter of all adapters, float64 [N, ...], one at a time to save memory."""
    for name in start:
        yield name, torch.stack([update.adapter[name].double() for update in updates])


def _scaled(start: Adapter, updates: Sequence[Update], factors: torch.Tensor) -> list[Update]:
    """Returns θ_t + a (θ_c - θ_t) for each; θ_c itself where a is 1."""
    return [
        update if factor == 1 else replace(update, adapter=moved(start, [update.adapter], [factor]))
        for update, factor in zip(updates, factors.tolist(), strict=True)
    ]


def _as_update(merged: Adapter, start: Adapter) -> Update:
    adapter = {name: merged[name].to(parameter.dtype) for name, parameter in start.items()}
    return Update("merged", adapter, 1, {})


def _mean(rows: torch.Tensor) -> torch.Tensor:
    """Returns the mean over the rows, added up in their order, whatever torch's own order is."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total / len(rows)
