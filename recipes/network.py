"""One run across several sites, over a network, by NVIDIA FLARE (the extra `network`).

    python recipes/network.py provision --config configs/network.yaml --out my_federation
    python recipes/network.py start-server --kit my_federation/server     # on the server
    python recipes/network.py start-site --kit hospital                   # at each site
    python recipes/network.py submit --kit my_federation/admin            # whoever starts the run
    python recipes/network.py status --kit my_federation/admin
    python recipes/network.py stop --kit my_federation/admin

`provision` makes a folder for each party; hand each its own. A site runs this project as it is
installed there: no code comes over the network, and nothing leaves but adapters and the figures
that its policy names. `demo` does all of it on one machine. `COMMAND --help` prints what each can
be told.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hashlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from nvflare.fuel.flare_api.api_spec import NoConnection, SessionClosed
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from firm.federation import Engine, LocalEngine, Processes, ProcessesEngine, iid_partition
from firm.federation.engines import Agreement, Ledger, Site, SitePolicy, SitesEngine
from firm.federation.outside import check_name, printable
from firm.network import certificates, console, kits, link
from firm.network.controller import FlareChannel, SitesController
from firm.network.daemons import Daemons, flare_command, free_port, search_path, wait_for_port
from firm.network.jobs import NAME
from firm.network.states import DiskStates
from firm.run import Run, UserError, compose, print_table, run_cli, to_dict, to_yaml
from firm.run.directory import leaves
from firm.run.lock import check_not_held
from recipes import firm_hh

ROOT = Path(__file__).parent.parent
logger = logging.getLogger(__name__)

CONTROLLER = "recipes.network.Federation"
"""The one workflow that a server of ours allows."""

LEDGER = "ledger.jsonl"
"""A site's record of its answers and refusals, in its kit."""
OUTPUT = "output.txt"
"""What the processes of a kit print, in its folder."""

_HERE = "FIRM_FOLDER"
"""Names the folder that relative paths of a run start from; FLARE runs jobs in others."""

OWN_KEYS = (
    "checkpoints",
    "client_timeout",
    "data",
    "evaluation",
    "name",
    "num_threads",
    "out",
    "plan",
    "policy.device",
    "policy.path",
    "processes_per_client",
    "resume",
    "tracking",
)
"""Keys of a run that each party may set as it likes; all others must be the same everywhere."""
OWN_REWARD_KEYS = ("batch_size", "device", "dtype", "path")
"""The same of a reward model."""


@dataclass(frozen=True)
class FederationConfig:
    """Who takes part, and in what."""

    sites: dict[str, list[int]]
    """Numbers of each site's clients."""
    out: Path
    """Folder of the kits."""
    name: str = "federation"
    """Of the federation."""
    host: str = "localhost"
    """Name by which the sites reach the server; it stands in its certificate."""
    port: int = 8002
    """The server's one port."""
    valid_days: int = 360
    """After which the certificates end."""
    run: Path = ROOT / "configs/miniature.yaml"
    """Configuration of the run."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run and their values, such as {rounds: 8}, laid over it."""
    timeout: int = 3600
    """Seconds that a site has for its part of a round."""
    meeting_timeout: int = 20
    """Seconds that a site which was lost has to come back, in each round."""
    heartbeat_interval: float = 5.0
    """Seconds between two signs of life of a site's process."""
    heartbeat_timeout: float = 30.0
    """Seconds without one after which it counts as dead."""

    def __post_init__(self) -> None:
        clients = sorted(client for own in self.sites.values() for client in own)
        if not self.sites or not all(self.sites.values()) or clients != list(range(len(clients))):
            raise ValueError(
                "sites must give each of the clients 0, 1, ... to one site, and each site one, got "
                f"{self.sites}."
            )
        check_name(self.name, "a federation's name")
        for site in self.sites:
            check_name(site, "a site's name")
        if strange := [name for name in self.sites if name in ("server", "admin", "authority")]:
            raise ValueError(f"a site cannot be called {strange[0]!r}; choose another name.")
        if not 0 < self.heartbeat_interval < self.heartbeat_timeout:
            raise ValueError(
                "heartbeat_timeout must be longer than heartbeat_interval, got "
                f"{self.heartbeat_timeout:g} and {self.heartbeat_interval:g}."
            )


@dataclass(frozen=True)
class ServerConfig:
    """The server's own part."""

    kit: Path
    """The server's kit."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run that are the server's own, such as {data.test.source: held_out.jsonl}."""


