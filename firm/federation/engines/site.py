"""A site's side of a network: its clients, and what may leave it."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firm.federation.client import Failure, ProcessLost, Reply, State, Update
from firm.federation.engines.engine import Engine
from firm.federation.serialization import pack, unpack
from firm.federation.tasks import TASKS

logger = logging.getLogger(__name__)

AGGREGATES = (
    "beta_effect",
    "clip_fraction",
    "cosines",
    "end_share",
    "entropy",
    "gradient_norms",
    "gram",
    "kl",
    "kl_coefficient",
    "num_steps",
    "policy_loss",
    "response_length",
    "reward",
    "reward_correlation",
    "reward_length_correlation",
    "reward_raw",
    "reward_raw_std",
    "reward_truncated_share",
    "seconds",
    "value_loss",
    "weights",
)
"""Metrics of local training: figures of a batch or a minibatch as a whole, none of one reply."""


MACHINE_ERRORS = ("MemoryError", "OSError", "OutOfMemoryError", "TimeoutError")
"""Kinds of errors that tell of the machine, and quote no data."""


@dataclass(frozen=True)
class SitePolicy:
    """What may leave a site beside the adapter."""

    metrics: tuple[str, ...] = AGGREGATES
    """Names of the metrics that may; an empty list lets none out."""
    tasks: tuple[str, ...] = ("local_training",)
    """Tasks that the server may ask for. What another one sends (Jacobians, several updates) tells
    more of the data than an adapter does."""
    reasons: bool = False
    """Whether the server learns in full why a client failed. An error may quote the prompt or reply
    that caused it; without this the server learns its kind (of a full disk, a lack of memory or
    time in full), and the site's log has the rest."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks must be among {', '.join(sorted(TASKS))}, got {unknown}.")


class Site:
    """Answers the server's messages for the clients of a site.

    Whatever arrives, an answer goes back, and nothing but it: tasks that the policy names, of the
    site's own clients, with the metrics that the policy lets out.

    Args:
        build: From what the server tells at the first meeting to the engine that runs the clients,
            in this process or in several that work together.
        clients: Their names.
        fingerprint: What must be the same at the server, as of ``SitesEngine.meet``.
        policy: What may leave.
    """

    def __init__(
        self,
        build: Callable[[State], Engine],
        clients: Sequence[str],
        *,
        fingerprint: Mapping[str, Any],
        policy: SitePolicy,
    ) -> None:
        self._build, self._clients = build, sorted(clients)
        self._engine: Engine | None = None
        self._fingerprint, self._policy = dict(fingerprint), policy

    def answer(self, packed: bytes) -> bytes:
        """Returns the packed answer to a packed message."""
        number = None
        try:
            message = unpack(packed)
            number = message["number"]
            answer = self._answer(message)
        except ProcessLost:
            raise
        except Exception as error:
            logger.exception("a message of the server was refused")
            answer = {"problem": f"{type(error).__name__}: {error}"}
        return pack({**answer, "number": number})

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        what = message["do"]
        if what == "meet":
            if problem := differences(message["fingerprint"], self._fingerprint):
                logger.error("this site cannot take part: %s", problem)
                return {"problem": problem}
            self._engine = self._engine or self._build(message["setup"])
            return {"clients": self._clients}
        if what != "map":
            raise ValueError(f"a site cannot {what!r}; it can meet and map")
        return self._map(message["task"], message["clients"], message["payload"])

    def _map(self, task: str, clients: Sequence[str], payload: State) -> dict[str, Any]:
        if task not in self._policy.tasks:
            raise PermissionError(
                f"this site's policy does not allow the task {task!r}, only "
                f"{', '.join(self._policy.tasks)}"
            )
        if strangers := sorted(set(clients) - set(self._clients)):
            raise ValueError(f"{strangers[0]} is no client of this site")
        if self._engine is None:
            raise RuntimeError("this site has not met the server yet")
        replies, failures = self._engine.map(task, clients, payload)
        for failure in failures:
            logger.error("%s failed: %s", failure.client, failure.reason)
        return {
            "replies": [vars(self._told(reply)) for reply in replies],
            "failures": [
                {**vars(failure), "cause": None, "reason": self._reason(failure)}
                for failure in failures
            ],
        }

    def _reason(self, failure: Failure) -> str:
        kind = failure.reason.partition(":")[0]
        if self._policy.reasons or kind in MACHINE_ERRORS:
            return failure.reason
        return f"{kind}; its site's log says more"

    def _told(self, reply: Reply) -> Reply:
        """A reply without what must not leave, and its size as it is."""
        content = reply.content
        if isinstance(content, Update):
            content = replace(content, metrics=self._allowed(content.metrics))
        elif isinstance(content, dict) and isinstance(content.get("metrics"), dict):
            content = {**content, "metrics": self._allowed(content["metrics"])}
        return replace(reply, content=content, bytes_up=len(pack(content)))

    def _allowed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in metrics.items() if key in self._policy.metrics}


def differences(server: Mapping[str, Any], site: Mapping[str, Any]) -> str:
    """Returns in what two fingerprints differ, in words; empty when they are the same."""
    names: Collection[str] = [*server, *(name for name in site if name not in server)]
    told = [
        f"its {name} is {site.get(name)!r}, the server's {server.get(name)!r}"
        for name in names
        if server.get(name) != site.get(name)
    ]
    return "; ".join(told)
