"""CPU seconds of a round of the classic task, with the gradients of all clients in one pass.

    python benchmarks/stacked_classic.py   # six minutes

Engine stacked beside engine local. The table's data have the shape of River Flow: 64 features and
eight values to predict. LeNet, on the shipped two-digit images, is stacked here all the same, to
show what convolutions gain or lose. Ten local steps; rounds are interleaved on one thread; every
figure is a median, and the first round of each is left out.
"""

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.measure import interleaved, quiet
from firm.federation import ServerState
from firm.federation.engines import LocalEngine, StackedEngine
from firm.federation.strategies import STRATEGIES, StrategyConfig
from firm.federation.strategy_configs import FedAvgConfig, FirmConfig
from firm.fmoo import (
    DatasetConfig,
    LocalConfig,
    ModelConfig,
    SupervisedClient,
    TaskData,
    Workspace,
    build_model,
    load_data,
)
from firm.fmoo import workspace as workspaces
from firm.run import print_table

REPEATS = 3
CLIENTS = (10, 100)
STEPS = 10
NUM_SAMPLES, NUM_FEATURES, NUM_OBJECTIVES = 4000, 64, 8
CASES = (
    ("linear", 10, FedAvgConfig(num_local_steps=STEPS)),
    ("linear", 10, FirmConfig(num_local_steps=STEPS)),
    ("mlp", 10, FedAvgConfig(num_local_steps=STEPS)),
    ("mlp", 10, FirmConfig(num_local_steps=STEPS)),
    ("mlp", 64, FirmConfig(num_local_steps=STEPS)),
    ("lenet", 10, FirmConfig(num_local_steps=STEPS)),
    ("lenet", 128, FirmConfig(num_local_steps=STEPS)),
)
"""Model, samples of a batch, strategy."""


def main() -> None:
    quiet()
    rows = []
    for model, batch_size, cfg in CASES:
        data = load_data(DatasetConfig()).train if model == "lenet" else table()
        for count in CLIENTS:
            # convolutions too, which a stacked engine would leave to their clients
            own, workspaces.is_stackable = workspaces.is_stackable, lambda model, losses: True
            rounds = {
                engine.__name__: round_of(engine, model, data, count, batch_size, cfg)
                for engine in (StackedEngine, LocalEngine)
            }
            workspaces.is_stackable = own
            taken = interleaved(rounds, repeats=REPEATS + 1)
            stacked, local = (median(seconds[1:]) for seconds in taken.values())
            figures = (f"{stacked:.3f}", f"{local:.3f}", f"{stacked / local:.2f}")
            rows.append([f"{model}, {cfg.name}, {count} clients, batch {batch_size}", *figures])
    print_table("A round", ["", "stacked, s", "local, s", "stacked / local"], rows)


def table() -> TaskData:
    """Returns values that are linear in the features, with noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    slopes = torch.randn(NUM_FEATURES, NUM_OBJECTIVES, generator=generator) / NUM_FEATURES**0.5
    noise = torch.randn(NUM_SAMPLES, NUM_OBJECTIVES, generator=generator)
    names = tuple(f"value_{index}" for index in range(NUM_OBJECTIVES))
    return TaskData(inputs, inputs @ slopes + noise, names, ("squared",) * NUM_OBJECTIVES)


def round_of(
    engine: type[LocalEngine],
    model: str,
    data: TaskData,
    count: int,
    batch_size: int,
    cfg: StrategyConfig,
) -> Callable[[], object]:
    """Returns a round, always from the same parameters."""
    net = build_model(ModelConfig(model, dropout=0.0), data, seed=0)
    workspace = Workspace(net, data, LocalConfig(lr=0.02, batch_size=batch_size))
    shards = torch.arange(len(data)).repeat(4).chunk(count)
    clients = [
        SupervisedClient(f"client_{index}", workspace, shard, seed=0)
        for index, shard in enumerate(shards)
    ]
    state = ServerState(clients[0].adapter(), data.objectives, seed=0)
    names, runs = [client.name for client in clients], engine(clients)
    return lambda: STRATEGIES[cfg.name](state, names, runs, cfg)


if __name__ == "__main__":
    main()