@dataclass(frozen=True)
class SiteConfig:
    """A site's own part."""

    kit: Path
    """The site's kit."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the run that are the site's own, such as {data.train.source: ours.jsonl,
    policy.path: /models/llama}."""
    own_prompts: bool = False
    """Whether all prompts of data.train are this site's; if not, its clients take the shards that
    the run's partition gives them, which is for trials on one file."""
    policy: SitePolicy = field(default_factory=SitePolicy)
    """What may leave the site beside the adapter."""
    processes: int = 1
    """Processes of the site, one for each of its GPUs, by torchrun."""
    processes_per_client: int = 1
    """How many of them work as one on a client."""


@dataclass(frozen=True)
class AdminConfig:
    """Whoever starts, watches and stops runs."""

    kit: Path
    """The administrator's kit."""
    name: str = "run"
    """Of the run, and of its folder at the server; a name that is there already goes on from its
    last checkpoint."""
    follow: bool = True
    """Whether to wait until the run ends."""

    def __post_init__(self) -> None:
        check_name(self.name, "a run's name")


# --- Commands -------------------------------------------------------------------------------------


def provision(cfg: FederationConfig) -> None:
    """Makes the kits."""
    run = _run_config(cfg.run, cfg.overrides)
    clients = sum(map(len, cfg.sites.values()))
    if run.num_clients != clients:
        raise UserError(
            f"the run has {run.num_clients} clients, the sites {clients}; make num_clients and "
            "sites agree."
        )
    if cfg.out.exists():
        raise UserError(
            f"{cfg.out} exists already; kits are made once, with keys of their own. Choose another "
            "folder, or remove it."
        )
    made = kits.provision(
        cfg.out,
        name=cfg.name,
        host=cfg.host,
        port=cfg.port,
        sites=list(cfg.sites),
        valid_days=cfg.valid_days,
    )
    for kit in made.values():
        (kit / "federation.yaml").write_text(to_yaml(cfg), encoding="utf-8")
        (kit / "run.yaml").write_text(to_yaml(run), encoding="utf-8")
    print_table(
        f"{cfg.name}: a folder for each party; hand each its own, and nobody `authority`",
        ["party", "folder", "starts"],
        [
            [party, str(kit), _command(party, kit)]
            for party, kit in sorted(made.items(), key=lambda item: item[0] != "server")
        ],
    )


def start_server(cfg: ServerConfig) -> None:
    """Runs the server until it is stopped."""
    host, port = _address(cfg.kit)
    daemons = _server(cfg)
    print(f"server {host}:{port}, log {cfg.kit / OUTPUT}", flush=True)
    _keep_running(daemons)


def start_site(cfg: SiteConfig) -> None:
    """Runs a site until it is stopped: its connection to the server, and its own process."""
    host, port = _address(cfg.kit)
    daemons = _site(cfg)
    _wait_for_server(cfg.kit)
    print(f"{_site_name(cfg.kit)}: server {host}:{port}, log {cfg.kit / OUTPUT}", flush=True)
    _keep_running(daemons)


def submit(cfg: AdminConfig) -> None:
    """Starts a run, or takes it up, and waits for its end.

    While it waits it starts the run again, from its last checkpoint, when the server was lost and
    is back, or a site is.
    """
    federation = _federation(cfg.kit)
    if problem := _reach(cfg.kit):
        raise UserError(_unreachable(cfg.kit, problem))
    while _one_job(cfg, federation):
        _wait_for_server(cfg.kit)


def status(cfg: AdminConfig) -> None:
    """Prints who is connected and what runs."""
    federation = _federation(cfg.kit)
    host, port = _address(cfg.kit)
    with _session(cfg.kit) as opened:
        connected = console.connected(opened)
        rows = [[s, "connected" if s in connected else "away"] for s in federation.sites]
        print_table(f"{federation.name}: server {host}:{port}", ["site", ""], rows)
        print_table("runs", ["name", "status", "submitted"], console.jobs(opened))


def stop(cfg: AdminConfig) -> None:
    """Stops what runs; its last checkpoint stays, and `submit` goes on from it."""
    with _session(cfg.kit) as opened:
        jobs = console.unfinished(opened)
        for job, name in jobs.items():
            opened.abort_job(job)
            print(f"{name} stops")
        if not jobs:
            print("nothing runs")


