"""A site's agreement with a server, enforced on every request.

A site has the run's configuration, which determines every field of every request, except for the
fields that the algorithm leaves to the server. A request that differs from the configuration is
refused, and an accepted request is executed with the site's own values.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from math import inf
from pathlib import Path
from typing import IO, Any

import firm.federation.strategies  # noqa: F401 - registers every task
from firm.base.inside import open_inside
from firm.base.json_text import json_text
from firm.federation.messages import ENVELOPE, Request
from firm.federation.option import DECIDED_BY_SERVER
from firm.federation.round_config import RoundConfig
from firm.federation.schema import Model, Reading, read, shown
from firm.federation.tasks import TASKS
from firm.network.site_policy import Budget

MAX_REFUSALS = 10_000
"""Refusals of which a ledger keeps a line; further ones are counted."""


class Refused(PermissionError):
    """Raised when a site refuses a request; the site writes the message, which quotes no data."""


class Agreement:
    """Requests that a site executes, derived from the site's copy of the run's strategy."""

    def __init__(
        self,
        strategy: RoundConfig,
        *,
        objectives: Sequence[str],
        num_rounds: int,
        clients: Sequence[str],
    ) -> None:
        self.num_rounds = num_rounds
        self.message_noise, self.spent_epsilon = strategy.message_noise(), strategy.spent_epsilon
        self.counts_epsilon = any(each.message_noise() is not None for each in strategy.options)
        self._objectives, self._clients = tuple(objectives), tuple(clients)
        self._strategy = strategy

    @property
    def tasks(self) -> tuple[str, ...]:
        """Returns the names of the tasks that the strategy requests."""
        return tuple(kind.task for kind in self._strategy.requests(self._objectives))

    def _fields(self, number: int) -> dict[str, dict[str, Any]]:
        """Returns the agreed fields of a round's requests, by task."""
        strategy = self._strategy.at_round(number, self._objectives)
        requests = strategy.requests(self._objectives).items()
        return {kind.task: _with_defaults(kind, agreed) for kind, agreed in requests}

    def request(self, task: str, content: Any, clients: Sequence[str] | None = None) -> Request:
        """Returns the request to execute at the site, from the fields of a message.

        Args:
            task: Name of the task.
            content: The fields.
            clients: Clients of the site that are asked, by default all: a request has the settings
                of single clients for these alone.

        Raises:
            Refused: The request differs from the agreement.
            Invalid: The content is not a valid request.
        """
        if task not in self.tasks:
            raise Refused(f"the task {shown(task)} is not part of the agreed run")
        kind = TASKS[task].request
        adapter = content.get("adapter") if isinstance(content, Mapping) else None
        reading = Reading(self._objectives, adapter={})
        reading.adapter = read(Model, adapter, "adapter", reading)
        request = kind.read(content, reading)
        if tuple(request.objectives) != self._objectives:
            raise Refused(f"objectives must be {', '.join(self._objectives)}, as agreed")
        if request.round > self.num_rounds:
            raise Refused(f"round {request.round} is beyond the agreed {self.num_rounds} rounds")
        fields = self._fields(request.round)[task].items()
        decided = {name: own for name, own in fields if own is not DECIDED_BY_SERVER}
        agreed = replace(request, objectives=self._objectives, **decided)
        asked = self._clients if clients is None else clients
        sent, arrived = agreed.to_network(*asked), request.of(*asked)
        for name in decided:
            if difference := _difference(name, getattr(sent, name), getattr(arrived, name)):
                raise Refused(difference)
        return agreed


def _difference(path: str, own: Any, asked: Any) -> str | None:
    """Describes how a request differs from the agreement; None if it does not differ."""
    own, asked = _plain(own), _plain(asked)
    if own == asked:
        return None
    if isinstance(own, dict) and isinstance(asked, dict) and own.keys() == asked.keys():
        differences = (_difference(f"{path}.{name}", own[name], asked[name]) for name in own)
        return next(filter(None, differences), None)
    return f"{path} must be {shown(own)}, as agreed, got {shown(asked)}"


