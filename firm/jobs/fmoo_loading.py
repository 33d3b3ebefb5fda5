"""Partitions the data of a classic study and builds its clients."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from firm.federation.engine_registry import ENGINES
from firm.federation.partition import (
    balanced_dirichlet_partition,
    dirichlet_partition,
    iid_partition,
    natural_partition,
    shard_partition,
    split_shard,
)
from firm.federation.strategy_configs import ScalarConfig
from firm.fmoo.client import SupervisedClient
from firm.fmoo.data import Splits
from firm.fmoo.federation import SupervisedFederation
from firm.fmoo.models import build_model
from firm.fmoo.task_data import TaskData
from firm.fmoo.workspace import Workspace
from firm.jobs.fmoo_config import AlgorithmConfig, ClassicConfig, attack_on


def federate(
    cfg: ClassicConfig, algorithm: AlgorithmConfig, splits: Splits, seed: int
) -> SupervisedFederation:
    """Returns an algorithm's clients with their samples, and the model that they share."""
    train, fraction = splits.train, cfg.partition.test_fraction
    shards, held_out = partition(train, cfg, algorithm.num_clients or cfg.num_clients, seed), {}
    if fraction:
        for index, (name, shard) in enumerate(shards.items()):
            own, kept = split_shard(shard, (1 - fraction, fraction), seed=seed + index)
            shards[name], held_out[name] = own, torch.tensor(kept, dtype=torch.int64)
    if algorithm.is_centralised:
        shards = {"everyone": [index for shard in shards.values() for index in shard]}
    names, attack = list(shards), attack_on(algorithm, cfg)
    if strangers := set(attack.clients) - set(names):
        raise ValueError(
            f"attack.clients must be among the clients {names[0]} to {names[-1]}, got "
            f"{min(strangers)!r}."
        )
    workspace = Workspace(build_model(cfg.model, train, seed=seed), train, algorithm.local)
    indices = {name: torch.as_tensor(shard) for name, shard in shards.items()}
    count = len(train.objectives)
    num_served = count if algorithm.is_centralised else cfg.partition.objectives_per_client or count
    if num_served > count:
        raise ValueError(
            f"partition.objectives_per_client must be at most {count}, the number of objectives of "
            f"{cfg.data.name}, got {num_served}."
        )
    clients = [
        SupervisedClient(
            name,
            workspace,
            shard,
            seed=seed,
            served=sorted((place + step) % count for step in range(num_served)),
            attack=attack,
        )
        for place, (name, shard) in enumerate(indices.items())
    ]
    strategy = algorithm.strategy
    if attack.kind != "none":
        strategy = replace(strategy, always=attack.clients)
    # weighted-sum training of a linear model runs as one loop over arrays (``weighted_steps``)
    is_loop = workspace.linear_heads is not None and isinstance(strategy, ScalarConfig)
    name = cfg.engine or ("stacked" if workspace.is_stackable and not is_loop else "local")
    engine = ENGINES[name](clients, num_workers=cfg.num_workers or os.cpu_count() or 1)
    return SupervisedFederation(strategy, workspace, clients, engine, indices, held_out)


def partition(
    data: TaskData, cfg: ClassicConfig, count: int, seed: int
) -> dict[str, Sequence[int]]:
    """Returns the sample indices of each of `count` clients, by client."""
    kind, least, most = cfg.partition.kind, cfg.partition.min_samples, cfg.partition.max_samples
    if kind == "natural":
        if data.natural is None:
            raise ValueError(f"{cfg.data.name} has no natural users; choose another partition.")
        users = cfg.partition.num_users
        shards = natural_partition(data.natural.tolist(), users, seed=seed, min_examples=least)
    elif kind == "iid":
        shards = iid_partition(len(data), count, seed=seed, min_examples=least)
    else:
        if data.groups is None:
            raise ValueError(
                f"{cfg.data.name} has no labels to partition by; choose another partition."
            )
        groups, alpha = data.groups.tolist(), cfg.partition.alpha
        if kind == "balanced":
            shards = balanced_dirichlet_partition(groups, count, alpha=alpha, seed=seed)
        elif kind == "dirichlet":
            shards = dirichlet_partition(groups, count, alpha=alpha, seed=seed, min_examples=least)
        else:
            per_client = cfg.partition.shards_per_client
            shards = shard_partition(groups, count, shards_per_client=per_client, seed=seed)
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
