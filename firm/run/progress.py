"""Progress display of a run: a live table on a terminal, and one line per round elsewhere.

A notebook does not count as a terminal: it shows the lines as plain text.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean
from typing import IO, Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from firm.base.console import accept_any_text
from firm.base.sanitize import printable

_MAX_CLIENTS_SHOWN = 16
_MAX_LINE = 5_000
"""Maximum length of a line in characters."""
QUIET_SECONDS = 15.0
"""Minimum seconds between two lines on the progress of sampling."""


@dataclass
class _ClientView:
    """Progress of a client in the current round."""

    stage: str = "starting"
    share_done: float = 0.0
    weights: list[float] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    kl: float | None = None


class SamplingLines:
    """Prints the purpose of the replies being sampled and, from time to time, the progress.

    The first line is printed before the first token, which takes long with a large model. Further
    lines become less frequent the longer the sampling takes.

    Args:
        say: Prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._announced: set[str] = set()
        self._began = self._last_said = time.monotonic()

    def __call__(self, *, what: str, done: float, total: int, num_tokens: int) -> str:
        """Returns the text for the live view; empty once all replies are sampled.

        Args:
            what: Purpose of the replies, such as "calibration"; each is announced once.
            done: Number of replies sampled so far; unfinished replies count in proportion to their
                tokens.
            total: Total number of replies.
            num_tokens: Maximum length of a reply in tokens.
        """
        now = time.monotonic()
        work = f"{what}: {total:,} replies of up to {num_tokens:,} tokens"
        if done == 0:
            self._began = self._last_said = now
            if what not in self._announced:
                self._announced.add(what)
                self._say(work)
        if done >= total:
            return ""
        text = f"{work}, {done / total:.0%}"
        if now - self._last_said > max(QUIET_SECONDS, (now - self._began) / 4):
            self._last_said = now
            self._say(text)
        return text


