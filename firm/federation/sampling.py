"""Which clients take part in a round."""

from collections.abc import Sequence

import numpy as np

from firm.federation.randomness import derive_seed


def sample_clients(
    clients: Sequence[str],
    *,
    seed: int,
    round_number: int,
    count: int | None = None,
    fraction: float | None = None,
) -> list[str]:
    """Returns the clients of a round, drawn without replacement, in their given order.

    The draw depends on the seed, the round and the arguments alone, so a resumed run draws alike.

    Args:
        clients: All clients' names.
        seed: The run's seed.
        round_number: Round, from 1.
        count: How many, from 1 to C. All by default.
        fraction: Instead of ``count``, the share of all clients, in (0, 1]; at least one is drawn.

    Raises:
        ValueError: When the count or fraction is out of range, or both are given.

    >>> sample_clients(["a", "b", "c"], seed=0, round_number=1)
    ['a', 'b', 'c']
    """
    if count is not None and fraction is not None:
        raise ValueError("Give the count or the fraction of clients per round, not both.")
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise ValueError(f"The fraction of clients must be in (0, 1], got {fraction}.")
        count = max(1, round(fraction * len(clients)))
    if count is None:
        return list(clients)
    if not 1 <= count <= len(clients):
        raise ValueError(
            f"Clients per round must be from 1 to the {len(clients)} that there are, got {count}."
        )
    generator = np.random.default_rng(derive_seed(seed, "sampling", round_number))
    chosen = set(generator.permutation(len(clients))[:count].tolist())
    return [name for index, name in enumerate(clients) if index in chosen]
