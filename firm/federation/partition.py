"""Partitions of a data set's examples among clients.

Shards are disjoint, and each client's indices are in ascending order. Every example is assigned to
a client, unless sizes are fixed or only some of the clients are selected.
"""

from collections.abc import Hashable, Sequence
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
import torch

from firm.base.randomness import derive_seed

Labels = Sequence[Hashable] | np.ndarray | torch.Tensor
"""One label per example."""


def iid_partition(
    num_examples: int, num_clients: int, *, seed: int, min_examples: int = 1
) -> list[list[int]]:
    """Returns each client's example indices, split at random into sizes that differ by at most 1.

    Raises:
        ValueError: There are fewer than ``min_examples`` (at least 1) for each client.
    """
    _check_enough(num_examples, num_clients, min_examples)
    order = _generator(seed).permutation(num_examples)
    return [sorted(shard.tolist()) for shard in np.array_split(order, num_clients)]


def dirichlet_partition(
    labels: Labels, num_clients: int, *, alpha: float, seed: int, min_examples: int = 1
) -> list[list[int]]:
    """Splits the examples of each label by client shares drawn from a Dirichlet distribution.

    A client with fewer than ``min_examples`` gets the missing ones from the largest shard.

    Args:
        labels: One label per example (a class, topic or source).
        num_clients: C.
        alpha: Concentration, positive; 0.1 is very uneven, 100 nearly even.
        seed: The run's seed.
        min_examples: Minimum number of examples per client, at least 1.

    Returns:
        Each client's example indices.

    Raises:
        ValueError: alpha is not positive, or there are too few examples.
    """
    _check_alpha(alpha)
    _check_enough(len(labels), num_clients, min_examples)
    generator = _generator(seed)
    shards: list[list[int]] = [[] for _ in range(num_clients)]
    for indices in _by_label(labels).values():
        shares = generator.dirichlet(np.full(num_clients, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(int)
        parts = np.split(generator.permutation(indices), cuts)
        for shard, part in zip(shards, parts, strict=True):
            shard.extend(part.tolist())
    largest = [(-len(shard), index) for index, shard in enumerate(shards)]
    heapify(largest)
    for shard in shards:
        while len(shard) < min_examples:
            size, index = largest[0]
            shard.append(shards[index].pop())
            heapreplace(largest, (size + 1, index))
    return [sorted(shard) for shard in shards]


def balanced_dirichlet_partition(
    labels: Labels, num_clients: int, *, alpha: float, seed: int
) -> list[list[int]]:
    """Splits examples into shards of equal size, with label shares drawn for each client.

    Acar et al. (2021), arXiv:2111.04263, which the FedCMOO paper follows (Appendix D.2). Clients
    draw in random order: each draw samples a label from the client's Dirichlet shares and takes one
    of its examples. A label without examples left is removed from all shares. Departure: a client
    with no labels left in its shares draws from the remaining examples in proportion, whereas the
    original keeps drawing labels.

    Arguments, result and errors are the same as for ``dirichlet_partition``. Each shard has the
    largest possible number of examples; others are unused.
    """
    _check_alpha(alpha)
    _check_enough(len(labels), num_clients, 1)
    size = len(labels) // num_clients
    generator = _generator(seed)
    pools = [generator.permutation(indices).tolist() for indices in _by_label(labels).values()]
    left = np.array([len(pool) for pool in pools])
    shares = generator.dirichlet(np.full(len(pools), alpha), size=num_clients)  # [C, labels]
    shards: list[list[int]] = [[] for _ in range(num_clients)]
    cumulative: list[np.ndarray | None] = [None] * num_clients
    for client in generator.permutation(np.repeat(np.arange(num_clients), size)).tolist():
        bounds = cumulative[client]
        if bounds is None:
            # for alpha near 0 the sum of shares underflows once the main label is used up
            mass = shares[client] * (left > 0)
            bounds = np.cumsum(mass if mass.sum() > 1e-9 else left)
            cumulative[client] = bounds
        label = int(np.searchsorted(bounds, generator.random() * bounds[-1], side="right"))
        shards[client].append(pools[label].pop())
        left[label] -= 1
        if not left[label]:
            cumulative = [None] * num_clients
    return [sorted(shard) for shard in shards]


def shard_partition(
    labels: Labels, num_clients: int, *, shards_per_client: int, seed: int
) -> list[list[int]]:
    """Sorts examples by label, cuts them into shards, and gives each client a few.

    McMahan et al. (2017), with two shards per client; FedMGDA+ (Section 6.1.1) cuts CIFAR-10 into
    500 shards and gives five to each of 100 clients. If there are at least as many shards as
    labels, each shard has a single label, so that a client has at most ``shards_per_client``
    labels. The number of a label's shards is proportional to its examples, and shards have equal
    sizes if labels do. Labels must be sortable.

    Returns:
        Each client's example indices.

    Raises:
        ValueError: There is no shard for a client, or there are fewer examples than shards.
    """
    if shards_per_client < 1:
        raise ValueError(f"shards_per_client must be at least 1, got {shards_per_client}.")
    _check_enough(len(labels), num_clients, shards_per_client)
    generator = _generator(seed)
    num_shards = num_clients * shards_per_client
    by_label = _by_label(labels)
    pools = [generator.permutation(by_label[label]) for label in sorted(by_label)]
    if len(pools) > num_shards:
        pools = [np.concatenate(pools)]
    counts = _apportion([len(pool) for pool in pools], num_shards)
    shards = [
        shard
        for pool, count in zip(pools, counts, strict=True)
        for shard in np.array_split(pool, count)
    ]
    order = generator.permutation(num_shards).reshape(num_clients, shards_per_client)
    return [sorted(np.concatenate([shards[i] for i in picks]).tolist()) for picks in order]


def natural_partition(
    clients: Labels, num_clients: int | None = None, *, seed: int, min_examples: int = 1
) -> list[list[int]]:
    """Returns the example indices of natural clients (writers, roles, domains), as they appear.

    Args:
        clients: The client of each example.
        num_clients: C, drawn at random from the clients with enough examples; all by default.
        seed: The run's seed.
        min_examples: Minimum number of examples, at least 1; clients with fewer are dropped.

    Raises:
        ValueError: Fewer than ``num_clients`` clients have enough examples.
    """
    shards = [shard for shard in _by_label(clients).values() if len(shard) >= min_examples]
    num_chosen = len(shards) if num_clients is None else num_clients
    if min_examples < 1 or not 1 <= num_chosen <= len(shards):
        raise ValueError(
            f"{len(shards)} natural clients have at least {min_examples} examples, got num_clients "
            f"{num_clients}: ask for 1 to {len(shards)} clients, or for fewer examples."
        )
    chosen = _generator(seed).permutation(len(shards))[:num_chosen]
    return [shards[index] for index in sorted(chosen.tolist())]


def split_shard(shard: Sequence[int], fractions: Sequence[float], *, seed: int) -> list[list[int]]:
    """Splits a client's shard randomly, such as into training, validation and test data.

    The fractions sum to 1, such as (0.8, 0.1, 0.1) (FedMGDA+, Section 6.1).

    Raises:
        ValueError: The fractions are invalid or do not sum to 1, or the first part would be empty.
    """
    if min(fractions, default=-1.0) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(f"fractions must be non-negative and sum to 1, got {list(fractions)}.")
    cuts = np.round(np.cumsum(fractions)[:-1] * len(shard)).astype(int)
    parts = np.split(_generator(seed).permutation(np.asarray(shard, dtype=int)), cuts)
    if not len(parts[0]):
        raise ValueError(
            f"a shard of {len(shard)} examples leaves none for the first part of "
            f"{list(fractions)}: give the client more examples."
        )
    return [sorted(part.tolist()) for part in parts]


def _by_label(labels: Labels) -> dict[Any, list[int]]:
    indices_by_label: dict[Any, list[int]] = {}
    # iterating over a tensor yields tensors, which do not compare equal as dictionary keys
    values = labels.tolist() if isinstance(labels, np.ndarray | torch.Tensor) else labels
    for index, label in enumerate(values):
        indices_by_label.setdefault(label, []).append(index)
    return indices_by_label


def _apportion(sizes: list[int], num_shards: int) -> list[int]:
    """Returns the shards per label: one each, then repeatedly one more for the largest shards."""
    counts = [1] * len(sizes)
    for _ in range(num_shards - len(sizes)):
        largest = max(range(len(sizes)), key=lambda label: sizes[label] / counts[label])
        counts[largest] += 1
    return counts


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}.")


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "partition"))


def _check_enough(num_examples: int, num_clients: int, min_examples: int) -> None:
    if num_clients < 1 or min_examples < 1:
        raise ValueError(
            "A partition needs at least one client and one example for each, "
            f"got {num_clients} clients and min_examples {min_examples}."
        )
    if num_examples < num_clients * min_examples:
        if num_clients == 1:
            raise ValueError(
                f"{num_examples} examples are left to train on, at least {min_examples} are "
                "needed; add examples, or hold out fewer."
            )
        raise ValueError(
            f"{num_examples} examples cannot give {num_clients} clients at least {min_examples} "
            "each; use fewer clients or more examples."
        )
