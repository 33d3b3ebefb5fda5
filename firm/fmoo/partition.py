"""Partition of a data set's training samples among the clients."""

from collections.abc import Sequence

import torch

from firm.federation.partition import (
    balanced_dirichlet_partition,
    dirichlet_partition,
    iid_partition,
    natural_partition,
    shard_partition,
)
from firm.fmoo.config import SamplePartitionConfig
from firm.fmoo.task_data import TaskData


def partition(
    data: TaskData, cfg: SamplePartitionConfig, count: int, *, seed: int, name: str = "the data"
) -> dict[str, Sequence[int]]:
    """Returns the sample indices of each client, by client.

    Args:
        data: Training samples.
        cfg: Form of the partition.
        count: Number of clients; a natural partition has one per user.
        seed: Seed of the partition.
        name: Name of the data set, for messages.

    Raises:
        ValueError: The data have no users or labels to partition by, or too few samples.
    """
    kind, least, most = cfg.kind, cfg.min_samples, cfg.max_samples
    if kind == "natural":
        if data.natural is None:
            raise ValueError(f"{name} has no natural users; choose another partition.")
        users = cfg.num_users
        shards = natural_partition(data.natural.tolist(), users, seed=seed, min_examples=least)
    elif kind == "iid":
        shards = iid_partition(len(data), count, seed=seed, min_examples=least)
    else:
        if data.groups is None:
            raise ValueError(f"{name} has no labels to partition by; choose another partition.")
        groups, alpha = data.groups.tolist(), cfg.alpha
        if kind == "balanced":
            shards = balanced_dirichlet_partition(groups, count, alpha=alpha, seed=seed)
        elif kind == "dirichlet":
            shards = dirichlet_partition(groups, count, alpha=alpha, seed=seed, min_examples=least)
        else:
            per_client = cfg.shards_per_client
            shards = shard_partition(groups, count, shards_per_client=per_client, seed=seed)
        if (smallest := min(map(len, shards))) < least:
            raise ValueError(
                f"every client needs at least {least} samples, got one with {smallest} of {name}; "
                f"reduce partition.min_samples{' or the number of clients' * (count > 1)}."
            )
    if most is not None:
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.randperm(len(shard), generator=generator).tolist() for shard in shards)
        shards = [
            sorted(shard[place] for place in order[:most])
            for shard, order in zip(shards, orders, strict=True)
        ]
    if kind == "natural" and data.natural_names is not None:
        natural = data.natural
        assert natural is not None
        return {data.natural_names[int(natural[shard[0]])]: shard for shard in shards}
    return {f"client_{index}": shard for index, shard in enumerate(shards)}
