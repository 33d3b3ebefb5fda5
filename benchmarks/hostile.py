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
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

import firm.alignment.client  # registers the metrics of language models
import firm.fmoo.client  # noqa: F401  # and those of the classic wing
from benchmarks.loopback import run_job
from firm.federation import (
    Adapter,
    Client,
    Gradients,
    LocalEngine,
    RoundFailed,
    ServerState,
    State,
    beta_alarm,
)
from firm.federation import schema as schemas
from firm.federation.engines import Agreement, Budget, Lost, Site, SitePolicy, SitesEngine
from firm.federation.messages import Request
from firm.federation.privacy import PrivacyConfig
from firm.federation.schema import METRICS, Reading, Schema
from firm.federation.serialization import pack, unpack
from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.fedcmoo import FedCmooConfig
from firm.federation.strategies.fedcmoo_pref import FedCmooPrefConfig
from firm.federation.strategies.firm import FirmConfig
from firm.federation.strategies.fsmgda import FsmgdaConfig
from firm.federation.tasks import TASKS
from firm.gradients import jacobian
from firm.network import link
from firm.network.controller import FlareChannel, SitesController
from firm.network.daemons import search_path
from firm.run import print_table, run_cli

ROOT = Path(__file__).parent.parent
CONTROLLER = "benchmarks.hostile.Program"
OBJECTIVES = ("helpful", "harmless")
HONEST, CULPRIT = "client_0", "client_1"
SITES = {"honest": HONEST, "hostile": CULPRIT}
NUM_ROUNDS = 5
SECRET = "Human: what I told nobody"
"""Stands in every error of the clients, and must never leave a site."""

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


# --- Examples and mutations, from the schemas ----------------------------------------------------

JUNK: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    10**400,
    -1,
    0.5,
    True,
    None,
    "",
    "x",
    "\x1b[2J\nround 9/9  helpful 1.000",
    "y" * 100_000,
    [],
    [None],
    [[1e308, 1e308]],
    {},
    {"a": {"b": "c"}},
    (1, 2),
    torch.zeros(()),
    torch.full((2, 2), math.nan),
)
NAMES = ("", "../../x", "\x1b[2J", "kind", "round", "n" * 10_000)


def example(schema: Schema, reading: Reading) -> Any:
    match schema:
        case schemas.Optional():
            return example(schema.schema, reading)
        case schemas.PerObjective(pairs=pairs):
            count = len(reading.objectives)
            return [example(schema.schema, reading)] * (
                count * (count - 1) // 2 if pairs else count
            )
        case schemas.Items():
            return [example(schema.schema, reading)] * max(2, schema.min_length)
        case schemas.ByObjective(pairs=True):
            return {"-".join(reading.objectives): example(schema.schema, reading)}
        case schemas.ByObjective():
            return {name: example(schema.schema, reading) for name in reading.objectives}
        case schemas.Named():
            return {"name": example(schema.schema, reading)}
        case schemas.Gram():
            return [[1.0, 0.2], [0.2, 2.0]]
        case schemas.Metrics():
            return {name: example(each.schema, reading) for name, each in METRICS.items()}
        case schemas.Number():
            return int(max(schema.low, 1)) if schema.is_integer else float(max(schema.low, 0.5))
        case schemas.Text():
            return next(iter(schema.choices)) if schema.choices else "text"
    return {}  # a mapping with fields of its own


def mutations(schema: Schema, value: Any, reading: Reading) -> Iterator[tuple[str, Any]]:
    """Yields values in place of one that a schema accepts, and what was done."""
    for junk in JUNK:
        yield f"is {schemas.shown(junk)}", junk
    if isinstance(schema, schemas.Optional):
        schema = schema.schema
    if isinstance(schema, schemas.Text) and schema.choices:
        yield from ((f"is {choice}", choice) for choice in schema.choices if choice != value)
    if isinstance(schema, schemas.Flag):
        yield f"is {not value}", not value
    if isinstance(schema, schemas.Number) and isinstance(value, int | float):
        yield from ((f"is {other}", other) for other in (value + 1, value * 2, 2**63))
    if isinstance(value, torch.Tensor):
        yield from _tensors(value)
    elif isinstance(value, dict):
        yield from _dictionaries(schema, value, reading)
    elif isinstance(value, list | tuple) and value:
        yield "lacks an item", list(value[:-1])
        yield "has an item twice", [*value, value[-1]]
        yield "is very long", [value[0]] * (schemas.MAX_ITEMS + 1)
        for what, item in mutations(_inner(schema), value[-1], reading):
            yield f"'s item {what}", [*value[:-1], item]
        if isinstance(schema, schemas.Gram):
            yield "is asymmetric", [[1.0, 0.5], [-0.5, 1.0]]
            yield "is of no gradients", [[1.0, 9.0], [9.0, 1.0]]
            yield "is negative", [[-1.0, 0.0], [0.0, 1.0]]


