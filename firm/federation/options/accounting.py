"""The privacy that a run has spent: ε at its δ, by Google's dp-accounting.

Two federations are neighbours when one client, with all its data, is replaced by another: the sum
of their clipped deltas differs by at most 2S, so that noise of standard deviation zS is z/2 times
the sensitivity. (Where the other client may only be one that sends a zero delta, the difference is
S, and z stands in the place of z/2; no theorem on sampling without replacement is known for that.)
Local steps, batches and PPO epochs do not matter, because the whole delta is clipped once.

Rényi divergences are summed over the rounds (Mironov 2017, arXiv:1702.07476); clients drawn without
replacement by Theorem 27 of Wang, Balle and Kasiviswanathan (2019), arXiv:1808.00087.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from math import inf, isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from firm.federation.client import State
from firm.federation.messages import Update
from firm.quantities import Quantity, register
from firm.schema import Finite, NonNegative, Share

if TYPE_CHECKING:
    from firm.federation.options.privacy import PrivacyConfig


class PrivacyFigures(TypedDict):
    """What a run has spent on privacy, in the row of a round; None is an infinite ε."""

    epsilon: NonNegative | None
    epsilon_if_unknown: NotRequired[NonNegative | None]
    epsilon_server: NotRequired[NonNegative | None]
    delta: Share
    clipped: NotRequired[Finite]


register(Quantity("privacy", kind="round", type=PrivacyFigures))

_SAMPLED_ORDERS = (1.25, 1.5, 1.75, *range(2, 33), 40, 48, 64, 96, 128)
"""Orders at which sampled rounds are summed. Between whole ones their bound is only interpolated,
and the time of each grows with its square; orders up to 256 change ε by less than 0.1 %."""


def require_accountant() -> None:
    """Raises ``ValueError`` when dp-accounting is not installed."""
    if find_spec("dp_accounting") is None:
        raise ValueError(
            "privacy is accounted for by dp-accounting, which is not installed: "
            'pip install "firm-align[privacy]".'
        )


def gaussian_epsilon(
    rounds: Mapping[float, int], delta: float, *, sample: tuple[int, int] | None = None
) -> float:
    """Returns ε at δ of Gaussian mechanisms one after the other; infinite without noise.

    Args:
        rounds: How many rounds have which noise, in multiples of the sensitivity.
        delta: δ, in (0, 1).
        sample: (n, C) where each round draws n of C clients without replacement, in secret. A bound
            that is worse than without it counts for nothing.

    >>> round(gaussian_epsilon({4.0: 16}, 1e-5), 2)
    4.73
    """
    require_accountant()
    rounds = {multiplier: count for multiplier, count in rounds.items() if count > 0}
    if not rounds:
        return 0.0
    if min(rounds) == 0:
        return inf
    key = tuple(sorted(rounds.items()))
    whole = _epsilon(key, delta, None)
    if sample is None or sample[0] >= sample[1]:
        return whole
    return min(whole, _epsilon(key, delta, sample))


def spend(
    cfg: "PrivacyConfig",
    ledger: State,
    updates: Sequence[Update],
    *,
    asked: Sequence[str],
    num_clients: int,
    has_regulars: bool = False,
) -> tuple[State, dict[str, Any]]:
    """Returns the ledger after a round, and the round's row on privacy.

    There are three observers, all of whom know everything but one client's data and the noise:

    - "epsilon": whoever sees the server's models after each round, knows who took part in which,
      and has the noisy statistics where clients send them. The client that took part most often
      counts; sampling helps only by its being left out.
    - "epsilon_if_unknown", where clients are sampled: whoever sees the models but no log, so that
      who took part is hidden. The run's seed reveals it, and must be as secret.
    - "epsilon_server", where clients add the noise: the server, who gets their messages.

    Args:
        cfg: The limits and the noise.
        ledger: That of the round before; {} at first. It has "rounds", how often each client was
            asked, and "sizes", how many updates each round averaged.
        updates: The round's accepted ones.
        asked: Names of all who were asked; one that failed may have sent all the same.
        num_clients: C.
        has_regulars: Whether some clients take part in every round, unsampled.

    Returns:
        The ledger, and the row: each ε, None where it is infinite, "delta", and "clipped", the
        share of clients whose delta was clipped, where they report it.
    """
    counts = Counter(ledger.get("rounds", {}))
    counts.update(asked)
    sizes = [*ledger.get("sizes", []), len(updates)]
    longest = max(counts.values())

    message = cfg.noise_multiplier / 2
    models = _models(cfg, sizes)
    statistics = {message: longest} if cfg.statistics == "noisy" else {}
    # a client is in its own rounds alone, and the fewest updates hide it least
    models_seen = _models(cfg, sorted(sizes)[:longest])
    entry = {"epsilon": _finite(_compose(models_seen, statistics, cfg.delta))}
    if len(asked) < num_clients and not has_regulars:
        sample = (len(asked), num_clients)
        entry["epsilon_if_unknown"] = _finite(gaussian_epsilon(models, cfg.delta, sample=sample))
    if cfg.at == "client":
        is_covered = cfg.statistics != "exact"
        full = _compose({message: longest}, statistics, cfg.delta) if is_covered else inf
        entry["epsilon_server"] = _finite(full)
    return (
        {"rounds": dict(counts), "sizes": sizes},
        {**entry, "delta": cfg.delta, **share_clipped(updates)},
    )


def message_epsilon(cfg: "PrivacyConfig", num_messages: int) -> float:
    """Returns what so many messages of one client have spent of ε at ``cfg.delta``.

    It holds against whoever reads the messages, where the client adds the noise; where the server
    does, against everybody else, if the server is honest. With exact statistics, which ε does not
    cover, and without noise it is infinite.
    """
    if cfg.statistics == "exact":
        return inf if num_messages else 0.0
    message = {cfg.noise_multiplier / 2: num_messages}
    statistics = message if cfg.statistics == "noisy" else {}
    return _compose(message, statistics, cfg.delta)


def share_clipped(updates: Sequence[Update]) -> State:
    """Returns {"clipped": mean of the clients' reports}; nothing where they report none."""
    shares = [update.metrics["clipped"] for update in updates if "clipped" in update.metrics]
    return {"clipped": fmean(shares)} if shares else {}


def _models(cfg: "PrivacyConfig", sizes: Sequence[int]) -> Counter[float]:
    """Counts rounds by the noise of their mean, in multiples of what one client changes.

    n independent noises of clients are √n times as strong in the sum as one.
    """
    factor = cfg.noise_multiplier / 2
    return Counter(factor * (size**0.5 if cfg.at == "client" else 1.0) for size in sizes)


def _compose(first: Mapping[float, int], second: Mapping[float, int], delta: float) -> float:
    return gaussian_epsilon(Counter(first) + Counter(second), delta)


def _finite(epsilon: float) -> float | None:
    return epsilon if isfinite(epsilon) else None


@lru_cache(maxsize=256)
def _epsilon(
    rounds: tuple[tuple[float, int], ...], delta: float, sample: tuple[int, int] | None
) -> float:
    # seconds to load, and none of it needed without privacy
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    accountant = rdp.RdpAccountant(
        None if sample is None else _SAMPLED_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    for multiplier, count in rounds:
        event: Any = dp_accounting.GaussianDpEvent(multiplier)
        if sample is not None:
            size, population = sample
            event = dp_accounting.SampledWithoutReplacementDpEvent(population, size, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))
