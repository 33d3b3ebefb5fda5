"""What it costs to hide updates from the server that adds them, beside plain uploads.

    python benchmarks/secure.py
    python benchmarks/secure.py --num_clients 1000 --num_parameters 4096 --neighbours few

Whole rounds of FedAvg in one process, whose clients return made-up updates at once. By number of
clients and of parameters: the bytes that a client sends and receives in a round, in multiples of
the plain round's too; the seconds that a client computes and that the server does, medians of three
rounds; and the largest difference of the mean from the plain one. With `--dropped` a share of the
clients is lost before it has sent its update, which costs the server most: it has to take off all
their masks.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, cast

import torch

from firm.federation import Failure, Reply, ServerState
from firm.federation.engines.engine import checked_reply, split_outcomes
from firm.federation.messages import Request, Update
from firm.federation.options.secure import MasksConfig
from firm.federation.options.secure.messages import SendMasked
from firm.federation.serialization import packed_size
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import FedAvgConfig
from firm.run import print_table

NUM_REPEATS = 3
OBJECTIVES = ("helpful", "harmless")


class Idle:
    """An engine whose clients have updates at once; implements what a round takes of ``Engine``."""

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        outcomes = []
        for number, name in enumerate(clients):
            generator = torch.Generator().manual_seed(number)
            adapter = {
                key: value + 0.01 * torch.randn(value.shape, generator=generator)
                for key, value in request.adapter.items()
            }
            content = Update(name, adapter, 100, {"num_steps": 1})
            sizes = packed_size(request.of(name)), packed_size(content)
            outcomes.append(checked_reply(request, name, content, *sizes))
        return split_outcomes(outcomes)


class Watched:
    """Times an engine, and loses some clients before they have sent their updates."""

    def __init__(self, engine: Any, lost: Sequence[str] = ()) -> None:
        self._engine, self._lost = engine, set(lost)
        self.seconds = 0.0

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        begin = time.perf_counter()
        replies, failures = self._engine.map(request, clients)
        self.seconds += time.perf_counter() - begin
        if not isinstance(request, SendMasked):
            return replies, failures
        lost = [Failure(name, "lost") for name in clients if name in self._lost]
        return [reply for reply in replies if reply.client not in self._lost], [*failures, *lost]


def measured(
    num_clients: int, num_parameters: int, cfg: FedAvgConfig, lost: Sequence[str] = ()
) -> tuple[Any, dict[str, float]]:
    """Returns the adapter after a round, and what the round took."""
    start = {"adapter": torch.zeros(num_parameters)}
    state = ServerState(start, objectives=OBJECTIVES, seed=0)
    names = [f"client_{index:04d}" for index in range(num_clients)]
    runs, after, idle = [], state, Idle()
    for _ in range(NUM_REPEATS):
        engine: Any = Watched(cfg.around(cast(Any, idle), len(names)), lost)
        begin = time.perf_counter()
        after, rows = fedavg(state, names, engine, cfg)
        seconds = time.perf_counter() - begin
        runs.append(
            {
                "up": rows["round"]["bytes_up"] / num_clients,
                "down": rows["round"]["bytes_down"] / num_clients,
                "client": engine.seconds / num_clients,
                "server": seconds - engine.seconds,
            }
        )
    return after.adapter["adapter"], {key: median(run[key] for run in runs) for key in runs[0]}


def row(num_clients: int, num_parameters: int, share_dropped: float, masks: MasksConfig) -> list:
    num_lost = int(share_dropped * num_clients)
    lost = [f"client_{index:04d}" for index in range(num_lost)]
    _, plain = measured(num_clients, num_parameters, FedAvgConfig())
    cfg = FedAvgConfig(secure="masks", masks=masks)
    mean, secure = measured(num_clients, num_parameters, cfg, lost)
    exact = torch.zeros(num_parameters, dtype=torch.float64)
    for number in range(num_lost, num_clients):
        generator = torch.Generator().manual_seed(number)
        exact += 0.01 * torch.randn(num_parameters, generator=generator)
    error = (mean.double() - exact / (num_clients - num_lost)).abs().max().item()
    return [
        f"{num_clients:,}",
        f"{num_lost:,}",
        f"{num_parameters:,}",
        f"{plain['up']:,.0f}",
        f"{secure['up']:,.0f}",
        f"{secure['up'] / plain['up']:.2f}",
        f"{secure['down'] / plain['down']:.2f}",
        f"{secure['client'] - plain['client']:.3f}",
        f"{secure['server'] - plain['server']:.3f}",
        f"{error:.1e}",
    ]


HEADER = [
    *("clients", "lost", "parameters", "plain up, bytes", "masked up, bytes", "up / plain"),
    *("down / plain", "client + s", "server + s", "error"),
]


def main(
    sizes: Sequence[int], counts: Sequence[int], dropped: Sequence[float], masks: MasksConfig
) -> None:
    rows = [
        row(count, size, share, masks)
        for size in sizes
        for count in counts
        for share in dropped
        if int(share * count) or not share
    ]
    print_table("a round under masks beside a plain one, by client", HEADER, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_parameters", type=int, nargs="+", default=[4_096, 65_536, 1_048_576])
    parser.add_argument("--num_clients", type=int, nargs="+", default=[3, 10, 100])
    parser.add_argument("--dropped", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--num_colluders", type=int, default=None)
    parser.add_argument("--neighbours", choices=["all", "few"], default="all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    masks = MasksConfig(num_colluders=given.num_colluders, neighbours=given.neighbours)
    main(given.num_parameters, given.num_clients, given.dropped, masks)
