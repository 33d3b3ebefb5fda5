"""Noise and clipping of client-level differential privacy (`firm.federation.options.privacy`).

All bytes of the noise are drawn from the operating system's entropy: a generator would reduce the
entropy to that of its seed, of which torch's CPU generator keeps 32 bits. So a run with noise
cannot be reproduced from its seed, and a round that is repeated after a stop has different noise.
A fixed ``noise_seed`` makes both reproducible, for tests and replays, but anyone who knows it can
subtract the noise.

The theory assumes real-valued noise. The lowest bits of floating-point noise, here float64 rounded
to the adapter's dtype, can reveal information about the value that it was added to (Mironov 2012,
"On Significance of the Least Significant Bits for Differential Privacy"); ε does not account for
this.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from firm.base.errors import WithheldError
from firm.base.randomness import derive_seed
from firm.base.user_code import ENDS
from firm.federation.aggregation import ServerStep, update_length
from firm.federation.client import Adapter, Client
from firm.federation.messages import Update
from firm.federation.option import Train
from firm.federation.options.accounting import spend
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.schema import Invalid

NoiseSource = Callable[[int], bytes]
"""Returns the requested number of random bytes."""

ROUNDING = 1e-6
"""Relative tolerance of the norm limit, for sums computed in another order on another machine; sums
of 4.5e6 float64 squares in two orders differ by less than 1e-9."""


def private_training(cfg: PrivacyConfig, train: Train) -> Train:
    """Returns the training with a private update, and with error messages withheld."""

    def private(client: Client, request: Any) -> Update:
        with errors_kept_back():
            update = train(client, request)
        return privatize(update, request.adapter, cfg, request.round)

    return private


def check_clipped(update: Update, start: Adapter, cfg: PrivacyConfig) -> None:
    """Raises ``Invalid`` if the server adds the noise, and the update is longer than S."""
    if cfg.at != "server":
        return
    norm = update_length(start, update.adapter)
    if norm > cfg.clip_norm * (1 + ROUNDING):
        raise Invalid(f"the update has norm {norm:.4g}, above privacy.clip_norm {cfg.clip_norm:g}")


def share_of_noise(
    cfg: PrivacyConfig, client: str, round_number: int, size: int, num_honest: int
) -> np.ndarray:
    """Returns a client's share of the noise of a sum, N(0, (zS)² / h), float64 [size].

    The shares of the h clients that do not collude have the whole noise, whoever drops out: a sum
    is opened only if it has as many of them.

    Args:
        cfg: Noise z and norm S.
        client: The client.
        round_number: The round.
        size: Number of parameters.
        num_honest: Fewest clients in the sum that do not collude, h.
    """
    std = cfg.noise_multiplier * cfg.clip_norm / num_honest**0.5
    return std * gaussian([size], noise_source(cfg.noise_seed, client, round_number)).numpy()


def noise_source(seed: int | None, *names: str | int) -> NoiseSource:
    """Returns the source of noise: the operating system or, with a seed, a named stream."""
    if seed is None:
        return os.urandom
    return np.random.default_rng(derive_seed(seed, "privacy", *names)).bytes


def gaussian(shape: Sequence[int], source: NoiseSource) -> torch.Tensor:
    """Returns standard normal noise, float64 of this shape, by inverse transform sampling.

    Each number uses 52 random bits, which reach 8.1 standard deviations.
    """
    count = int(np.prod(shape))
    bits = np.frombuffer(source(8 * count), dtype=np.uint64) >> np.uint64(12)
    uniform = (bits + 0.5) * 2.0**-52  # [count], never 0 or 1
    return torch.from_numpy(ndtri(uniform)).reshape(tuple(shape))


def add_noise(adapter: Adapter, std: float, source: NoiseSource) -> Adapter:
    """Returns the adapter plus N(0, std²) in each coordinate, in the adapter's dtypes.

    With a ``std`` of 0 it returns the adapter itself.
    """
    if std == 0:
        return adapter
    return {
        name: (value.double() + std * gaussian(value.shape, source)).to(value.dtype)
        for name, value in adapter.items()
    }


def clip_delta(adapter: Adapter, start: Adapter, clip_norm: float) -> Adapter:
    """Returns θ_t + min(1, S / ‖θ_c - θ_t‖) (θ_c - θ_t), at a distance of at most S from θ_t.

    An adapter θ_c within the limit is returned bitwise unchanged. Values that the dtype cannot
    represent are rounded towards θ_t, so that rounding never increases the norm of the delta.

    Raises:
        ValueError: The delta is not finite; it must not leave the client.
    """
    norm = update_length(start, adapter)
    if not isfinite(norm):
        raise ValueError(f"the update's norm is {norm}; it cannot be sent.")
    if norm <= clip_norm:
        return adapter
    scale = clip_norm / norm * (1 - 1e-12)  # the sum of squares is rounded as well
    result = {}
    for name, origin in start.items():
        delta = scale * (adapter[name].double() - origin.double())
        value = (origin.double() + delta).to(origin.dtype)
        is_beyond = (value.double() - origin.double()).abs() > delta.abs()
        result[name] = torch.where(is_beyond, torch.nextafter(value, origin), value)
    return result


def privatize(update: Update, start: Adapter, cfg: PrivacyConfig, round_number: int) -> Update:
    """Returns an update that may leave its client in this round.

    The adapter is clipped and, if clients add the noise, noised. The metrics are reduced to the
    ones that ``cfg.statistics`` allows. The size of the shard is withheld too: it is set to 1. So
    is the number of local steps, which tells the size if a client stops at the end of its shard.

    Raises:
        ValueError: The delta is not finite.
    """
    norm = update_length(start, update.adapter)
    adapter = clip_delta(update.adapter, start, cfg.clip_norm)
    if cfg.at == "client":
        source = noise_source(cfg.noise_seed, update.client, round_number)
        adapter = add_noise(adapter, cfg.noise_multiplier * cfg.clip_norm, source)
    is_clipped = float(norm > cfg.clip_norm)
    if cfg.statistics == "exact":
        metrics = {**update.metrics, "clipped": is_clipped, "update_norm": norm}
        return replace(update, adapter=adapter, metrics=metrics)
    metrics = {}
    if cfg.statistics == "noisy":
        source = noise_source(cfg.noise_seed, update.client, round_number, "statistics")
        metrics = _noisy_statistics(update.metrics, is_clipped, cfg.noise_multiplier, source)
    return Update(update.client, adapter, 1, metrics)


def statistics_radius(num_objectives: int) -> float:
    """Returns half the maximum distance between two clients' statistics.

    It corresponds to S for deltas. Two λ differ by at most √2, each of the M(M-1)/2 cosines by 2,
    and the flag for a clipped delta by 1.
    """
    num_pairs = num_objectives * (num_objectives - 1) // 2
    return (2 + 4 * num_pairs + 1) ** 0.5 / 2


@dataclass(frozen=True)
class ServerNoise:
    """Adds the server's noise to the mean, if the server adds the noise, and accounts for ε."""

    cfg: PrivacyConfig
    has_regulars: bool
    """True if some clients take part in every round, unsampled."""

    def __call__(self, step: ServerStep) -> ServerStep:
        """Returns the step with noise, the updated ledger, and the "privacy" entry of the row."""
        cfg, adapter = self.cfg, step.adapter
        if cfg.at == "server":
            # the sum of n clipped deltas has noise N(0, (zS)²), and the step is η/n of the sum
            source = noise_source(cfg.noise_seed, "server", step.round)
            std = step.learning_rate * cfg.noise_multiplier * cfg.clip_norm / len(step.updates)
            adapter = add_noise(adapter, std, source)
        ledger, spent = spend(
            cfg,
            step.memory.get("privacy", {}),
            step.updates,
            asked=step.sampled,
            num_clients=step.num_clients,
            has_regulars=self.has_regulars,
        )
        # the drift would be computed from deltas without noise
        is_exact = cfg.at != "server" or cfg.statistics == "exact"
        return replace(
            step,
            adapter=adapter,
            memory={**step.memory, "privacy": ledger},
            entries={**step.entries, "privacy": spent},
            hidden=step.hidden if is_exact else (*step.hidden, "drift"),
        )


