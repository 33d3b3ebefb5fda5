"""What faults cost, engine by engine: seconds until they are noticed, and what is left of them.

    python benchmarks/faults.py
    python benchmarks/faults.py --engines '[local]'

Three clients of configs/smoke.yaml, three rounds; in the second, client_1 misbehaves in one of many
ways. The round has to go on without it and to name it, and the final adapter has to be that of a
run in which it was merely not drawn, bit for bit; after a failure of its own, that of a run in
which it raised, since it leaves out the batches that it had drawn. `local` has all clients in one
process, `processes` two processes under torchrun, `nvflare` a server and three sites with mutual
TLS.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.loopback import run_job
from firm.federation import Adapter, Client, Engine, LocalEngine, Processes, ServerState
from firm.federation.engines import ProcessesEngine
from firm.federation.serialization import pack, unpack
from firm.federation.strategies import STRATEGIES
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_loading import build_clients, common_calibrations, load
from firm.network import link
from firm.network.agreement import Agreement
from firm.network.controller import FlareChannel, SitesController
from firm.network.daemons import search_path
from firm.network.site import Site
from firm.network.site_policy import SitePolicy
from firm.network.sites import SitesEngine
from firm.run import compose, print_table, run_cli
from firm.run.states import DiskStates

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**search_path(ROOT), "OMP_NUM_THREADS": "1"}
CONTROLLER = "benchmarks.faults.Program"
NUM_ROUNDS, FAULTY_ROUND, CULPRIT = 3, 2, "client_1"
TIMEOUT, MEETING_TIMEOUT, HANG = 10.0, 30.0, 15.0  # seconds

UPDATES: dict[str, Callable[[Adapter, str], Any]] = {
    "NaN in the update": lambda adapter, name: adapter | {name: adapter[name] * torch.nan},
    "infinity in the update": lambda adapter, name: adapter | {name: adapter[name] + torch.inf},
    "a parameter is missing": lambda adapter, name: {k: adapter[k] for k in adapter if k != name},
    "a parameter too many": lambda adapter, name: adapter | {"other": adapter[name]},
    "another shape": lambda adapter, name: adapter | {name: adapter[name][:-1]},
    "another dtype": lambda adapter, name: adapter | {name: adapter[name].double()},
    "an adapter of another kind": lambda adapter, name: {
        key.replace("lora_", "oft_"): value for key, value in adapter.items()
    },
}
COUNTS = {"0 examples": 0, "1e12 examples": 10**12}
RAISES, HANGS, KILLED = "the client raises", "hangs past the time limit", "the process is killed"
EARLIER, TWICE = "answers an earlier round", "answers twice"
OWN = (RAISES, *UPDATES, *COUNTS)
"""Failures of a client itself, after which it does not draw the same batch again."""
EVERYWHERE = (RAISES, "NaN in the update", "another shape", "0 examples")
"""Those of each kind: the server checks all updates alike, however they arrived."""
FAULTS = {
    "local": (*OWN, HANGS),
    "processes": (*EVERYWHERE, HANGS, KILLED),
    "nvflare": (*EVERYWHERE, EARLIER, TWICE, HANGS, KILLED),
}


@dataclass(frozen=True)
class Config:
    engines: list[Literal["local", "processes", "nvflare"]] = field(
        default_factory=lambda: ["local", "processes", "nvflare"]
    )
    """Engines."""


@dataclass(frozen=True)
class Outcome:
    fault: str
    seconds: float
    """Those of the faulty round beyond the fastest one, or until the run stopped."""
    rounds: list[float]
    """Seconds of each round."""
    message: str
    """What the run says, of whom."""
    equal: bool | None
    """Whether the adapter is that of a run without the culprit in the rounds that it missed; None
    if the run stopped."""


# --- A client that misbehaves ---------------------------------------------------------------------


class FaultyClient:
    """Does what another client does, but in one round.

    Args:
        client: The other.
        fault: What happens then.
        done: File that says it has happened, for a process that is started again.
    """

    def __init__(self, client: Client, fault: str, done: Path) -> None:
        self._client, self._fault, self._done = client, fault, done
        self._num_loads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @property
    def num_examples(self) -> int:
        return COUNTS.get(self._fault, 0) if self._now(COUNTS) else self._client.num_examples

    def load(self, adapter: Adapter, round: int = 1) -> None:
        self._num_loads += 1
        self._client.load(adapter, round)

    def step(self, *arguments: Any, **options: Any) -> None:
        if self._now((RAISES,)):
            raise ArithmeticError("the reward model has no memory left")
        if self._now((HANGS, KILLED)) and not self._done.exists():
            self._done.touch()
            if self._fault == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(HANG)
        self._client.step(*arguments, **options)

    def adapter(self) -> Any:
        adapter = self._client.adapter()
        return UPDATES[self._fault](adapter, min(adapter)) if self._now(UPDATES) else adapter

    def _now(self, faults: Collection[str]) -> bool:
        return self._num_loads == FAULTY_ROUND and self._fault in faults


# --- A run ----------------------------------------------------------------------------------------


class Runs:
    """Short runs of the smoke configuration.

    Args:
        processes: Those that work together here.
        folder: For what must outlive a process.
    """

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.cfg = compose(AlignmentConfig, [ROOT / "configs/smoke.yaml"], _OVERRIDES)
        self.names, self.folder = client_names(self.cfg), folder
        self.loaded = load(self.cfg, processes)
        self._references: dict[str, str] = {}
        self._calibrations = common_calibrations(self.loaded, self.cfg, folder)

    def clients(self, names: Sequence[str], fault: str) -> list[Any]:
        clients = build_clients(self.loaded, self.cfg, self._calibrations, names)
        done = self.folder / f"{fault.replace(' ', '_')}.done"
        return [
            FaultyClient(client, fault, done) if client.name == CULPRIT else client
            for client in clients
        ]

    def go(self, engine: Engine, absent: Mapping[int, Collection[str]]) -> dict[str, Any]:
        """Runs without some clients in some rounds; returns its rounds and its adapter's digest."""
        state = ServerState(
            self.loaded.start, objectives=tuple(self.cfg.rewards), seed=self.cfg.seed
        )
        rounds = []
        for number in range(1, NUM_ROUNDS + 1):
            drawn = [name for name in self.names if name not in absent.get(number, ())]
            start = time.perf_counter()
            state, row = STRATEGIES[self.cfg.strategy.name](state, drawn, engine, self.cfg.strategy)
            seconds = time.perf_counter() - start
            rounds.append({"seconds": seconds, "failures": row["round"]["failures"]})
        return {"rounds": rounds, "adapter": hashlib.sha256(pack(state.adapter)).hexdigest()}

    def outcome(self, name: str, fault: str, engine: Engine) -> Outcome:
        """Runs with a fault, and again without the culprit where it was missed."""
        run = self.go(engine, {})
        missed = {
            number: {failure["client"] for failure in row["failures"]}
            for number, row in enumerate(run["rounds"], 1)
        }
        seconds = [row["seconds"] for row in run["rounds"]]
        usual = min(seconds[number - 1] for number, lost in missed.items() if not lost)
        failures = [f for row in run["rounds"] for f in row["failures"]]
        return Outcome(
            fault,
            max(0.0, seconds[FAULTY_ROUND - 1] - usual),
            seconds,
            f"{failures[0]['client']}: {failures[0]['reason']}" if failures else "nothing",
            self._reference(missed, name, fault) == run["adapter"],
        )

    def _reference(self, missed: Mapping[int, Collection[str]], engine: str, fault: str) -> str:
        """Returns the adapter of honest clients of which some are not drawn, or one raises once."""
        is_own = fault in OWN or (fault == HANGS and engine != "nvflare")  # there its site is lost
        key = json.dumps([{number: sorted(lost) for number, lost in missed.items()}, is_own])
        if key not in self._references:
            engine_alone = LocalEngine(self.clients(self.names, RAISES if is_own else ""))
            reference = self.go(engine_alone, {} if is_own else missed)
            self._references[key] = reference["adapter"]
        return self._references[key]


