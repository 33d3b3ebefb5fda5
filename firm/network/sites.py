"""Server of a network: sends requests to the sites of clients and checks their answers."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from firm.base.sanitize import printable
from firm.base.state import State
from firm.federation.client import Failure, Reply
from firm.federation.engines.engine import (
    check_states,
    checked_reply,
    split_outcomes,
    tell_finished,
)
from firm.federation.messages import Request
from firm.federation.schema import shown
from firm.federation.serialization import pack, packed_size, unpack
from firm.network.site import NOT_MET

logger = logging.getLogger(__name__)

_SMALL = 16 * 2**20
"""Maximum size of an answer in bytes, excluding its tensors."""


@dataclass(frozen=True)
class Lost:
    """Reason for a missing answer from a site."""

    reason: str


class Channel(Protocol):
    """Sends messages to sites and receives their answers."""

    def ask(self, messages: Mapping[str, bytes], *, timeout: float) -> dict[str, bytes | Lost]:
        """Returns each site's answer within ``timeout`` seconds, or why it is missing."""
        ...

    def returned(self) -> list[str]:
        """Returns the reconnected sites, which cannot participate until the run is restarted."""
        ...

    def close(self) -> None:
        """Releases the sites."""
        ...


class SitesReturned(RuntimeError):
    """Raised when lost sites are back: the run must resume from its checkpoint to include them."""


