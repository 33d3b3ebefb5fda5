"""The training loop of both wings: rounds of a strategy, measured, logged and kept."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from firm.federation import Engine, ServerState, State
from firm.federation.strategies import STRATEGIES, StrategyConfig
from firm.federation.user_code import user_code
from firm.run import Run, Tracker
from firm.run.rows import Row, valid_rows


class Logbook:
    """Writes the rows of a run to its directory and to W&B, and keeps those that are valid.

    Args:
        run: The run, open for writing.
        tracker: Where rows go beside the directory.
    """

    def __init__(self, run: Run, tracker: Tracker) -> None:
        self.run = run
        self.rows: list[Row] = run.rows()
        """Rows so far, those of earlier sessions included."""
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
        """Forwards what earlier sessions logged: every session is a W&B run of its own."""
        for row in self.rows:
            self._tracker.log(row)
        self._tracker.log_samples(self.run.samples())


@dataclass(frozen=True)
class Round:
    """What a round has come to."""

    rows: Sequence[Row]
    """What is logged of it."""
    is_kept: bool = True
    """Whether a checkpoint is written."""
    quality: float | None = None
    """How good the model is, larger is better, by which the best checkpoint is chosen; None when
    that is not measured."""


class Wing(ABC):
    """What a kind of run adds to the loop: its start, its measurements and its end.

    Args:
        book: The run's logs.
        keep_last: Checkpoints that stay beside the best one.
    """

    def __init__(self, book: Logbook, *, keep_last: int) -> None:
        self.book = book
        self._keep_last = keep_last

    def begin(self, engine: Engine) -> ServerState:
        """Returns the state that rounds start from: the run's last checkpoint, or a fresh one."""
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
    ) -> None:
        """Measures a round that has just ended, logs it, writes a checkpoint and shows it."""
        measured = self.measure(before, after, metrics)
        for row in measured.rows:
            self.book.log(row)
        if measured.is_kept:
            self._keep(engine, after, measured.quality)
        self.show(after, measured.rows)

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
        """Logs what a fresh run begins with; returns the server's first state and its quality."""

    @abstractmethod
    def restore(self, content: State) -> None:
        """Restores what ``content`` returned when the last checkpoint was written."""

    def content(self) -> State:
        """Returns what a checkpoint holds beside the states of server and clients."""
        return {}

    @abstractmethod
    def is_done(self, state: ServerState) -> bool:
        """Returns whether no further round is due."""

    @abstractmethod
    def measure(self, before: ServerState, after: ServerState, metrics: dict[str, Any]) -> Round:
        """Measures a round that has just ended."""

    @abstractmethod
    def show(self, state: ServerState, rows: Sequence[Row]) -> None:
        """Shows a round that is logged and kept, or, without rows, that rounds begin or go on."""


def train(wing: Wing, engine: Engine, clients: Sequence[str], cfg: StrategyConfig) -> ServerState:
    """Runs rounds until the wing is done, from the run's last checkpoint if there is one.

    Args:
        wing: What is trained, how it is measured, and where that is logged.
        engine: Where the clients are.
        clients: Names of all clients, in the order in which their updates are summed.
        cfg: The strategy and its settings.

    Returns:
        The server's last state.
    """
    state = wing.begin(engine)
    while not wing.is_done(state):
        before = state
        with user_code(f"strategy {cfg.name!r}", but=(Exception,)):  # which may end the program
            state, metrics = STRATEGIES[cfg.name](state, clients, engine, cfg)
        wing.end_round(engine, before, state, metrics)
    return state