def _dictionaries(
    schema: Schema, value: dict[str, Any], reading: Reading
) -> Iterator[tuple[str, Any]]:
    for name in NAMES:
        yield f"has the name {schemas.shown(name)}", {**value, name: 1.0}
    many = {f"name {index}": 1.0 for index in range(schemas.MAX_NAMES + 1)}
    yield "has very many names", {**value, **many}
    for name, item in value.items():
        yield f"lacks {name}", {key: value[key] for key in value if key != name}
        if isinstance(schema, schemas.Metrics):
            inner = METRICS[name].schema
        elif isinstance(schema, schemas.Fields):
            inner = schema.schemas[name]
        else:
            inner = _inner(schema)
        for what, changed in mutations(inner, item, reading):
            yield f".{name} {what}", {**value, name: changed}


def _tensors(value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "is NaN", value * math.nan
    yield "is infinite", value + math.inf
    yield "is huge", torch.full_like(value, 3e38) if value.is_floating_point() else value
    yield "is of doubles", value.double()
    yield "is of integers", value.long()
    yield "is of bools", value.bool()
    yield "is flat", value.flatten()
    yield "is empty", value[:0]
    yield "is longer", torch.cat([value, value])
    yield "has more axes", value[None]
    if value.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        for exponent in [*range(-38, 39), *range(-38, 39)]:
            random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            yield f"is random, of size 1e{exponent}", (random * 10.0**exponent).to(value.dtype)
        for index in range(min(value.numel(), 8)):
            for entry in (math.nan, -math.inf, 1e17, -1e17):
                changed = value.clone()
                changed.view(-1)[index] = entry
                yield f"has {entry} as its entry {index}", changed


def _inner(schema: Schema) -> Schema:
    """Returns the schema of a container's items; a number's where it has none."""
    return getattr(schema, "schema", schemas.Number())


def mutated_messages(
    kind: type[Any], fields: Mapping[str, Any], reading: Reading
) -> Iterator[tuple[str, Any]]:
    """Yields a message's fields with one of them mutated, or something else in place of all."""
    yield from ((f"message is {schemas.shown(junk)}", junk) for junk in JUNK)
    yield "message has an unknown field", {**fields, "extra": 1}
    for name, schema in schemas.fields_of(kind).schemas.items():
        yield f"{name} is missing", {key: fields[key] for key in fields if key != name}
        if name in fields:
            for what, changed in mutations(schema, fields[name], reading):
                yield f"{name} {what}", {**fields, name: changed}


# --- Clients and sites ----------------------------------------------------------------------------


class Quadratic(Client):
    """A client in a page: objective j is half the squared distance to its target.

    Args:
        name: Its name.
        num_examples: Size of its shard, which it keeps to itself where privacy says so.
    """

    objectives = OBJECTIVES
    capabilities = frozenset({"losses"})

    def __init__(self, name: str, num_examples: int = 17) -> None:
        self.name, self.num_examples = name, num_examples
        self._targets = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
        self._parameters = {
            "first": torch.zeros(2, requires_grad=True),
            "second": torch.zeros(1, requires_grad=True),
        }

    def load(self, adapter: Adapter, round: int = 1) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if adapter[name].shape != parameter.shape:
                    raise ValueError(f"{SECRET}: another shape")
                parameter.copy_(adapter[name])

    @property
    def whole(self) -> None:
        return None

    def minibatches(self) -> Iterator[None]:
        yield None

    def batches(self, num_steps: int) -> Iterator["Quadratic"]:
        for _ in range(num_steps):
            yield self

    def gradients(self, minibatch: Any) -> Gradients:
        losses = self._losses()
        return Gradients(jacobian(losses, self._parameters.values()), losses.detach())

    def losses(self) -> torch.Tensor:
        return self._losses().detach()

    def _losses(self) -> torch.Tensor:
        point = torch.cat(list(self._parameters.values()))
        return (point - self._targets).square().sum(dim=1) / 2

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        direction = weights.float() @ gradients.jacobian.float()
        with torch.no_grad():
            for parameter, change in zip(
                self._parameters.values(), direction.split([2, 1]), strict=True
            ):
                parameter -= 0.1 * change

    def adapter(self) -> Adapter:
        return {name: value.detach().clone() for name, value in self._parameters.items()}

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        pass

    def metrics(self) -> dict[str, Any]:
        return {}


START = {"first": torch.tensor([0.1, 0.2]), "second": torch.tensor([0.3])}
READING = Reading(OBJECTIVES, START)


def new_state() -> ServerState:
    return ServerState(dict(START), objectives=OBJECTIVES, seed=0)


def new_site(client: str, cfg: Any) -> Site:
    agreement = Agreement(cfg, objectives=OBJECTIVES, num_rounds=NUM_ROUNDS, clients=[client])
    return Site(
        lambda setup: LocalEngine([Quadratic(client)]),
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
        others = example(schemas.Metrics(), READING)
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
        for what, changed in mutations(schemas.Text(), message[name], READING):
            requests.append((f"{name} {what}", {**message, name: changed}))
    requests.extend((f"task is {task}", {**message, "task": task}) for task in TASKS)
    requests.append(("clients are of another site", {**message, "clients": [HONEST]}))
    if message["request"].get("privacy"):
        agreed = message["request"]["privacy"]
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
            request = {**message["request"], "privacy": {**agreed, **change}}
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