class SitesEngine:
    """Runs clients at their sites; implements ``Engine``.

    Client states stay at their sites: a checkpoint of the server holds only the round. An answer
    must be a valid message, carry the number of the server's message, and concern only clients of
    the site.

    A site that failed to answer is met again before the next request, with a short timeout, so
    that a restarted process receives its setup again.

    Args:
        channel: Transport of the messages.
        sites: Names of each site's clients; every client belongs to exactly one site.
        clients: Names of all clients, in the order in which updates are summed.
        timeout: Time limit for a task at a site, in seconds.
        meeting_timeout: Time limit for a lost site to report that it is ready, in seconds.
        on_event: Progress callback, as for ``LocalEngine``.
    """

    def __init__(
        self,
        channel: Channel,
        sites: Mapping[str, Sequence[str]],
        clients: Sequence[str],
        *,
        timeout: float,
        meeting_timeout: float = 10.0,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        self._site_of = {name: site for site, names in sites.items() for name in names}
        count = sum(len(names) for names in sites.values())
        if count > len(self._site_of) or self._site_of.keys() != set(clients):
            raise ValueError(
                f"Every client needs one site, got the clients {list(clients)} and the sites "
                f"{ {site: list(names) for site, names in sites.items()} }."
            )
        self._channel, self._clients = channel, list(clients)
        self._timeout, self._meeting_timeout = timeout, meeting_timeout
        self._on_event = on_event or (lambda name, **info: None)
        self._numbers = itertools.count(1)
        self._introduction: dict[str, Any] = {"do": "meet", "fingerprint": {}, "setup": {}}
        self._lost: dict[str, str] = {}  # reasons by site
        self._first_round: int | None = None

    def meet(self, fingerprint: Mapping[str, Any], setup: State) -> list[str]:
        """Returns the sites that are lost or differ from the server, with the reasons; else [].

        Until they are ready, rounds continue without them.

        Args:
            fingerprint: Values that must be equal everywhere (program, configuration, models), by
                name.
            setup: Data from which the sites build their clients, in addition to their own.
        """
        self._introduction = {"do": "meet", "fingerprint": dict(fingerprint), "setup": setup}
        sites = dict.fromkeys(self._site_of.values())
        answers = self._meet(list(sites), timeout=self._timeout)
        self._lost.update((site, problem) for site, problem in answers.items() if problem)
        return [f"{site}: {problem}" for site, problem in answers.items() if problem]

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``.

        Raises:
            SitesReturned: The run must be restarted for all sites to participate.
        """
        if self._first_round is None:
            self._first_round = request.round
        # At least one round between restarts: a site that keeps reconnecting must not stall the run
        if request.round > self._first_round and (back := self._channel.returned()):
            raise SitesReturned(
                f"{', '.join(back)} {'is' if len(back) == 1 else 'are'} back; the run continues "
                "with all sites from its last checkpoint"
            )
        asked: dict[str, list[str]] = {}
        for name in clients:
            asked.setdefault(self._site_of[name], []).append(name)
        outcomes: dict[str, Reply | Failure] = {}
        for site in self._still_lost(asked):
            for name in asked.pop(site):
                outcomes[name] = Failure(name, f"its site {site} is lost: {self._lost[site]}")
        for names in asked.values():
            for name in names:
                self._on_event("client_started", client=name, round=request.round)
        answers = self._ask(
            {
                site: {
                    "do": "map",
                    "task": request.task,
                    "clients": names,
                    "request": request.to_network(*names),
                }
                for site, names in asked.items()
            },
            timeout=self._timeout,
            max_bytes={site: len(names) * _most_bytes(request) for site, names in asked.items()},
        )
        for site, names in asked.items():
            outcomes.update(_outcomes(site, names, answers[site], request))
        for name in clients:
            tell_finished(self._on_event, outcomes[name], request.round)
        return split_outcomes(outcomes[name] for name in clients)

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns {client: {"round": last accepted round}}; the states remain at their sites."""
        return {name: {"round": accepted.get(name, 0)} for name in self._clients}

    def restore_client_states(self, states: State) -> None:
        """Raises ``ValueError`` if the saved clients differ; the states are at their sites."""
        check_states(states, self._clients)

    def close(self) -> None:
        """Releases the sites."""
        self._channel.close()

    def _still_lost(self, asked: Mapping[str, Sequence[str]]) -> list[str]:
        """Returns the sites in `asked` that were lost before and are still not ready."""
        suspects = [site for site in asked if site in self._lost]
        for site, problem in self._meet(suspects, timeout=self._meeting_timeout).items():
            if problem is None:
                logger.info("the site %s is back", site)
                del self._lost[site]
            else:
                self._lost[site] = problem
        return [site for site in suspects if site in self._lost]

    def _meet(self, sites: Sequence[str], *, timeout: float) -> dict[str, str | None]:
        """Returns, for each site, why it is not ready; None if it is ready."""
        messages = dict.fromkeys(sites, self._introduction)
        answers = self._ask(messages, timeout=timeout, max_bytes=dict.fromkeys(sites, _SMALL))
        problems: dict[str, str | None] = {}
        for site, answer in answers.items():
            own = sorted(name for name, place in self._site_of.items() if place == site)
            if isinstance(answer, Lost):
                problems[site] = self._lost[site]  # the reason since its first absence
            elif answer.get("problem"):
                problems[site] = printable(answer["problem"], max_length=2000)
            elif answer.get("clients") != own:
                problems[site] = f"it has the clients {shown(answer.get('clients'))}, not {own}"
            else:
                problems[site] = None
        return problems

    def _ask(
        self,
        messages: Mapping[str, dict[str, Any]],
        *,
        timeout: float,
        max_bytes: Mapping[str, int],
    ) -> dict[str, Any]:
        """Returns each site's answer to its numbered message, or ``Lost``."""
        if not messages:
            return {}
        numbers = {site: next(self._numbers) for site in messages}
        packed = {
            site: pack({**message, "number": numbers[site]}) for site, message in messages.items()
        }
        answers: dict[str, Any] = {}
        for site, raw in self._channel.ask(packed, timeout=timeout).items():
            if not isinstance(raw, Lost):
                answers[site] = _read(raw, numbers[site], max_bytes[site])
                if answers[site].get("problem") == NOT_MET:  # its process died between requests
                    self._lost.setdefault(site, NOT_MET)
                continue
            answers[site] = raw = Lost(printable(raw.reason))
            if site not in self._lost:
                self._lost[site] = raw.reason
                logger.warning("the site %s is lost: %s", site, raw.reason)
        return answers


def _most_bytes(request: Request) -> int:
    """Returns an upper bound on the bytes of an honest answer.

    The largest answers are a Jacobian, one adapter per objective, or a masked update.
    """
    size = sum(parameter.numel() for parameter in request.adapter.values())
    masked = request.parameter_bytes(size, adapter_bytes=0)
    # 16 bytes per value is twice the widest dtype, so that no honest answer is refused
    return _SMALL + max(16 * (len(request.objectives) + 1) * size, masked)


def _read(raw: bytes, number: int, max_bytes: int) -> dict[str, Any]:
    """Returns a site's answer, or its "problem" if it is not valid."""
    try:
        answer = unpack(raw, max_bytes=max_bytes)
    except ValueError as error:
        return {"problem": f"its answer cannot be read: {error}"}
    if not isinstance(answer, dict):
        return {"problem": f"its answer must be a mapping, got {type(answer).__name__}"}
    if answer.get("number") != number:
        return {
            "problem": f"it answered message {shown(answer.get('number'))} instead of number "
            f"{number}; answers to earlier messages are ignored"
        }
    return answer


def _outcomes(
    site: str, names: Sequence[str], answer: Any, request: Request
) -> dict[str, Reply | Failure]:
    """Returns the reply or failure of each client requested from a site."""

    def size_of(name: str) -> int:
        return packed_size(request.of(name))

    if isinstance(answer, Lost):
        return {name: Failure(name, f"its site {site} is lost: {answer.reason}") for name in names}
    if problem := answer.get("problem"):
        reason = printable(f"at {site}: {problem}")
        return {name: Failure(name, reason, size_of(name)) for name in names}
    outcomes: dict[str, Reply | Failure] = {}
    for key in ("replies", "failures"):
        entries = answer.get(key)
        for fields in entries if isinstance(entries, list) else []:
            name = fields.get("client") if isinstance(fields, dict) else None
            if not isinstance(name, str) or name not in names:
                continue
            if name in outcomes:
                outcomes[name] = Failure(name, f"{site} answered for it twice", is_refused=True)
            elif key == "failures":
                outcomes[name] = Failure(name, printable(fields.get("reason")), size_of(name))
            else:
                content = fields.get("content")  # the server counts its bytes itself
                sizes = size_of(name), len(pack(content))
                outcomes[name] = checked_reply(request, name, content, *sizes)
    missing = f"{site} returned no result for it"
    return {name: outcomes.get(name) or Failure(name, missing) for name in names}
