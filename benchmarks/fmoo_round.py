"""Seconds of a round of the classic package beside a plain PyTorch loop, and memory by clients.

    python benchmarks/fmoo_round.py                      # two-digit images, what the clone has
    python benchmarks/fmoo_round.py --data MNIST_FOLDER  # MultiMNIST

100 clients, Dirichlet 0.3 over the pairs of labels, 10 a round, 10 local steps of 128 images turned
by up to 25 degrees, on the LeNet of FedCMOO. Metrics are losses and accuracies on the test samples
and on the training samples of the round's clients: of every round in the plain loop, as is usual,
and of every 10th in FIRM.

The plain loop is written as a researcher would: a `Dataset` and a `DataLoader` for each client, a
copy of the model for each local training, torch's default layout. The server's mathematics
(compression, Gram matrix, weights) is FIRM's own in both, so that the difference is that of the
clients. All have one thread of torch, or two workers with one each. Rounds of all variants are
interleaved; every figure is a median, without the first round. Two workers can gain no more than
two threads that only hash, which is told beside the load: where others work, it may be nothing.

Memory is what the process has at most while clients are made and one round of FedCMOO runs on two
workers, beyond what it had with the data and the model in memory; each number of clients in a
process of its own, 480 samples a client.
"""

import argparse
import copy
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, Dataset

from firm.federation import LocalEngine, ServerState
from firm.federation.fedcmoo.approx_gram import (
    broadcast,
    one_way_gram,
    two_way_gram,
    two_way_reply,
)
from firm.federation.partition import balanced_dirichlet_partition
from firm.federation.rounds import sample_clients
from firm.federation.strategies import STRATEGIES
from firm.federation.strategy_configs import FedCmooConfig, FedCmooPrefConfig, FsmgdaConfig
from firm.fmoo import (
    DatasetConfig,
    LocalConfig,
    ModelConfig,
    Splits,
    SupervisedClient,
    TaskData,
    Workspace,
    build_model,
    load_data,
)
from firm.gradients import gram_matrix
from firm.gradients.compression import LowRankCompressor
from firm.run import print_table
from firm.solvers import fedcmoo_pref_weights, fedcmoo_weights, min_norm_weights

NUM_CLIENTS, PER_ROUND, STEPS, BATCH, ALPHA, ROTATION = 100, 10, 10, 128, 0.3, 25.0
LEARNING_RATE, SERVER_LEARNING_RATE = 0.1, 1.2
EVALUATE_EVERY = 10  # FIRM's rounds between two evaluations
CLIENT_COUNTS, SAMPLES_PER_CLIENT = (100, 10_000), 480

COMMON = {
    "num_local_steps": STEPS,
    "clients_per_round": PER_ROUND,
    "server_learning_rate": SERVER_LEARNING_RATE,
}
ALGORITHMS: dict[str, Any] = {
    "FSMGDA": FsmgdaConfig(**COMMON),
    "FedCMOO, one-way": FedCmooConfig(**COMMON, communication="one_way"),
    "FedCMOO, two-way": FedCmooConfig(**COMMON),
    "FedCMOO-Pref": FedCmooPrefConfig(**COMMON),
}

PLAIN, ENGINES = "plain", {1: "FIRM, 1 worker", 2: "FIRM, 2 workers"}

Variant = Callable[[], tuple[float, float]]
"""Runs one round; returns the seconds of its training and those of its metrics."""


def main(data: str | None, rounds: int) -> None:
    torch.set_num_threads(1)
    print_share("start")
    splits = load_splits(data)
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        variants = all_variants(splits, stack)
        for _ in range(1 + rounds):
            for key, run in variants.items():
                seconds.setdefault(key, []).append(run())
    print_share("end")
    print(f"{len(splits.train):,} training and {len(splits.test):,} test samples, {rounds} rounds")
    print_seconds({key: each[1:] for key, each in seconds.items()})
    print_memory(data)


def print_share(when: str) -> None:
    """Prints how busy the machine is, and what is left of it for a second thread."""
    block = bytes(50_000_000)  # hashing it frees the interpreter's lock

    def seconds(num_threads: int) -> float:
        with ThreadPoolExecutor(num_threads) as pool:
            start = time.perf_counter()
            list(pool.map(lambda _: hashlib.sha256(block).digest(), range(12)))
            return time.perf_counter() - start

    gain = median(seconds(1) / seconds(2) for _ in range(3))
    print(
        f"{when}: load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, two threads do "
        f"{gain:.2f} times the work of one",
        flush=True,
    )


