"""Cost of a federation by its number of clients, of which a few train in every round.

    python benchmarks/many_clients.py                                       # ten minutes
    python benchmarks/many_clients.py --clients [50,100000] --sampled 50 --prompts 200000 --batch 2

Every run is `firm align` with configs/smoke.yaml in a process of its own, on the same prompts, so
that runs differ by their number of clients only. The first number is the one that ratios refer to.
"""

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.measure import peak_resident, quiet
from firm.jobs import alignment
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.loop import Task
from firm.run import compose, print_table, run_cli

PROMPTS = Path("firm/miniature/checkpoints/prompts_train.jsonl")


@dataclass(frozen=True)
class Config:
    clients: tuple[int, ...] = (10, 1_000, 5_000)
    """Numbers of clients."""
    sampled: int = 8
    """Clients per round."""
    rounds: int = 4
    """Rounds of a run."""
    prompts: int = 46_080
    """Training prompts, divided among the clients."""
    batch: int = 8
    """Prompts per local step; a client needs as many."""


class Cost(NamedTuple):
    """Costs of a run."""

    memory: float
    """Peak resident memory in GB."""
    start: float
    """CPU seconds until the first round."""
    round: float
    """CPU seconds of a round: the mean of all but the first, which imports modules."""
    states: float
    """MB of the clients' states and the checkpoints."""
    disk: float
    """MB of the run's folder."""


def main(cfg: Config) -> None:
    costs = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        rows = PROMPTS.read_text(encoding="utf-8").splitlines()
        copies = math.ceil(cfg.prompts / len(rows))
        data.write_text("\n".join((rows * copies)[: cfg.prompts]), encoding="utf-8")
        for count in cfg.clients:
            out = Path(folder) / f"run_{count}"
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                costs[count] = pool.apply(cost_of_run, (cfg, count, data, out))
    print_table(
        f"{cfg.sampled} clients in each of {cfg.rounds} rounds, {cfg.prompts:,} prompts",
        ["clients", "memory, GB", "start, s", "round, s", "states, MB", "folder, MB"],
        [[f"{count:,}", *(f"{value:.2f}" for value in cost)] for count, cost in costs.items()],
    )
    first, *others = costs.values()
    ratios = [
        [f"{new / old:.2f}" for new, old in zip(other, first, strict=True)] for other in others
    ]
    print_table(
        f"ratios to {cfg.clients[0]:,} clients",
        ["clients", "memory", "start", "round", "states", "folder"],
        [[f"{count:,}", *row] for count, row in zip(cfg.clients[1:], ratios, strict=True)],
    )


def cost_of_run(cfg: Config, num_clients: int, data: Path, out: Path) -> Cost:
    """Returns the costs of one run in this process, which has done nothing else."""
    quiet()
    ends = list[float]()
    keys: list[tuple[str, Any]] = [
        ("num_clients", num_clients),
        ("rounds", cfg.rounds),
        ("strategy.clients_per_round", min(cfg.sampled, num_clients)),
        ("data.train.source", str(data)),
        ("estimator.batch_size", cfg.batch),
        ("estimator.minibatch_size", max(1, cfg.batch // 2)),
        ("out", out),
    ]
    run = compose(AlignmentConfig, [Path("configs/smoke.yaml")], keys)
    with (
        mock.patch.object(Task, "begin", _timed(Task.begin, ends)),
        mock.patch.object(Task, "end_round", _timed(Task.end_round, ends)),
    ):
        alignment.align(run)
    states = sum(_bytes(out / name) for name in ("checkpoints", "clients"))
    start, first, *_, last = ends
    mean = (last - first) / (len(ends) - 2)
    return Cost(peak_resident() / 1e9, start, mean, states / 1e6, _bytes(out) / 1e6)


def _timed(function: Callable[..., Any], ends: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        ends.append(time.process_time())
        return result

    return call


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    run_cli(main, Config, description=__doc__ or "")
