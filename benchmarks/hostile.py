"""What hostile sites and hostile servers get: mutated answers and requests, made from the schemas.

    python benchmarks/hostile.py
    python benchmarks/hostile.py --engines '[nvflare]'

Every field of every message is replaced, left out, or changed deep inside, as its schema suggests:
numbers that are not finite or beyond any range, other types, lists and tensors of other shapes,
names with control characters, unknown fields. A mutated answer must leave the round to the honest
client, and either be usable or name its sender; the round's row must be fit for the log. A mutated
request must be refused, or get what was agreed and no more. `memory` carries the messages within
this process, `nvflare` by a server and sites with mutual TLS.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

import firm.alignment.client  # registers the metrics of language models
import firm.fmoo.client  # noqa: F401  # and those of the classic package
from benchmarks.loopback import run_job
from benchmarks.mutations import example, mutated_messages, mutations
from benchmarks.quadratic import OBJECTIVES, SECRET, START, Quadratic
from firm.federation import LocalEngine, RoundFailed, ServerState, beta_alarm
from firm.federation import schema as schemas
from firm.federation.messages import Request
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.secure import KeyRing, SecureEngine
from firm.federation.schema import Reading
from firm.federation.serialization import pack, unpack
from firm.federation.strategies import STRATEGIES
from firm.federation.strategy_configs import (
    FedCmooConfig,
    FedCmooPrefConfig,
    FirmConfig,
    FsmgdaConfig,
)
from firm.federation.tasks import TASKS
from firm.network import link
from firm.network.agreement import Agreement
from firm.network.controller import FlareChannel, SitesController
from firm.network.daemons import search_path
from firm.network.site import Site
from firm.network.site_policy import Budget, SitePolicy
from firm.network.sites import Lost, SitesEngine
from firm.run import print_table, run_cli

ROOT = Path(__file__).parent.parent
CONTROLLER = "benchmarks.hostile.Program"
HONEST, CULPRIT = "client_0", "client_1"
SITES = {"honest": HONEST, "hostile": CULPRIT}
NUM_ROUNDS = 5

PRIVACY = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at="client", noise_seed=7)
ROUNDS: dict[str, tuple[str, Any]] = {
    "local_training": ("firm", FirmConfig(share_gram=True)),
    "objective_training": ("fsmgda", FsmgdaConfig()),
    "share_jacobian": (
        "fedcmoo_pref",
        FedCmooPrefConfig(communication="one_way", compressor="count_sketch", upload_budget=8.0),
    ),
    "correct_gram": ("fedcmoo", FedCmooConfig(upload_budget=12.0, num_steps=10)),
}
"""By task, the strategy whose rounds ask for it."""
AGREEMENTS: dict[str, tuple[str, Any]] = {
    "privacy": ("local_training", FirmConfig(privacy=PRIVACY)),
    "plain": ("local_training", FirmConfig()),
    "objectives": ("objective_training", FsmgdaConfig()),
    "jacobians": ("share_jacobian", FedCmooConfig(compressor="none", communication="one_way")),
    "masks": ("masked_training", FirmConfig(secure="masks")),
}
"""What sites have agreed to, and the task that is asked for."""


@dataclass(frozen=True)
class Config:
    engines: list[Literal["memory", "nvflare"]] = field(
        default_factory=lambda: ["memory", "nvflare"]
    )
    """How messages travel."""
    most: int = 320
    """Most mutated answers to each task over nvflare, evenly chosen, and a third as many requests;
    in memory all are tried."""


# --- Clients and sites ----------------------------------------------------------------------------


READING = Reading(OBJECTIVES, START)


def new_state() -> ServerState:
    return ServerState(dict(START), objectives=OBJECTIVES, seed=0)


def new_site(client: str, cfg: Any) -> Site:
    agreement = Agreement(cfg, objectives=OBJECTIVES, num_rounds=NUM_ROUNDS, clients=[client])
    return Site(
        lambda setup: SecureEngine(
            LocalEngine([Quadratic(client)]), KeyRing.generate([client]), num_clients=len(SITES)
        ),
        [client],
        fingerprint={},
        agreement=agreement,
        policy=SitePolicy(tasks=tuple(TASKS), budget=Budget(max_epsilon=1e9)),
    )


class MemoryChannel:
    """Carries messages within this process.

    Args:
        answer_fns: How each site answers.
    """

    def __init__(self, answer_fns: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self._answer_fns = answer_fns

    def ask(self, messages: Mapping[str, bytes], *, timeout: float) -> dict[str, bytes | Lost]:
        return {site: self._answer_fns[site](message) for site, message in messages.items()}

    def returned(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


# --- Hostile sites --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a mutated message."""

    task: str
    what: str
    outcome: str
    """refused, used, or what went wrong."""


