"""Who owns which examples: partitions of a data set among clients.

Each example goes to exactly one client, and each client's indices are in rising order.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from firm.federation.randomness import derive_seed


def iid_partition(
    num_examples: int, num_clients: int, *, seed: int, min_examples: int = 1
) -> list[list[int]]:
    """Returns each client's example indices: a random split into sizes that differ by one at most.

    Args:
        num_examples: Size of the data set.
        num_clients: C.
        seed: The run's seed.
        min_examples: What every client needs at least, from 1.

    Raises:
        ValueError: When there are too few examples.
    """
    _check_enough(num_examples, num_clients, min_examples)
    order = _generator(seed).permutation(num_examples)
    return [sorted(shard.tolist()) for shard in np.array_split(order, num_clients)]


def dirichlet_partition(
    labels: Sequence[Hashable],
    num_clients: int,
    *,
    alpha: float,
    seed: int,
    min_examples: int = 1,
) -> list[list[int]]:
    """Returns each client's example indices: per label, shares drawn from a Dirichlet distribution.

    Small alpha gives each label to few clients, large alpha splits it evenly. A client that drew
    fewer than ``min_examples`` gets the rest from whoever has most at that moment.

    Args:
        labels: One label per example (a class, topic or source).
        num_clients: C.
        alpha: Concentration, above 0; 0.1 is very uneven, 100 nearly even.
        seed: The run's seed.
        min_examples: What every client gets at least, from 1.

    Raises:
        ValueError: When alpha is not positive, or there are too few examples.
    """
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}.")
    _check_enough(len(labels), num_clients, min_examples)
    generator = _generator(seed)
    shards: list[list[int]] = [[] for _ in range(num_clients)]
    indices_by_label: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        indices_by_label.setdefault(label, []).append(index)
    for indices in indices_by_label.values():
        shares = generator.dirichlet(np.full(num_clients, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(int)
        parts = np.split(generator.permutation(indices), cuts)
        for shard, part in zip(shards, parts, strict=True):
            shard.extend(part.tolist())
    for shard in shards:
        while len(shard) < min_examples:
            shard.append(max(shards, key=len).pop())
    return [sorted(shard) for shard in shards]


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "partition"))


def _check_enough(num_examples: int, num_clients: int, min_examples: int) -> None:
    if num_clients < 1 or min_examples < 1:
        raise ValueError(
            "A partition needs at least one client and one example for each, "
            f"got {num_clients} clients and min_examples {min_examples}."
        )
    if num_examples < num_clients * min_examples:
        raise ValueError(
            f"{num_examples} examples cannot give {num_clients} clients at least {min_examples} "
            "each; use fewer clients or more examples."
        )