def _with_defaults(kind: type[Request], agreed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the agreed value of every field of a request except the envelope."""
    defaults = {
        each.name: each.default_factory() if callable(each.default_factory) else each.default
        for each in fields(kind)
        if each.name not in ENVELOPE
    }
    return {**defaults, **agreed}


def _plain(value: Any) -> Any:
    """Converts a value to JSON types, so that equal lists and tuples compare as equal."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class Ledger:
    """A site's own record of its answers and refusals, and of the ε that its answers have spent.

    An answer is recorded before it is sent, with its noise, so that ε counts answers under earlier
    settings as well. If `path` is given, the record persists across restarts in a JSON Lines file.
    Implements ``SumLedger`` of secure aggregation.
    """

    def __init__(self, agreement: Agreement, budget: Budget, path: Path | None = None) -> None:
        self._agreement, self._budget, self._path = agreement, budget, path
        self._noise: defaultdict[str, Counter[float]] = defaultdict(Counter)
        self.answers: Counter[tuple[str, str]] = Counter()
        """Answers by client and task."""
        self.num_refusals = 0
        """Requests that were refused."""
        self.sums: list[dict[str, Any]] = []
        """Secure sums that clients have helped to open; see ``note_sum``."""
        for row in _rows(path):
            if row["kind"] == "refusal":
                self.num_refusals += 1
            elif row["kind"] == "sum":
                self.sums.append(row)
            else:
                self._count(row["client"], row["task"], row.get("noise", agreement.message_noise))
        limit = budget.max_epsilon
        if limit is None or not agreement.counts_epsilon:
            limit = agreement.spent_epsilon(2 * agreement.num_rounds)
        self._max_epsilon = limit

    def epsilon(self, client: str, *, more: int = 0) -> float:
        """Returns the ε that a client's answers so far, and `more` further ones, spend."""
        return self._agreement.spent_epsilon(more, self._noise[client])

    def check(self, clients: Sequence[str], task: str) -> None:
        """Raises ``Refused`` if one more answer from each client would exceed the budget."""
        limit = self._budget.max_answers
        for client in clients:
            if limit is not None and self.answers[client, task] >= limit:
                raise Refused(f"the budget of {limit} answers of {client} to {task} is spent")
            if self.epsilon(client, more=int(_tells_of_data(task))) > self._max_epsilon:
                raise Refused(f"the budget of ε {self._max_epsilon:.4g} of {client} is spent")

    def answered(self, round: int, client: str, task: str) -> None:
        """Records an answer before it is sent."""
        noise = [*self._agreement.message_noise] if _tells_of_data(task) else []
        self._count(client, task, noise)
        epsilon = self.epsilon(client)
        spent = {} if epsilon == inf else {"epsilon": epsilon}
        self._write(kind="answer", round=round, client=client, task=task, noise=noise, **spent)

    def _count(self, client: str, task: str, noise: Sequence[float]) -> None:
        self.answers[client, task] += 1
        self._noise[client].update(noise if _tells_of_data(task) else ())

    def refused(self, reason: str) -> None:
        """Records a refusal; writes at most ``MAX_REFUSALS`` lines, to protect the disk."""
        self.num_refusals += 1
        if self.num_refusals <= MAX_REFUSALS:
            self._write(kind="refusal", reason=reason)

    def note_sum(self, row: dict[str, Any]) -> None:
        """Records a sum and the shares that a client reveals for it, before the client does."""
        self.sums.append(row)
        self._write(kind="sum", **row)

    def _write(self, **row: Any) -> None:
        if self._path is None:
            return
        line = json_text({"time": round(time.time()), **row}) + "\n"
        with open(self._path, "a+b", opener=open_inside) as file:
            _drop_fragment(file)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())  # a site that loses power must not forget ε that it spent


def _drop_fragment(file: IO[bytes]) -> None:
    """Removes an incomplete last line, as a full disk leaves it: the next would continue it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _tells_of_data(task: str) -> bool:
    return TASKS[task].request.tells_of_data


_REQUIRED: dict[str, set[str]] = {
    "refusal": set(),
    "answer": {"client", "task"},
    "sum": {"run", "round", "client", "base", "model", "members"},
}
"""Entries that a row must have, by kind."""


def _rows(path: Path | None) -> list[dict[str, Any]]:
    """Returns the recorded rows, without an incomplete last line."""
    if path is None or not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            required = _REQUIRED[row["kind"]]
            if missing := required - row.keys():
                raise LookupError(missing)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise ValueError(
                f"{path}, line {number} is damaged, so the budget spent so far is unknown; "
                "restore the file from a backup."
            ) from None
        rows.append(row)
    return rows