def honest_answer(task: str) -> dict[str, Any]:
    """Returns an honest client's answer to a task, with every metric that is registered."""
    strategy, cfg = ROUNDS[task]
    answers: list[dict[str, Any]] = []

    class Recorder(LocalEngine):
        def map(self, request: Request, clients: Sequence[str]) -> Any:
            replies, failures = super().map(request, clients)
            if request.task == task:
                answers.append(dict(vars(replies[0].content)))
            return replies, failures

    STRATEGIES[strategy](new_state(), [CULPRIT], Recorder([Quadratic(CULPRIT)]), cfg)
    answer = answers[0]
    if "metrics" in answer:
        others = example(schemas.Metrics, READING)
        answer["metrics"] = {**others, **answer["metrics"]}
    return answer


@cache
def mutated_answers(task: str) -> list[tuple[str, Any]]:
    return list(mutated_messages(TASKS[task].request.answer, honest_answer(task), READING))


def hostile(site: Site, task: str, most: int = sys.maxsize) -> Callable[[bytes], bytes]:
    """Returns how a site answers whose answers to a task are one mutation after the other."""
    answers = iter(evenly(mutated_answers(task), most))

    def answer(packed: bytes) -> bytes:
        message, reply = unpack(packed), unpack(site.answer(packed))
        if message.get("task") == task and reply.get("replies"):
            reply["replies"][0]["content"] = next(answers)[1]
        return pack(reply)

    return answer