def load_splits(data: str | None) -> Splits:
    name = "multi_mnist" if data else "two_digits"
    return load_data(DatasetConfig(name, path=data))


def all_variants(splits: Splits, stack: ExitStack) -> dict[tuple[str, str], Variant]:
    """Returns the variants by algorithm and name; the stack closes their engines."""
    assert splits.train.groups is not None
    groups = splits.train.groups.tolist()
    shards = balanced_dirichlet_partition(groups, NUM_CLIENTS, alpha=ALPHA, seed=0)
    indices = [torch.as_tensor(shard) for shard in shards]
    workspace = new_workspace(splits.train)
    clients = new_clients(workspace, indices)
    plain = PlainLoop(splits, indices)
    variants: dict[tuple[str, str], Variant] = {}
    for name, cfg in ALGORITHMS.items():
        variants[name, PLAIN] = plain_variant(plain, cfg)
        for workers, label in ENGINES.items():
            engine = stack.enter_context(closing(LocalEngine(clients, num_workers=workers)))
            variants[name, label] = our_variant(
                workspace, clients, indices, engine, cfg, splits.test
            )
    return variants


# --- FIRM -----------------------------------------------------------------------------------------


def new_workspace(train: TaskData) -> Workspace:
    cfg = LocalConfig(lr=LEARNING_RATE, batch_size=BATCH, rotation=ROTATION)
    return Workspace(build_model(ModelConfig("lenet"), train, seed=0), train, cfg)


def new_clients(workspace: Workspace, indices: Sequence[torch.Tensor]) -> list[SupervisedClient]:
    return [
        SupervisedClient(f"client_{i}", workspace, shard, seed=0) for i, shard in enumerate(indices)
    ]


def our_variant(
    workspace: Workspace,
    clients: Sequence[SupervisedClient],
    indices: Sequence[torch.Tensor],
    engine: LocalEngine,
    cfg: Any,
    test: TaskData,
) -> Variant:
    names = [client.name for client in clients]
    state = ServerState(clients[0].adapter(), clients[0].objectives, seed=0)

    def run() -> tuple[float, float]:
        nonlocal state
        start = time.perf_counter()
        state, _ = STRATEGIES[cfg.name](state, names, engine, cfg)
        trained = time.perf_counter()
        workspace.load(state.adapter)
        workspace.evaluate(test)
        sampled = [
            names.index(name) for name, last in state.accepted.items() if last == state.round
        ]
        workspace.evaluate(workspace.data, torch.cat([indices[i] for i in sampled]))
        return trained - start, time.perf_counter() - trained

    return run


# --- The plain loop -------------------------------------------------------------------------------


