"""The training loop of both kinds of runs: trains, evaluates, logs and checkpoints rounds."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from firm.base.state import State
from firm.base.user_code import user_code
from firm.federation.engines.engine import Engine
from firm.federation.rounds import with_retries
from firm.federation.server import ServerState
from firm.federation.strategies import STRATEGIES, StrategyConfig
from firm.run.directory import Run
from firm.run.rows import Row, valid_rows
from firm.run.tracking import SeriesTracker


class Logbook:
    """Writes a run's rows to its directory and to W&B, and keeps the valid ones in memory.

    Args:
        run: The run, open for writing.
        tracker: Also receives the rows.
    """

    def __init__(self, run: Run, tracker: SeriesTracker) -> None:
        self.run = run
        self.rows: list[Row] = run.rows()
        """Rows so far, including earlier sessions."""
        self._tracker = tracker

    def log(self, row: Row) -> None:
        """Logs one row of metrics.jsonl."""
        self.run.log(row)
        self._tracker.log(row)
        self.rows += valid_rows([row])[0]

    def log_samples(self, rows: Iterable[Row]) -> None:
        """Logs rows of samples.jsonl."""
        rows = list(rows)
        self.run.log_samples(rows)
        self._tracker.log_samples(rows)

    def repeat_to_tracker(self) -> None:
        """Logs the rows of earlier sessions to the tracker, where each session is a run.

        Alarms of their rounds are not raised again.
        """
        for row in self.rows:
            is_round = row["kind"] == "round"
            self._tracker.log({k: v for k, v in row.items() if not (is_round and k == "alarms")})
        self._tracker.log_samples(self.run.samples())


@dataclass(frozen=True)
class RoundResult:
    """Result of a round."""

    rows: Sequence[Row]
    """Rows to log."""
    is_kept: bool = True
    """True if a checkpoint is to be written."""
    quality: float | None = None
    """Quality of the model by which the best checkpoint is chosen, larger is better; None if not
    measured."""
    state: ServerState | None = None
    """State to continue from; None: the state after the round."""


class Task(ABC):
    """Hooks of one kind of run in the training loop: start, evaluation, checkpoint and display.

    Args:
        book: The run's logs.
        keep_last: Number of latest checkpoints to keep, in addition to the best one.
    """

    def __init__(self, book: Logbook, *, keep_last: int) -> None:
        self.book = book
        self._keep_last = keep_last

    def begin(self, engine: Engine) -> ServerState:
        """Returns the server state of the last checkpoint, or a fresh one."""
        if checkpoint := self.book.run.latest_checkpoint():
            state = ServerState.from_state(checkpoint[1]["server"])
            engine.restore_client_states(checkpoint[1]["clients"])
            self.restore(checkpoint[1])
            self.book.repeat_to_tracker()
        else:
            state, quality = self.start()
            self._keep(engine, state, quality)
        self.show(state, ())
        return state

    def end_round(
        self, engine: Engine, before: ServerState, after: ServerState, metrics: dict[str, Any]
    ) -> ServerState:
        """Evaluates, logs, checkpoints and displays the round that has just ended.

        Returns the state to continue from.
        """
        measured = self.measure(before, after, metrics)
        after = measured.state or after
        for row in measured.rows:
            self.book.log(row)
        if measured.is_kept:
            self._keep(engine, after, measured.quality)
        self.show(after, measured.rows)
        return after

    def _keep(self, engine: Engine, state: ServerState, quality: float | None) -> None:
        content = {
            "server": state.to_state(),
            "clients": engine.client_states(state.accepted),
            **self.content(),
        }
        self.book.run.save_checkpoint(
            state.round, content, keep_last=self._keep_last, quality=quality
        )

    @abstractmethod
    def start(self) -> tuple[ServerState, float | None]:
        """Logs the first rows of a fresh run; returns the initial server state and its quality."""

    @abstractmethod
    def restore(self, content: State) -> None:
        """Restores the value of ``content`` from the last checkpoint."""

    def content(self) -> State:
        """Returns the state to checkpoint in addition to server and client states."""
        return {}

    @abstractmethod
    def is_done(self, state: ServerState) -> bool:
        """Returns whether all rounds are done."""

    @abstractmethod
    def measure(
        self, before: ServerState, after: ServerState, metrics: dict[str, Any]
    ) -> RoundResult:
        """Evaluates the round that has just ended."""

    @abstractmethod
    def show(self, state: ServerState, rows: Sequence[Row]) -> None:
        """Displays a logged round or, without rows, that training starts or resumes."""


def train(task: Task, engine: Engine, clients: Sequence[str], cfg: StrategyConfig) -> ServerState:
    """Runs rounds until the task is done, starting at the run's last checkpoint if any.

    Args:
        task: Defines the model, its evaluation and its logs.
        engine: Runs the clients.
        clients: Names of all clients, in the order in which their updates are summed.
        cfg: The strategy and its settings.

    Returns:
        The final server state.
    """
    state = task.begin(engine)
    while not task.is_done(state):
        before = state
        # a plugin's strategy may call sys.exit, which would end the program without a message
        with user_code(f"strategy {cfg.name!r}", but=(Exception,)):
            own = cfg.at_round(state.round + 1, state.objectives)
            state, metrics = with_retries(STRATEGIES[cfg.name], state, clients, engine, own)
        state = task.end_round(engine, before, state, metrics)
    return state