def evenly(items: list[tuple[str, Any]], most: int) -> list[tuple[str, Any]]:
    count = min(most, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def try_answer(engine: SitesEngine, task: str, what: str) -> Outcome:
    """Runs a round whose second client answers with a mutated message."""
    strategy, cfg = ROUNDS[task]
    try:
        state, rows = STRATEGIES[strategy](new_state(), [HONEST, CULPRIT], engine, cfg)
        json.dumps(rows, allow_nan=False)
        beta_alarm([*rows["clients"], {"kind": "client", "round": 3}], 0.01)
    except RoundFailed as error:
        return Outcome(task, what, f"THE ROUND FAILED: {error}")
    except Exception as error:  # whatever it is, it must not have ended the run
        return Outcome(task, what, f"THE RUN ENDED: {type(error).__name__}: {error}"[:200])
    if not all(parameter.isfinite().all() for parameter in state.adapter.values()):
        return Outcome(task, what, "THE MODEL IS NOT FINITE")
    if HONEST not in state.accepted:
        return Outcome(task, what, "THE HONEST CLIENT WAS DROPPED")
    named = [failure["client"] for failure in rows["round"]["failures"]]
    if not all(failure["reason"].isprintable() for failure in rows["round"]["failures"]):
        return Outcome(task, what, "A REASON HOLDS CONTROL CHARACTERS")
    if (CULPRIT in named) == (CULPRIT in state.accepted):
        return Outcome(task, what, "NOBODY WAS NAMED")
    return Outcome(task, what, "refused" if named else "used")


def answers_in_memory(
    tasks: Sequence[str] = tuple(ROUNDS), most: int = sys.maxsize
) -> list[Outcome]:
    outcomes = []
    for task in tasks:
        cfg = ROUNDS[task][1]
        sites = {site: new_site(client, cfg) for site, client in SITES.items()}
        channel = MemoryChannel(
            {"honest": sites["honest"].answer, "hostile": hostile(sites["hostile"], task, most)}
        )
        engine, chosen = _met(channel, {}), evenly(mutated_answers(task), most)
        outcomes += [try_answer(engine, task, what) for what, _ in chosen]
    return outcomes


def _met(channel: Any, setup: Mapping[str, Any]) -> SitesEngine:
    engine = SitesEngine(
        channel, {site: [client] for site, client in SITES.items()}, [HONEST, CULPRIT], timeout=30.0
    )
    if problems := engine.meet({}, dict(setup)):
        raise RuntimeError(f"the sites cannot begin: {problems}")
    return engine


# --- Hostile servers ------------------------------------------------------------------------------


def honest_request(agreement: str) -> dict[str, Any]:
    """Returns the request that was agreed, as its message."""
    task, cfg = AGREEMENTS[agreement]
    kind = TASKS[task].request
    decided = {"seed": 11, "weighting_options": {"weights": [0.5, 0.5]}, "factors": None}
    fields = {
        name: decided.get(name, 0) if value == "decided by the server" else value
        for name, value in cfg.requests(OBJECTIVES)[kind].items()
    }
    request = kind(round=2, objectives=OBJECTIVES, adapter=dict(START), accepted={}, **fields)
    content = vars(request.to_network(CULPRIT))
    return {
        "do": "map",
        "number": 1,
        "task": task,
        "clients": [CULPRIT],
        "request": unpack(pack(content)),
    }


def mutated_requests(agreement: str) -> list[tuple[str, Any]]:
    """Returns messages of a server that asks for something else."""
    message = honest_request(agreement)
    requests: list[tuple[str, Any]] = []
    kind = TASKS[message["task"]].request
    for what, content in mutated_messages(kind, message["request"], READING):
        requests.append((what, {**message, "request": content}))
    for name in ("do", "task", "clients"):
        for what, changed in mutations(schemas.Text, message[name], READING):
            requests.append((f"{name} {what}", {**message, name: changed}))
    requests.extend((f"task is {task}", {**message, "task": task}) for task in TASKS)
    requests.append(("clients are of another site", {**message, "clients": [HONEST]}))
    options = message["request"].get("options") or {}
    if agreed := options.get("privacy"):
        for change in (
            {"noise_multiplier": 0.0},
            {"noise_multiplier": 0.999},
            {"clip_norm": 1e9},
            {"at": "server"},
            {"statistics": "exact"},
            {"statistics": "noisy"},
            {"noise_seed": 3},
            {"delta": 0.5},
        ):
            changed = {**options, "privacy": {**agreed, **change}}
            request = {**message["request"], "options": changed}
            requests.append((f"privacy has {change}", {**message, "request": request}))
    return requests


def check_request(agreement: str, what: str, answer: bytes, agreed: Mapping[str, Any]) -> Outcome:
    """Returns what a site's answer to a mutated request gives away beyond the agreed content."""
    name = f"{AGREEMENTS[agreement][0]}, {agreement}"
    if SECRET.encode() in answer:
        return Outcome(name, what, "AN ERROR'S TEXT LEFT THE SITE")
    reply = unpack(answer)
    if reply.get("problem") or reply.get("failures"):
        reasons = [reply.get("problem"), *(f["reason"] for f in reply.get("failures", ()))]
        if not all(reason.isprintable() for reason in reasons if reason):
            return Outcome(name, what, "A REASON HOLDS CONTROL CHARACTERS")
        return Outcome(name, what, "refused")
    if "replies" not in reply:
        is_meeting = set(reply) == {"clients", "number"}
        return Outcome(name, what, "used" if is_meeting else f"IT ANSWERED {sorted(reply)}")
    content = reply["replies"][0]["content"]
    if content.keys() != agreed.keys():
        return Outcome(name, what, f"IT SENT {sorted(content.keys() - agreed.keys())}")
    extra = content.get("metrics", {}).keys() - agreed.get("metrics", {}).keys()
    if extra:
        return Outcome(name, what, f"IT TOLD {sorted(extra)}")
    if agreement == "privacy":
        if content["num_examples"] != 1:
            return Outcome(name, what, "IT TOLD THE SIZE OF ITS SHARD")
        # the site's own noise has a seed here, so that it can be seen to be there
        if not what.startswith(("adapter", "round")) and pack(content) != pack(agreed):
            return Outcome(name, what, "IT SENT SOMETHING ELSE")
    return Outcome(name, what, "used")


def requests_in_memory(
    agreements: Sequence[str] = tuple(AGREEMENTS), most: int = sys.maxsize
) -> list[Outcome]:
    outcomes = []
    for agreement in agreements:
        site = new_site(CULPRIT, AGREEMENTS[agreement][1])
        site.answer(pack({"do": "meet", "number": 0, "fingerprint": {}, "setup": {}}))
        honest = unpack(site.answer(pack(honest_request(agreement))))
        agreed = honest["replies"][0]["content"]
        outcomes += [
            check_request(agreement, what, site.answer(pack(message)), agreed)
            for what, message in evenly(mutated_requests(agreement), most)
        ]
    return outcomes


# --- Over FLARE -----------------------------------------------------------------------------------


class Program(SitesController):
    """Tries mutated answers and requests over the sites of a job."""

    def __init__(self, out: str, most: int) -> None:
        super().__init__()
        self._out, self._most = Path(out), most

    def work(self, channel: FlareChannel) -> None:
        outcomes = []
        for task in ROUNDS:
            engine = _met(channel, {"answers": task, "most": self._most})
            chosen = evenly(mutated_answers(task), self._most)
            outcomes += [try_answer(engine, task, what) for what, _ in chosen]
        for agreement in AGREEMENTS:
            _met(channel, {"requests": agreement, "most": self._most})
            honest = pack(honest_request(agreement))
            agreed = unpack(_answer(channel, honest))["replies"][0]["content"]
            for what, message in evenly(mutated_requests(agreement), self._most // 3):
                answer = _answer(channel, pack(message))
                outcomes.append(check_request(agreement, what, answer, agreed))
        rows = [vars(outcome) for outcome in outcomes]
        self._out.write_text(json.dumps(rows), encoding="utf-8")


def _answer(channel: FlareChannel, message: bytes) -> bytes:
    answer = channel.ask({"hostile": message}, timeout=30.0)["hostile"]
    if isinstance(answer, Lost):
        raise RuntimeError(f"the site was lost: {answer.reason}")
    return answer


def site_process(profile: Path, client: str) -> None:
    """Answers as a site, hostile or not, as the server says at each meeting."""
    answer_fns: list[Callable[[bytes], bytes]] = []

    def answer(packed: bytes) -> bytes:
        message = unpack(packed)
        setup = message.get("setup") if isinstance(message, dict) else None
        if isinstance(setup, dict):
            task, agreement = setup.get("answers"), setup.get("requests")
            site = new_site(client, ROUNDS[task][1] if task else AGREEMENTS[str(agreement)][1])
            is_hostile = isinstance(task, str) and client == CULPRIT
            answer_fns[:] = [hostile(site, str(task), setup["most"]) if is_hostile else site.answer]
        return answer_fns[0](packed)

    link.serve(profile, answer)


def over_flare(most: int) -> list[Outcome]:
    """Tries mutated answers and requests over a server and two sites on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.json"

        def site_command(site: str, profile: Path) -> list[str]:
            return [sys.executable, __file__, "--site", str(profile), SITES[site]]

        outcomes = run_job(
            Path(folder) / "kits",
            out=out,
            name="hostile",
            controller=CONTROLLER,
            arguments={"out": str(out), "most": most},
            sites=list(SITES),
            site_command=site_command,
            environment={**search_path(ROOT), "OMP_NUM_THREADS": "1"},
            heartbeat_timeout=20.0,
        )
        return [Outcome(**fields) for fields in outcomes]


# --- The table ------------------------------------------------------------------------------------


def outcomes_of(engine: str, most: int = Config.most) -> dict[str, list[Outcome]]:
    """Returns the outcomes of mutated answers and of mutated requests."""
    if engine == "memory":
        return {"answer": answers_in_memory(), "request": requests_in_memory()}
    outcomes = over_flare(most)
    return {
        "answer": [outcome for outcome in outcomes if "," not in outcome.task],
        "request": [outcome for outcome in outcomes if "," in outcome.task],
    }


def main(cfg: Config) -> None:
    torch.set_num_threads(1)
    rows, broken = [], []
    for engine in cfg.engines:
        for kind, outcomes in outcomes_of(engine, cfg.most).items():
            for task in dict.fromkeys(outcome.task for outcome in outcomes):
                own = [outcome for outcome in outcomes if outcome.task == task]
                counts = Counter(outcome.outcome for outcome in own)
                refused, used = counts["refused"], counts["used"]
                rows.append(
                    [engine, kind, task, len(own), refused, used, len(own) - refused - used]
                )
                broken += [o for o in own if o.outcome not in ("refused", "used")]
    print_table(
        "mutated messages; one that is used was valid, or got what was agreed",
        ["engine", "message", "task", "tried", "refused", "used", "broken promises"],
        rows,
    )
    for outcome in broken:
        print(f"{outcome.task}: {outcome.what}: {outcome.outcome}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--site"]:
        site_process(Path(sys.argv[2]), sys.argv[3])
    else:
        run_cli(main, Config, description=__doc__ or "")