class Progress:
    """Shows the progress of a run. Use it as a context manager and report events to it.

    Names, stages and reasons may come from untrusted sources: line breaks and terminal control
    characters are escaped. Rounds and notes are printed on standard output, and lines about long
    operations on standard error. If a console is given, it gets both.

    Events and their arguments:

    - "loading": none; loading the policy and reward models may take minutes
    - "threads": text (the number of CPU threads that was chosen, and why)
    - "started": alarms (texts, warnings that follow from the configuration alone)
    - "resumed": round (the last round completed by earlier sessions; 0 for a new run)
    - "client_started": round, client
    - "stage": stage (such as "rollout"), step (1..num_steps), num_steps, and client if several
      clients train concurrently
    - "client_finished": metrics ("weights", "rewards" and "kl" are shown), client
    - "measured": the arguments of `SamplingLines`
    - "round_finished": row (a row of kind "round"), scores (means on validation prompts, by name);
      a row of round 0 shows the base model
    """

    def __init__(
        self,
        num_rounds: int,
        clients: Sequence[str],
        objectives: Sequence[str],
        *,
        clients_per_round: int | None = None,
        console: Console | None = None,
    ) -> None:
        self._num_rounds = num_rounds
        self._num_clients = clients_per_round or len(clients)
        self._objectives = tuple(objectives)
        self._first = self._num_done = 0
        self._console = console or _standard_output()
        self._views: dict[str, _ClientView] = {}
        self._current = self._measured = ""
        self._say = self._print if console else say
        self._sampling = SamplingLines(
            lambda line: None if self._live.is_started else self._say(line)
        )
        self._began = time.monotonic()
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def is_live(self) -> bool:
        """True if events within a round are displayed, as on a terminal."""
        return self._console.is_terminal

    def event(self, name: str, **info: Any) -> None:
        """Handles an event listed in the class docstring; raises ``ValueError`` on any other."""
        match name:
            case "loading":
                self._say("loading the models")
            case "threads":
                self._say(info["text"])
            case "started":
                self._print(*(f"note: {alarm}" for alarm in info["alarms"]))
            case "resumed":
                self._first = self._num_done = info["round"]
            case "client_started":
                self._current = info["client"]
                self._views[self._current] = _ClientView()
            case "stage":
                view = self._view(info)
                view.stage = f"{info['stage']} {info['step']}/{info['num_steps']}"
                view.share_done = (info["step"] - 1) / info["num_steps"]
            case "client_finished":
                view, metrics = self._view(info), info["metrics"]
                view.stage, view.share_done = "done", 1.0
                if solves := metrics.get("weights"):
                    view.weights = [fmean(column) for column in zip(*solves, strict=True)]
                view.rewards = metrics.get("rewards", {})
                view.kl = metrics.get("kl")
            case "measured":
                self._measured = self._sampling(**info)
            case "round_finished":
                self._finish_round(info["row"], info.get("scores", {}))
            case _:
                raise ValueError(
                    "event must be loading, threads, started, resumed, client_started, stage, "
                    f"client_finished, measured or round_finished, got {name!r}."
                )

    def _view(self, info: Mapping[str, Any]) -> _ClientView:
        return self._views.setdefault(info.get("client", self._current), _ClientView())

    def _finish_round(self, row: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        self._num_done = row["round"]
        weights = [view.weights for view in self._views.values() if view.weights]
        means = [fmean(column) for column in zip(*weights, strict=True)]
        self._views = {}
        parts = [f"round {row['round']}/{self._num_rounds}"]
        parts += [f"{name} {score:.3f}" for name, score in scores.items()]
        if means:
            parts.append("weights " + " ".join(f"{weight:.2f}" for weight in means))
        if privacy := row.get("privacy"):
            epsilon = privacy["epsilon"]
            parts.append("ε ∞" if epsilon is None else f"ε {epsilon:.3g}")
        if failures := row.get("failures"):
            reasons = [f"{printable(f['client'])} ({printable(f['reason'])})" for f in failures]
            parts.append("failed: " + "; ".join(reasons))
        if "seconds" in row:
            parts.append(f"{row['seconds']:.1f} s")
        if eta := self._time_left():
            parts.append(f"ETA {eta}")
        self._print("  ".join(parts), *(f"note: {alarm}" for alarm in row.get("alarms", ())))

    def _print(self, *lines: str) -> None:
        for line in lines:
            shown = printable(line, max_length=_MAX_LINE)
            self._console.print(shown, markup=False, soft_wrap=True)

    def _share_done(self) -> float:
        """Returns the completed share of this session's rounds, from 0 to 1."""
        running = sum(view.share_done for view in list(self._views.values())) / self._num_clients
        num_rounds = max(self._num_rounds - self._first, 1)
        return min((self._num_done - self._first + running) / num_rounds, 1.0)

    def _time_left(self) -> str:
        """Estimates the remaining time from the speed so far; empty before the first step."""
        share = self._share_done()
        if not 0 < share < 1:
            return ""
        seconds = (time.monotonic() - self._began) * (1 - share) / share
        return str(timedelta(seconds=round(seconds)))

    def _render(self) -> RenderableType:
        current = min(self._num_done + 1, self._num_rounds)
        headline = Table.grid(padding=(0, 2))
        headline.add_row(
            f"round {current}/{self._num_rounds}",
            ProgressBar(total=1.0, completed=self._share_done(), width=30),
            f"elapsed {timedelta(seconds=round(time.monotonic() - self._began))}",
            f"ETA {self._time_left() or '-'}",
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("client")
        table.add_column("stage", min_width=14)
        for quantity in ("λ", "reward"):
            for objective in self._objectives:
                table.add_column(Text(printable(f"{quantity} {objective}")), justify="right")
        table.add_column("KL", justify="right", min_width=5)
        for name, view in list(self._views.items())[-_MAX_CLIENTS_SHOWN:]:
            weights = view.weights or [None] * len(self._objectives)
            rewards = [view.rewards.get(objective) for objective in self._objectives]
            numbers = ["" if x is None else f"{x:.3f}" for x in [*weights, *rewards, view.kl]]
            table.add_row(Text(printable(name)), Text(printable(view.stage)), *numbers)
        parts = [headline, Text(self._measured), table] if self._measured else [headline, table]
        return Group(*parts)


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    console: Console | None = None,
) -> None:
    """Prints an aligned table; its width is not limited if the output is not a terminal.

    The title is printed above the table in one line; its leading line breaks are kept as space.
    Floats have three decimals, and None is shown as "-". The first column is left-aligned, the
    others are right-aligned. If all headings are empty, the header is omitted. Line breaks and
    terminal control characters in cells are escaped.
    """
    console = console or _standard_output()
    if not console.is_terminal:
        console = _plain_console(file=console.file, width=10_000)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(header))
    for place, heading in enumerate(header):
        table.add_column(Text(printable(heading)), justify="right" if place else "left")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    line = title.lstrip("\n")
    room = title[: len(title) - len(line)]
    console.print(room + printable(line, max_length=_MAX_LINE), markup=False, soft_wrap=True)
    console.print(table)


def say(line: str) -> None:
    """Prints a line about a long operation on standard error; standard output is for results.

    In a notebook, the line is printed on standard output, since standard error looks like a
    warning.
    """
    accept_any_text()
    stream = sys.stdout if Console().is_jupyter else sys.stderr
    print(printable(line, max_length=_MAX_LINE), file=stream, flush=True)


def _standard_output() -> Console:
    """Returns a console on standard output.

    In a notebook, rich would render each line as a separate HTML block or, if HTML is disabled,
    treat the notebook as a terminal, since kernels set FORCE_COLOR.
    """
    accept_any_text()  # a script that calls `firm.align` may use any encoding
    console = Console(highlight=False)
    return _plain_console() if console.is_jupyter else console


def _plain_console(*, file: IO[str] | None = None, width: int | None = None) -> Console:
    """Returns a console that always prints plain text."""
    return Console(
        file=file, width=width, highlight=False, force_terminal=False, force_jupyter=False
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else printable(value)
