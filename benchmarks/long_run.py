"""CPU seconds of a round of a small run, and the parts of them that keep its records, by round.

    python benchmarks/long_run.py                   # 200 rounds of configs/smoke.yaml, two minutes
    python benchmarks/long_run.py --rounds 400 --tracking true   # with the files of W&B

A round is as small as it can be, so that a part that grows with the number of rounds shows.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.measure import quiet
from firm.alignment.kl_guard import KLGuard
from firm.jobs import alignment
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.loop import Logbook, Task
from firm.report import run_page
from firm.run import compose, print_table, run_cli
from firm.run.directory import Run

PARTS: dict[str, tuple[Any, str]] = {
    "page": (run_page, "write_report"),
    "alarms": (alignment, "alarms_of_rounds"),
    "guard": (KLGuard, "judge"),
    "best": (alignment._LanguageTask, "_note_utility"),
    "log": (Logbook, "log"),
    "checkpoint": (Run, "save_checkpoint"),
}
"""Functions that keep a run's records, by the heading of their column."""
SMALLEST = [
    *(("num_clients", 1), ("strategy.num_local_steps", 1), ("estimator.num_epochs", 1)),
    ("rollout.max_new_tokens", 8),
]
"""Changes to the configuration, so that a round takes little time."""
WINDOWS = {10: range(20), 50: range(33, 67), 150: range(100, 200)}
"""Rounds over which a figure is a mean, by the round in their middle."""


@dataclass(frozen=True)
class Config:
    rounds: int = 200
    """Rounds of the run."""
    tracking: bool = False
    """Also log to W&B, offline."""

    def __post_init__(self) -> None:
        if self.rounds < 200:
            raise ValueError(f"rounds must be at least 200, got {self.rounds}.")


class Clock:
    """CPU seconds of this process by round and by part."""

    def __init__(self) -> None:
        self.rounds: list[Counter[str]] = []
        self._now = Counter[str]()
        self._began = time.process_time()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, whose seconds count as those of a part."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                self._now[part] += time.process_time() - start  # type: ignore[assignment]

        return call

    def ending(self, end_round: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, at whose end a round ends."""

        def call(*arguments: Any) -> Any:
            state = end_round(*arguments)
            self._now["round"] = time.process_time() - self._began  # type: ignore[assignment]
            self.rounds.append(self._now)
            self._began, self._now = time.process_time(), Counter()
            return state

        return call

    def seconds(self, part: str, window: range) -> float:
        """Returns the mean over several rounds."""
        return sum(self.rounds[number][part] for number in window) / len(window)


def main(cfg: Config) -> None:
    quiet()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        keys = [*SMALLEST, ("rounds", cfg.rounds), ("out", Path(folder) / "run")]
        keys += [("tracking.mode", "offline")] if cfg.tracking else []
        run = compose(AlignmentConfig, [Path("configs/smoke.yaml")], keys)
        for part, (owner, name) in PARTS.items():
            function = clock.timed(part, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, function))
        ending = clock.ending(Task.end_round)
        patches.enter_context(mock.patch.object(Task, "end_round", ending))
        alignment.align(run)
    rows = []
    last = range(cfg.rounds - 100, cfg.rounds)
    for middle, window in (WINDOWS | {last[50]: last}).items():
        total = clock.seconds("round", window)
        shares = [f"{clock.seconds(part, window) / total:.1%}" for part in PARTS]
        rows.append([middle, total, *shares])
    print_table(
        "CPU seconds of a round, and shares of them, means over the rounds around it",
        ["round", "seconds", *PARTS],
        rows,
    )


if __name__ == "__main__":
    run_cli(main, Config, description=__doc__ or "")