class PlainLeNet(nn.Module):
    """FedCMOO's network, in torch's default layout."""

    def __init__(self, num_channels: int, size: int, num_objectives: int) -> None:
        super().__init__()
        flat = 15 * ((size // 2 - 2) // 2) ** 2
        self.encoder = nn.Sequential(
            *(nn.Conv2d(num_channels, 10, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 15, 3), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(flat, 50), nn.ReLU(), nn.Dropout(0.5)),
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Dropout(0.5), nn.Linear(50, 10))
            for _ in range(num_objectives)
        )

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        features = self.encoder(images)
        return [head(features) for head in self.heads]


class PlainImages(Dataset):
    def __init__(self, data: TaskData, indices: torch.Tensor, mean: float, std: float) -> None:
        self.data, self.indices, self.mean, self.std = data, indices, mean, std

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = self.indices[place]
        image = (self.data.inputs[index].float() / 255 - self.mean) / self.std
        return image, self.data.targets[index]


def turned(images: torch.Tensor) -> torch.Tensor:
    angles = (2 * torch.rand(len(images)) - 1) * torch.pi * ROTATION / 180
    cosines, sines, zeros = angles.cos(), angles.sin(), torch.zeros_like(angles)
    rows = [torch.stack([cosines, -sines, zeros], 1), torch.stack([sines, cosines, zeros], 1)]
    grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def losses_of(model: PlainLeNet, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    pairs = zip(model(images), labels.unbind(1), strict=True)
    return torch.stack([functional.cross_entropy(logits, column) for logits, column in pairs])


class PlainLoop:
    """A federation as a script writes it: the clients' loaders, and no more."""

    def __init__(self, splits: Splits, indices: Sequence[torch.Tensor]) -> None:
        pixels = splits.train.inputs.float() / 255
        self.scale = pixels.mean().item(), pixels.std().item()
        self.splits, self.indices = splits, indices
        self.loaders = [
            DataLoader(
                PlainImages(splits.train, shard, *self.scale),
                batch_size=BATCH,
                shuffle=True,
                drop_last=len(shard) >= BATCH,
            )
            for shard in indices
        ]
        self.test = DataLoader(
            PlainImages(splits.test, torch.arange(len(splits.test)), *self.scale), batch_size=BATCH
        )
        shape = splits.train.inputs.shape
        self.num_objectives = len(splits.train.objectives)
        self.new_model = lambda: PlainLeNet(shape[1], shape[2], self.num_objectives)

    def batches(self, client: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while count > 0:
            for images, labels in self.loaders[client]:
                yield turned(images), labels
                count -= 1
                if count == 0:
                    return

    def update(self, model: PlainLeNet, client: int, weights: torch.Tensor) -> torch.Tensor:
        """Returns what local training on the weighted sum adds to the parameters, shape [d]."""
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr=LEARNING_RATE)
        for images, labels in self.batches(client, STEPS):
            optimizer.zero_grad()
            (weights @ losses_of(local, images, labels)).backward()
            optimizer.step()
        return vector_of(local) - vector_of(model)

    def jacobian(self, model: PlainLeNet, client: int) -> torch.Tensor:
        ((images, labels),) = self.batches(client, 1)
        rows = []
        for loss in losses_of(model, images, labels):
            model.zero_grad()
            loss.backward(retain_graph=True)
            grads = [p.grad for p in model.encoder.parameters() if p.grad is not None]
            rows.append(torch.cat([grad.flatten() for grad in grads]))
        return torch.stack(rows)

    @torch.no_grad()
    def evaluate(self, model: PlainLeNet, loader: DataLoader) -> torch.Tensor:
        model.eval()
        sums, count = torch.zeros(2, self.num_objectives), 0
        for images, labels in loader:
            for j, logits in enumerate(model(images)):
                loss = functional.cross_entropy(logits, labels[:, j], reduction="sum")
                sums[0, j] += loss.item()
                sums[1, j] += (logits.argmax(1) == labels[:, j]).sum().item()
            count += len(images)
        model.train()
        return sums / count

    def fsmgda(self, model: PlainLeNet, sampled: Sequence[int], cfg: FsmgdaConfig) -> torch.Tensor:
        weights = torch.eye(self.num_objectives)
        updates = [[self.update(model, client, row) for client in sampled] for row in weights]
        means = torch.stack([torch.stack(each).mean(0) for each in updates])
        num_shared = sum(p.numel() for p in model.encoder.parameters())
        found = min_norm_weights(gram_matrix(means[:, :num_shared]))
        return cfg.server_learning_rate * found.float() @ means

    def fedcmoo(
        self, model: PlainLeNet, sampled: Sequence[int], cfg: FedCmooConfig | FedCmooPrefConfig
    ) -> torch.Tensor:
        gram = self.gram([self.jacobian(model, client) for client in sampled], cfg)
        if isinstance(cfg, FedCmooPrefConfig):
            loaders = [self.loaders[client] for client in sampled]
            losses = torch.stack([self.evaluate(model, loader)[0] for loader in loaders]).mean(0)
            multiples, least = np.ones(len(gram)), 1 / (5 * len(gram))
            found = fedcmoo_pref_weights(gram.numpy(), losses.numpy(), multiples, min_weight=least)
            weights = torch.from_numpy(found).float()
        else:
            first = torch.full((len(gram),), 1 / len(gram), dtype=torch.float64)
            weights = fedcmoo_weights(
                first, gram, step_size=cfg.step_size, num_steps=cfg.num_steps, normalize=True
            ).float()
        updates = [self.update(model, client, weights) for client in sampled]
        return cfg.server_learning_rate * torch.stack(updates).mean(0)

    def gram(
        self, jacobians: Sequence[torch.Tensor], cfg: FedCmooConfig | FedCmooPrefConfig
    ) -> torch.Tensor:
        generator, compressor = torch.Generator().manual_seed(0), LowRankCompressor()
        messages = [compressor.compress(rows, generator=generator) for rows in jacobians]
        if cfg.communication == "one_way":
            return one_way_gram(messages)
        answer = broadcast(messages, compressor, generator=generator)
        pairs = zip(jacobians, messages, strict=True)
        return two_way_gram(messages, [two_way_reply(rows, m, answer) for rows, m in pairs])


def vector_of(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def plain_variant(plain: PlainLoop, cfg: Any) -> Variant:
    torch.manual_seed(0)
    model, names, rounds = plain.new_model(), [str(i) for i in range(NUM_CLIENTS)], 0
    step: Callable[..., torch.Tensor] = (
        plain.fsmgda if isinstance(cfg, FsmgdaConfig) else plain.fedcmoo
    )

    def run() -> tuple[float, float]:
        nonlocal rounds
        rounds += 1
        start = time.perf_counter()
        drawn = sample_clients(names, seed=0, round_number=rounds, count=PER_ROUND)
        sampled = [int(name) for name in drawn]
        vector = vector_of(model) + step(model, sampled, cfg)
        vector_to_parameters(vector, model.parameters())
        trained = time.perf_counter()
        plain.evaluate(model, plain.test)
        for client in sampled:
            plain.evaluate(model, plain.loaders[client])
        return trained - start, time.perf_counter() - trained

    return run


# --- Memory ---------------------------------------------------------------------------------------


def memory(data: str | None, num_clients: int) -> tuple[float, float]:
    """Returns MB of the process before there are clients, and what it needs beyond (Linux)."""
    torch.set_num_threads(1)
    train = load_splits(data).train
    workspace = new_workspace(train)
    run_round(new_clients(workspace, [torch.arange(SAMPLES_PER_CLIENT)] * PER_ROUND))  # warms up
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = _status_mb("VmRSS")
    generator = torch.Generator().manual_seed(0)
    run_round(
        new_clients(
            workspace,
            [
                torch.randint(len(train), (SAMPLES_PER_CLIENT,), generator=generator)
                for _ in range(num_clients)
            ],
        )
    )
    return before, _status_mb("VmHWM") - before


def run_round(clients: Sequence[SupervisedClient]) -> None:
    names = [client.name for client in clients]
    state = ServerState(clients[0].adapter(), clients[0].objectives, seed=0)
    with closing(LocalEngine(clients, num_workers=2)) as engine:
        cfg = ALGORITHMS["FedCMOO, two-way"]
        STRATEGIES[cfg.name](state, names, engine, cfg)


def _status_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(kib) * 1024 / 1e6


# --- Tables ---------------------------------------------------------------------------------------


def print_seconds(seconds: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    """Seconds a round, and how many times as long the plain loop takes."""
    training = {key: median(each[0] for each in rows) for key, rows in seconds.items()}
    metrics = {key: median(each[1] for each in rows) for key, rows in seconds.items()}
    with_metrics = {
        key: training[key] + metrics[key] / (1 if key[1] == PLAIN else EVALUATE_EVERY)
        for key in seconds
    }
    print_table(
        "Seconds a round",
        ["", "", "training", "one evaluation", "training and metrics"],
        [[*key, training[key], metrics[key], with_metrics[key]] for key in seconds],
    )
    columns = (training, metrics, with_metrics)
    print_table(
        "Ratio of the seconds",
        ["", "", "training", "one evaluation", "training and metrics"],
        [
            [name, f"{PLAIN} / {label}"]
            + [f"{column[name, PLAIN] / column[name, label]:.2f}" for column in columns]
            for name in ALGORITHMS
            for label in ENGINES.values()
        ],
    )


def print_memory(data: str | None) -> None:
    # not at the top, since the new process imports this file and would count the language models
    from benchmarks.measure import in_own_process

    rows = []
    for count in CLIENT_COUNTS:
        before, more = in_own_process(memory, data, count)
        rows.append([f"{count:,} clients", f"{before:.0f}", f"{more:.1f}"])
    print_table("Memory in MB", ["", "before", "clients and a round"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Seconds of a round, and memory by clients.")
    parser.add_argument("--data", help="folder or .npz of MNIST; two-digit images without it")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are timed")
    main(**vars(parser.parse_args()))
