"""Site of a network: runs its clients for a server and restricts the data that leaves it."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import Len

import firm.federation.strategies  # noqa: F401 - registers every task
from firm.base.errors import ProcessLost
from firm.base.sanitize import printable
from firm.base.state import State
from firm.federation.client import Failure, Reply
from firm.federation.engines.engine import Engine, error_kind
from firm.federation.engines.local import StateMissing
from firm.federation.messages import Answer
from firm.federation.schema import Invalid, Reading, Text, read, shown
from firm.federation.serialization import pack, unpack
from firm.network.agreement import Agreement, Ledger, Refused
from firm.network.site_policy import SitePolicy

logger = logging.getLogger(__name__)

NOT_MET = "this site has not met the server yet"
"""Problem of a site whose process has been started again."""

MAX_BYTES = 4 * 2**30
"""Maximum size of a server's message in bytes."""


class Site:
    """Answers the server's messages for the clients of a site.

    The site executes a request only if its policy allows the task, the clients are its own, the
    request matches the agreement, and the budget is not exhausted. An answer contains only data
    that the policy releases. Every message gets an answer, even if the message is
    malformed.

    Args:
        build: Builds the engine that runs the clients, from the setup that the server sends at the
            first meeting. If it raises an error, the server receives only the type of error.
        clients: Names of the site's clients.
        fingerprint: Values that must equal the server's; see ``SitesEngine.meet``.
        agreement: Requests that the site executes.
        policy: Limits on tasks and on the data that leaves the site.
        ledger: The site's own record of its answers; kept in memory by default.
    """

    def __init__(
        self,
        build: Callable[[State], Engine],
        clients: Sequence[str],
        *,
        fingerprint: Mapping[str, Any],
        agreement: Agreement,
        policy: SitePolicy,
        ledger: Ledger | None = None,
    ) -> None:
        self._build, self._clients = build, sorted(clients)
        self._engine: Engine | None = None
        self._fingerprint, self._policy = dict(fingerprint), policy
        self._agreement = agreement
        self.ledger = Ledger(agreement, policy.budget) if ledger is None else ledger

    def answer(self, packed: bytes) -> bytes:
        """Returns the packed answer to a packed message."""
        number = None
        try:
            message = unpack(packed, max_bytes=MAX_BYTES)
            if isinstance(message, dict):
                number = message.get("number")
                number = number if isinstance(number, int) else None
            answer = self._answer(message)
        except ProcessLost:
            raise
        except Exception as error:  # every message gets an answer
            is_own = isinstance(error, Refused | Invalid | StateMissing)  # these quote no data
            reason = printable(error) if is_own else error_kind(error)
            logger.error("refused: %s", printable(f"{type(error).__name__}: {error}"))
            logger.debug("the message was refused here", exc_info=True)
            with suppress(OSError):  # the disk may be full; the reason is in the log
                self.ledger.refused(reason)
            answer = {"problem": reason}
        return pack({**answer, "number": number})

    def _answer(self, message: Any) -> dict[str, Any]:
        action = message.get("do") if isinstance(message, dict) else None
        if action == "meet":
            return self._meet(message)
        if action != "map":
            raise Refused(f"a message must ask to meet or map, got {shown(action)}")
        return self._map(message)

    def _meet(self, message: dict[str, Any]) -> dict[str, Any]:
        fingerprint, setup = message.get("fingerprint"), message.get("setup")
        if not isinstance(fingerprint, dict) or not isinstance(setup, dict):
            raise Refused("a meeting needs a fingerprint and a setup")
        if problem := differences(fingerprint, self._fingerprint):
            logger.error("this site cannot participate: %s", problem)
            return {"problem": problem}
        self._engine = self._engine or self._build(setup)
        return {"clients": self._clients}

    def _map(self, message: dict[str, Any]) -> dict[str, Any]:
        task = read(Text, message.get("task"), "task", _NOTHING)
        clients = read(_Clients, message.get("clients"), "clients", _NOTHING)
        if task not in self._policy.tasks:
            raise Refused(
                f"this site's policy does not allow the task {task!r}, only "
                f"{', '.join(self._policy.tasks)}"
            )
        if strangers := sorted(set(clients) - set(self._clients)):
            raise Refused(f"{strangers[0]} is not a client of this site")
        if len(set(clients)) < len(clients):
            raise Refused("a client is requested twice")
        if self._engine is None:
            raise Refused(NOT_MET)
        request = self._agreement.request(task, message.get("request"), clients)
        self.ledger.check(clients, task)
        replies, failures = self._engine.map(request, clients)
        for reply in replies:
            self.ledger.answered(request.round, reply.client, task)
        for failure in failures:
            logger.error("%s failed: %s", failure.client, printable(failure.reason))
        return {
            "replies": [
                {"client": reply.client, "content": self._release(reply)} for reply in replies
            ],
            "failures": [
                {"client": failure.client, "reason": self._reason(failure)} for failure in failures
            ],
        }

    def _reason(self, failure: Failure) -> str:
        if self._policy.reasons:
            return printable(failure.reason)
        return f"{failure.kind or 'its answer was refused'}; see its site's log"

    def _release(self, reply: Reply) -> Answer:
        """Returns an answer with only the metrics that the policy releases."""
        content = reply.content
        if not hasattr(content, "metrics"):
            return content
        return replace(content, metrics=self._policy.released(content.metrics))


_NOTHING = Reading((), {})
_Clients = Annotated[list[Text], Len(1, 1000)]


def differences(server: Mapping[str, Any], site: Mapping[str, Any]) -> str:
    """Describes the differences between two fingerprints; empty if they are equal."""
    names: Collection[str] = [*server, *(name for name in site if name not in server)]
    texts = [
        f"its {printable(name)} is {shown(site.get(name))}, the server's {shown(server.get(name))}"
        for name in names
        if server.get(name) != site.get(name)
    ]
    return printable("; ".join(texts), max_length=2000)
