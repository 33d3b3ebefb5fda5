"""What the benchmarks share: a quiet start on one thread, calls timed in turns, and rounds."""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from firm.federation import ServerState
from firm.federation.strategies import STRATEGIES
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_loading import (
    LoadedRun,
    build_clients,
    common_calibrations,
    own_engine,
)

Result = TypeVar("Result")


def quiet() -> None:
    """Sets one thread of torch, and hides the bars and warnings of transformers."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def interleaved(
    methods: Mapping[str, Callable[[], object]], *, repeats: int
) -> dict[str, list[float]]:
    """Returns the CPU seconds of every call of each method, called in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            start = time.process_time()
            method()
            seconds[name].append(time.process_time() - start)
    return seconds


def one_round(loaded: LoadedRun, cfg: AlignmentConfig) -> Callable[[], dict[str, Any]]:
    """Returns a round of a run, always from its first adapter, that gives the round's metrics."""
    calibrations = common_calibrations(loaded, cfg, Path(os.devnull))
    names = client_names(cfg)
    clients = build_clients(loaded, cfg, calibrations, names)
    engine = own_engine(clients, cfg, loaded.processes)
    state = ServerState(loaded.start, objectives=tuple(cfg.rewards), seed=cfg.seed)

    def take() -> dict[str, Any]:
        _, row = STRATEGIES[cfg.strategy.name](state, names, engine, cfg.strategy)
        if len(row["clients"]) < len(names):
            raise RuntimeError(f"clients failed: {row['failures']}")
        return row

    return take


def in_own_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Returns the result of a function that runs in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def reset_peak_resident() -> None:
    """Starts a new measurement of `peak_resident`."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def peak_resident() -> int:
    """Returns the most bytes that this process had resident, since it began or since a reset.

    getrusage counts its parent's.
    """
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s]
    return 1024 * int(line.split()[1])