_MINIATURE = ROOT / "firm/miniature/checkpoints"
_OVERRIDES: list[tuple[str, Any]] = [
    ("num_clients", 3),
    ("rounds", NUM_ROUNDS),
    ("rollout.max_new_tokens", 8),
    ("strategy.num_local_steps", 1),
    ("estimator.num_epochs", 1),
    ("policy.path", str(_MINIATURE / "policy")),  # FLARE runs jobs in folders of its own
    *(
        (f"data.{split}.source", str(_MINIATURE / f"prompts_{split}.jsonl"))
        for split in ("train", "validation", "test")
    ),
]


# --- One process, and two -------------------------------------------------------------------------


def local(folder: Path) -> list[Outcome]:
    runs = Runs(Processes(), folder)
    return [
        runs.outcome("local", fault, LocalEngine(runs.clients(runs.names, fault), timeout=TIMEOUT))
        for fault in FAULTS["local"]
    ]


def processes(folder: Path) -> list[Outcome]:
    out = folder / "outcomes.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run(
        [sys.executable, *launcher, __file__, "--member", str(out)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,  # the last fault kills one of them
    )
    return [Outcome(**fields) for fields in json.loads(out.read_text(encoding="utf-8"))]


def member(out: Path) -> None:
    joined = Processes.join()
    runs = Runs(joined, out.parent)
    outcomes: list[Outcome] = []
    for fault in FAULTS["processes"]:
        own = LocalEngine(runs.clients(joined.hosted(runs.names), fault), timeout=TIMEOUT)
        engine = ProcessesEngine(joined, runs.names, own)
        if not joined.is_server:
            engine.serve()
            continue
        start = time.perf_counter()
        try:
            outcomes.append(runs.outcome("processes", fault, engine))
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            message = f"the run stops: {error}"
            outcomes.append(Outcome(fault, seconds, [], message, None))
        engine.close()
    if joined.is_server:
        out.write_text(json.dumps([vars(outcome) for outcome in outcomes]), encoding="utf-8")