def demo(cfg: FederationConfig) -> None:
    """Does all of it on this machine: kits, a server, its sites, and a run to its end."""
    cfg = replace(cfg, host="localhost", port=free_port())
    provision(cfg)
    with ExitStack() as stack:
        stack.enter_context(_server(ServerConfig(cfg.out / "server")))
        wait_for_port(cfg.port)
        for site in cfg.sites:
            stack.enter_context(_site(SiteConfig(cfg.out / site)))
        submit(AdminConfig(cfg.out / "admin"))
    print(f"report   {cfg.out / 'server/runs/run/report.html'}")


# --- The server's process -------------------------------------------------------------------------


class Federation(SitesController):
    """A run whose clients are at their sites."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = check_name(name, "a run's name")

    def work(self, channel: FlareChannel) -> None:
        """Runs it from the start, or from its last checkpoint."""
        flare: Any = self.engine
        kit = Path(flare.get_workspace().get_root_dir())
        os.chdir(os.environ[_HERE])
        federation = _federation(kit)
        own = compose(ServerConfig, [kit / "server.yaml"], [])
        out = kit / "runs" / self._name
        cfg = replace(_run_config(kit / "run.yaml", own.overrides), out=out, resume=True)
        _wait_until_free(out)
        Run.check(out, to_dict(cfg), resume=True, ignore=firm_hh.FREE_KEYS)
        world = firm_hh.load(cfg, Processes())
        calibrations = firm_hh.common_calibrations(world, cfg, out)
        shown = Console(file=channel.transcript, highlight=False)
        progress = firm_hh.progress_of(cfg, console=shown)
        engine = SitesEngine(
            channel,
            _clients_by_site(federation),
            firm_hh.client_names(cfg),
            timeout=federation.timeout,
            meeting_timeout=federation.meeting_timeout,
            on_event=progress.event,
        )
        setup = {"calibrations": {key: c.to_dict() for key, c in calibrations.items()}}
        if problems := engine.meet(fingerprint(cfg, world), setup):
            raise UserError(f"the sites cannot begin: {'; '.join(problems)}.")
        firm_hh.train(world, cfg, calibrations, engine, progress, out)


def _wait_until_free(out: Path, patience: float = 60.0) -> None:
    """Waits a while for the process of an earlier job to let the run's folder go."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with suppress(UserError):
            check_not_held(out)
            return
        time.sleep(0.5)


# --- A site's process -----------------------------------------------------------------------------


