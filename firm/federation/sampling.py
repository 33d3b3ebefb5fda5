"""Sampling of the clients that take part in a round."""

from collections.abc import Sequence

import numpy as np

from firm.federation.randomness import derive_seed
from firm.fields import did_you_mean


def sample_clients(
    clients: Sequence[str],
    *,
    seed: int,
    round_number: int,
    count: int | None = None,
    always: Sequence[str] = (),
) -> list[str]:
    """Returns the clients of a round, drawn without replacement, in their given order.

    The draw depends only on the arguments, so a resumed run samples the same clients.

    Args:
        clients: All clients' names.
        seed: The run's seed.
        round_number: Round, from 1.
        count: Number of clients, from 1 to C; all by default.
        always: Names of clients that take part in every round. The others are sampled for the
            remaining places; there must be at least one.

    >>> sample_clients(["a", "b", "c"], seed=0, round_number=1)
    ['a', 'b', 'c']
    """
    if unknown := set(always) - set(clients):
        known = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
        near = did_you_mean(min(unknown), clients)
        raise ValueError(f"No client is called {min(unknown)!r}; always may name {known}{near}")
    if count is None:
        return list(clients)
    if not 1 <= count <= len(clients):
        raise ValueError(
            f"Clients per round must be from 1 to the {len(clients)} that there are, got {count}."
        )
    num_always = len(set(always))
    if count <= num_always:
        raise ValueError(
            f"Clients per round must be more than the {num_always} that always take part, "
            f"got {count}."
        )
    others = [name for name in clients if name not in always]
    generator = np.random.default_rng(derive_seed(seed, "sampling", round_number))
    drawn = generator.permutation(len(others))[: count - num_always].tolist()
    chosen = {*always, *(others[index] for index in drawn)}
    return [name for name in clients if name in chosen]