# --- Sites ----------------------------------------------------------------------------------------


class Program(SitesController):
    """Tries every fault over the sites of a job."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def work(self, channel: FlareChannel) -> None:
        runs = Runs(Processes(), self._folder)
        outcomes = []
        for fault in FAULTS["nvflare"]:
            engine = SitesEngine(
                channel,
                {f"site_{index}": [name] for index, name in enumerate(runs.names)},
                runs.names,
                timeout=TIMEOUT,
                meeting_timeout=MEETING_TIMEOUT,
            )
            if problems := engine.meet({}, {"fault": fault}):
                raise RuntimeError(f"{fault}: {problems}")
            outcomes.append(vars(runs.outcome("nvflare", fault, engine)))
        path = self._folder / "outcomes.json"
        path.write_text(json.dumps(outcomes), encoding="utf-8")


def site_process(profile: Path, client: str, folder: Path) -> None:
    """Answers as a site, whose client does what the server says that it does."""
    runs = Runs(Processes(), folder)
    known: list[tuple[str, Site]] = []
    answers: list[bytes] = []

    def answer(packed: bytes) -> bytes:
        message = unpack(packed)
        if message["do"] == "meet" and (not known or known[0][0] != message["setup"]["fault"]):
            known[:] = [(message["setup"]["fault"], new_site(message["setup"]["fault"]))]
            answers.clear()
        fault, site = known[0]
        reply = site.answer(packed)
        if message["do"] == "map":
            answers.append(reply)
            if client == CULPRIT and len(answers) == FAULTY_ROUND and fault in (EARLIER, TWICE):
                reply = answers[0] if fault == EARLIER else _twice(reply)
        return reply

    def new_site(fault: str) -> Site:
        states = DiskStates(folder / "states" / fault.replace(" ", "_"))
        return Site(
            lambda setup: LocalEngine(runs.clients([client], fault), states=states),
            [client],
            fingerprint={},
            agreement=Agreement(
                runs.cfg.strategy,
                objectives=list(runs.cfg.rewards),
                num_rounds=NUM_ROUNDS,
                clients=[client],
            ),
            policy=SitePolicy(),
        )

    link.serve(profile, answer)


def _twice(packed: bytes) -> bytes:
    message = unpack(packed)
    return pack({**message, "replies": message["replies"] * 2})


def nvflare(folder: Path) -> list[Outcome]:
    clients = {f"site_{index}": f"client_{index}" for index in range(3)}

    def site_command(site: str, profile: Path) -> list[str]:
        own = folder / site
        own.mkdir()
        return [sys.executable, __file__, "--site", str(profile), clients[site], str(own)]

    outcomes = run_job(
        folder / "kits",
        out=folder / "outcomes.json",
        name="faults",
        controller=CONTROLLER,
        arguments={"folder": str(folder)},
        sites=list(clients),
        site_command=site_command,
        environment=ENVIRONMENT,
        heartbeat_timeout=8.0,
    )
    return [Outcome(**fields) for fields in outcomes]


# --- The table ------------------------------------------------------------------------------------

ENGINES = {"local": local, "processes": processes, "nvflare": nvflare}


def outcomes_of(engine: str) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        return ENGINES[engine](Path(folder))


def main(cfg: Config) -> None:
    torch.set_num_threads(1)
    rows = []
    for engine in cfg.engines:
        for outcome in outcomes_of(engine):
            adapter = {None: "–", True: "as without it", False: "ANOTHER"}[outcome.equal]
            rounds = " ".join(f"{seconds:.1f}" for seconds in outcome.rounds) or "–"
            message = outcome.message
            message = message if len(message) < 60 else f"{message[:57]}..."
            rows.append([engine, outcome.fault, f"{outcome.seconds:.1f}", rounds, message, adapter])
    print_table(
        f"{CULPRIT} misbehaves in round {FAULTY_ROUND} of {NUM_ROUNDS}",
        ["engine", "fault", "noticed, s", "rounds, s", "what the run says", "final adapter"],
        rows,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        member(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--site"]:
        site_process(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    else:
        run_cli(main, Config, description=__doc__ or "")