def site_process(kit: Path) -> None:
    """Loads everything once, waits for a job, and answers its messages until it ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    own = compose(SiteConfig, [kit / "site.yaml"], [])
    federation, site = _federation(kit), _site_name(kit)
    cfg = _run_config(kit / "run.yaml", own.overrides)
    processes = Processes.join(per_client=own.processes_per_client)
    world = firm_hh.load(cfg, processes, measures=False)
    names = _clients_by_site(federation)[site]
    told = fingerprint(cfg, world)
    states = kit / "states" / _digest(sorted(told.items())) / f"process_{processes.rank}"

    def build(setup: Mapping[str, Any]) -> Engine:
        calibrations = firm_hh.as_calibrations(setup["calibrations"])
        prompts = None
        if own.own_prompts:
            shards = iid_partition(
                len(world.prompts), len(names), seed=cfg.seed, min_examples=cfg.ppo.batch_size
            )
            prompts = {
                name: [world.prompts[index] for index in shard]
                for name, shard in zip(names, shards, strict=True)
            }
        hosted = processes.hosted(names)
        clients = firm_hh.clients_of(world, cfg, calibrations, hosted, prompts=prompts)
        local = LocalEngine(
            clients,
            timeout=cfg.client_timeout,
            interrupt=processes.per_client == 1,
            states=DiskStates(states),
        )
        return ProcessesEngine(processes, names, local) if processes.size > 1 else local

    if not processes.is_server:
        engine = build(processes.broadcast())
        assert isinstance(engine, ProcessesEngine)
        engine.serve()
        return
    engines: list[Engine] = []

    def build_all(setup: Mapping[str, Any]) -> Engine:
        firm_hh.as_calibrations(setup["calibrations"])  # before the other processes are told
        processes.broadcast(setup)
        engines.append(build(setup))
        return engines[0]

    agreement = Agreement(
        cfg.strategy, objectives=list(cfg.rewards), num_rounds=cfg.rounds, clients=names
    )
    answers = Site(
        build_all,
        names,
        fingerprint=told,
        agreement=agreement,
        policy=own.policy,
        ledger=Ledger(agreement, own.policy.budget, kit / LEDGER),
    )
    link.serve(kit / "local/attach_profile.json", answers.answer)
    for engine in engines:
        engine.close()


def fingerprint(cfg: firm_hh.Config, world: firm_hh.World) -> dict[str, Any]:
    """What must be the same at server and sites, by a name that a person understands."""
    policy: Any = world.trainer.policy_model
    base = hashlib.sha256()
    for name, parameter in sorted(policy.named_parameters()):
        if "lora_" not in name:
            base.update(name.encode())
            base.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    tokenizer: PreTrainedTokenizerBase = world.trainer.processing_class
    return {
        "version": version("firm-align"),
        "base model": base.hexdigest()[:16],
        "tokenizer": _digest(sorted(tokenizer.get_vocab().items())),
        **{f"key {key}": value for key, value in leaves(to_dict(cfg)) if not _is_own(key)},
    }


def _is_own(key: str) -> bool:
    parts = key.split(".")
    if "rewards" in parts[:-1] and parts[-1] in OWN_REWARD_KEYS:
        return True
    return any(key == own or key.startswith(f"{own}.") for own in OWN_KEYS)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# --- Kits -----------------------------------------------------------------------------------------


def _run_config(base: Path, overrides: Mapping[str, Any]) -> firm_hh.Config:
    return compose(firm_hh.Config, [base], list(overrides.items()))


def _federation(kit: Path) -> FederationConfig:
    path = kit / "federation.yaml"
    if not path.is_file():
        raise UserError(f"{kit} is no kit; make kits with recipes/network.py provision.")
    return compose(FederationConfig, [path], [])


def _site_name(kit: Path) -> str:
    sites = _federation(kit).sites
    names = [site for site in sites if kit.resolve().name == site]
    if not names:
        raise UserError(
            f"{kit} must be called as its site ({', '.join(sites)}); give the folder its name back."
        )
    return names[0]


def _clients_by_site(federation: FederationConfig) -> dict[str, list[str]]:
    return {site: [f"client_{index}" for index in own] for site, own in federation.sites.items()}


def _address(kit: Path) -> tuple[str, int]:
    _federation(kit)
    try:
        address = kits.server_address(kit)
    except ValueError as error:
        raise UserError(str(error)) from error
    if problem := certificates.expiry(kit):
        raise UserError(f"{problem}; ask whoever made the kits for new ones.")
    return address


def _server(cfg: ServerConfig) -> Daemons:
    """Makes a server ready to start."""
    _, port = _address(cfg.kit)
    check_not_held(cfg.kit)
    _check_port(port)
    _run_config(cfg.kit / "run.yaml", cfg.overrides)
    own = replace(cfg, kit=cfg.kit.resolve())
    (cfg.kit / "server.yaml").write_text(to_yaml(own), encoding="utf-8")
    kits.prepare_server(cfg.kit, controller=CONTROLLER, arguments={"name": NAME})
    return _daemons(cfg.kit, {"server": flare_command("server", cfg.kit)})


def _site(cfg: SiteConfig) -> Daemons:
    """Makes a site ready to start."""
    _address(cfg.kit)
    check_not_held(cfg.kit)
    site = _site_name(cfg.kit)
    _run_config(cfg.kit / "run.yaml", cfg.overrides)
    own = replace(cfg, kit=cfg.kit.resolve())
    (cfg.kit / "site.yaml").write_text(to_yaml(own), encoding="utf-8")
    kits.prepare_site(cfg.kit, site=site)
    launcher = ["-m"]
    if cfg.processes > 1:
        count = str(cfg.processes)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count, "-m"]
    return _daemons(
        cfg.kit,
        {
            "connection": flare_command("client", cfg.kit, site),
            "process": [sys.executable, *launcher, "recipes.network", "site-process", str(own.kit)],
        },
    )


def _command(party: str, kit: Path) -> str:
    program = "python recipes/network.py"
    if party == "admin":
        return f"{program} submit --kit {kit}"
    return f"{program} {'start-server' if party == 'server' else 'start-site'} --kit {kit}"


# --- Processes ------------------------------------------------------------------------------------


def _daemons(kit: Path, commands: Mapping[str, list[str]]) -> Daemons:
    """The processes of a kit; relative paths of the run start from this process's folder."""
    environment = {**search_path(ROOT), _HERE: str(Path.cwd())}
    return Daemons(commands, output=kit / OUTPUT, environment=environment)