@contextmanager
def errors_kept_back() -> Iterator[None]:
    """Replaces a client's error by one that names only its type.

    The error's text may quote the client's data. In the client's process the original error is
    available as the cause.
    """
    try:
        yield
    except ENDS:
        raise
    except BaseException as error:  # any error may quote data
        raise WithheldError(
            f"{type(error).__name__} in local training; with privacy, its text is only in the "
            "client's log at level DEBUG"
        ) from error


def _noisy_statistics(
    metrics: dict[str, Any], is_clipped: float, multiplier: float, source: NoiseSource
) -> dict[str, Any]:
    """Returns noisy means of λ and cosines over the solves, and of ``is_clipped``, as one solve.

    The values may be out of range: clamping them would bias their means over clients.
    """
    weights = np.mean(metrics["weights"], axis=0)  # [M]
    num_pairs = len(weights) * (len(weights) - 1) // 2
    # fixed weights need no solve, so there are no cosines
    cosines = np.mean(metrics["cosines"], axis=0) if metrics.get("cosines") else None
    exact = np.concatenate([weights, np.zeros(num_pairs) if cosines is None else cosines, [0.0]])
    exact[-1] = is_clipped
    noise = gaussian(exact.shape, source).numpy()
    noisy = (exact + multiplier * statistics_radius(len(weights)) * noise).tolist()
    return {
        "weights": [noisy[: len(weights)]],
        **({} if cosines is None else {"cosines": [noisy[len(weights) : -1]]}),
        "clipped": noisy[-1],
    }