def _keep_running(daemons: Daemons) -> None:
    """Watches over processes until this one is stopped."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with daemons:
            while True:
                daemons.watch()
                time.sleep(0.5)
    except KeyboardInterrupt:
        print("stopped", flush=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"port {port} is in use ({error.strerror}); stop what listens there, or provision "
                "with another port."
            ) from error


def _reach(kit: Path) -> str | None:
    """Why the server of a site's or an administrator's kit cannot be reached; None if it can.

    Raises:
        UserError: It can, and server and kit do not accept each other.
    """
    host, port = _address(kit)
    try:
        problem = certificates.refusal(kit, host, port)
    except OSError as error:
        return error.strerror or str(error)
    if problem:
        raise UserError(f"{host}:{port}: {problem}; take the kit that was made with the server's.")
    return None


def _wait_for_server(kit: Path) -> None:
    """Waits for the server, and says so."""
    host, port = _address(kit)
    told = None
    while problem := _reach(kit):
        if problem != told:
            print(f"{host}:{port} cannot be reached ({problem}); trying again", flush=True)
            told = problem
        time.sleep(2)


def _session(kit: Path) -> Any:
    if problem := _reach(kit):
        raise UserError(_unreachable(kit, problem))
    return console.session(kit)


def _unreachable(kit: Path, problem: str) -> str:
    host, port = _address(kit)
    return (
        f"{host}:{port} cannot be reached ({problem}); start the server with recipes/network.py "
        "start-server, or correct the way to it."
    )


def _one_job(cfg: AdminConfig, federation: FederationConfig) -> bool:
    """Submits a run and follows it; whether it is to be submitted again.

    Raises:
        UserError: It ended otherwise than well.
    """
    job = None
    try:
        with console.session(cfg.kit) as opened:
            jobs = console.unfinished(opened)
            job = next((job for job, name in jobs.items() if name == cfg.name), None)
            known = "runs already" if job else "submitted"
            job = job or console.submit(
                opened,
                name=cfg.name,
                sites=list(federation.sites),
                controller=CONTROLLER,
                arguments={"name": cfg.name},
                heartbeat_interval=federation.heartbeat_interval,
                heartbeat_timeout=federation.heartbeat_timeout,
            )
            print(f"run {cfg.name} {known}, job {printable(job)}", flush=True)
            return cfg.follow and _follow(opened, job, list(federation.sites))
    except (SessionClosed, ConnectionError, NoConnection) as error:
        if job is None and not _reach(cfg.kit):
            raise UserError(f"the server does not take the run: {printable(error)}") from error
        print("the server is lost; the run goes on when it is back", flush=True)
        return True


def _follow(opened: Any, job: str, sites: list[str]) -> bool:
    """Tells how a job fares until it ends; whether the run is to be started again.

    Raises:
        UserError: It ended otherwise than well.
    """
    told, looks, num_lines, idle = "", 0, 0, set[str]()
    while True:
        state = console.status(opened, job)
        if state == "SUBMITTED":
            connected = console.connected(opened)
            away = [site for site in sites if site not in connected]
            state = f"waits for {', '.join(away)}" if away else "waits"
        if state.startswith("FINISHED"):
            break
        if state != told:
            print(state.lower(), flush=True)
            told = state
        if state == "RUNNING":
            lines = console.said(opened, job, num_lines)
            print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
            num_lines += len(lines)
        looks += 1
        if state == "RUNNING" and looks % 5 == 0:
            # Seen twice: right after its start a job may not have reached a site yet.
            idle, before = set(console.without_part(opened)), idle
            if back := sorted(idle & before):
                console.tell_returned(opened, job, back)
        time.sleep(1)
    if "COMPLETED" in state:
        print("finished", flush=True)
        return False
    reason, again = console.reason(opened, job)
    if again:
        print(reason, flush=True)
        return True
    raise UserError(
        f"the run has ended with {state.lower().removeprefix('finished:')}: "
        f"{reason or f'the reason stands in the log of the server, {OUTPUT}'}"
    )


COMMANDS = {
    "provision": (provision, FederationConfig),
    "start-server": (start_server, ServerConfig),
    "start-site": (start_site, SiteConfig),
    "submit": (submit, AdminConfig),
    "status": (status, AdminConfig),
    "stop": (stop, AdminConfig),
    "demo": (demo, FederationConfig),
}


def main(argv: list[str]) -> None:
    """Runs the command that the arguments name."""
    if argv[:1] == ["site-process"] and len(argv) == 2:
        site_process(Path(argv[1]))
        return
    if not argv or argv[0] not in COMMANDS:
        print(__doc__)
        raise SystemExit(0 if argv[:1] in ([], ["-h"], ["--help"]) else 2)
    command, config = COMMANDS[argv[0]]
    run_cli(command, config, argv[1:], description=command.__doc__ or "")


if __name__ == "__main__":
    main(sys.argv[1:])
