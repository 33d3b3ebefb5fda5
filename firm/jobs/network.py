"""Runs an alignment over a network: the processes of the server and of a site."""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from firm.base.inside import replace_text
from firm.base.sanitize import check_name
from firm.federation.engines.engine import Engine
from firm.federation.engines.local import LocalEngine
from firm.federation.engines.processes import ProcessesEngine
from firm.federation.options.secure.engine import SecureEngine
from firm.federation.processes import Processes
from firm.jobs.alignment import (
    RENEWED_KEYS,
    check_continues,
    notes_at_start,
    progress_of,
    run_rounds,
)
from firm.jobs.alignment_config import (
    SERVER_KEYS,
    AlignmentConfig,
    PromptPartitionConfig,
    client_names,
    held_objectives,
)
from firm.jobs.alignment_data import data_of
from firm.jobs.alignment_loading import (
    AUTO,
    LoadedRun,
    as_calibrations,
    as_figures,
    build_clients,
    common_calibrations,
    load,
    own_engine,
    set_threads,
    with_fast_dtypes,
    with_recorded,
    without_start,
)
from firm.jobs.network_config import (
    HOME_VARIABLE,
    ServerConfig,
    SiteConfig,
    certificates_digest,
    clients_by_site,
    federation_of,
    kit_config,
    site_identities,
    site_name,
)
from firm.network import link
from firm.network.agreement import Agreement, Ledger, Refused
from firm.network.controller import FlareChannel, SitesController
from firm.network.site import Site
from firm.network.sites import SitesEngine
from firm.run.config import compose, to_dict
from firm.run.differences import leaves
from firm.run.directory import Run
from firm.run.errors import UserError
from firm.run.files import make_private_folder
from firm.run.lock import check_not_held
from firm.run.states import DiskStates

logger = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"
"""File with a site's record of its answers and refusals, in its kit."""
_TEMPLATE = "chat template, special and end tokens"
"""Name of the digest of how prompts are written and replies end."""
THREADS = "num_threads.txt"
"""File with a site's measured number of CPU threads, beside the states of a run's clients."""
_TRAINING_DATA = "training_data.txt"
"""File with the digest of a site's training data, beside the states of a run's clients."""
OWN_KEYS = (
    *("checkpoints", "client_timeout", "data", "engine", "evaluation", "guard", "hub", "max_rows"),
    *("name", "num_threads", "out", "paper", "plan", "plugins", "policy.device", "policy.path"),
    *("processes_per_client", "resume", "strategy.privacy.noise_seed", "tracking", *SERVER_KEYS),
)
"""Keys of a run that each party sets for itself; all other keys must be equal everywhere."""
OWN_REWARD_KEYS = ("batch_size", "device", "dtype", "file", "path", "url")
"""Keys of a reward model that each party sets for itself."""


class AlignmentController(SitesController):
    """Controls a run with clients on remote sites."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = check_name(name, "a run's name")

    def work(self, channel: FlareChannel) -> None:
        """Runs the alignment from the start or from its last checkpoint."""
        flare: Any = self.engine
        kit = Path(flare.get_workspace().get_root_dir())
        os.chdir(os.environ[HOME_VARIABLE])
        federation = federation_of(kit)
        own = compose(ServerConfig, [kit / "server.yaml"], [])
        out = kit / "runs" / self._name
        cfg = replace(kit_config(kit, own.overrides), out=out, resume="auto")
        cfg = with_fast_dtypes(with_recorded(cfg))
        _wait_until_free(out)
        check_continues(out, cfg)
        shown = Console(file=channel.transcript, highlight=False)
        progress = progress_of(cfg, console=shown)
        loaded = load(cfg, Processes())
        progress.event("started", alarms=notes_at_start(cfg, loaded))
        cfg = set_threads(cfg, loaded, on_event=progress.event)
        calibrations = common_calibrations(loaded, cfg, out, has_clients=False)
        engine = SitesEngine(
            channel,
            clients_by_site(federation),
            client_names(cfg),
            timeout=federation.timeout,
            meeting_timeout=federation.meeting_timeout,
            on_event=progress.event,
        )
        setup = {"calibrations": as_figures(calibrations), "name": self._name}
        certificates = certificates_digest(kit) if cfg.strategy.secure else None
        problems = engine.meet(fingerprint(cfg, loaded, certificates), setup)
        if problems and (len(problems) == len(federation.sites) or not _has_rounds(out)):
            raise UserError(f"the sites cannot start: {'; '.join(problems)}.")
        for problem in problems:
            shown.print(f"note: the run continues without {problem}", markup=False)
        run_rounds(loaded, cfg, calibrations, engine, progress, out)


def _has_rounds(out: Path) -> bool:
    """Returns whether a run has finished a round, after which it needs no site to go on."""
    return (out / "run.json").exists() and any(row["kind"] == "round" for row in Run(out).rows())


def _wait_until_free(out: Path, patience: float = 60.0) -> None:
    """Waits up to `patience` seconds for an earlier job's process to release the run's folder."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with suppress(UserError):
            check_not_held(out)
            return
        time.sleep(0.5)


def site_process(kit: Path) -> None:
    """Loads models and data once, waits for a job, and serves it until it ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    own = compose(SiteConfig, [kit / "site.yaml"], [])
    names = clients_by_site(federation_of(kit))[site_name(kit)]
    cfg = with_fast_dtypes(kit_config(kit, own.overrides))
    processes = Processes.join(per_client=own.processes_per_client)
    held = held_objectives(cfg)
    loaded = load(
        without_start(cfg),  # the server sends the adapter to start from, which need not be here
        processes,
        measures=False,
        holds_out=not own.own_prompts,
        objectives={each for name in names for each in held[name]} if own.own_prompts else None,
    )
    shared = fingerprint(cfg, loaded, certificates_digest(kit) if cfg.strategy.secure else None)
    run = digest_of_run(shared)
    states = kit / "states" / run
    set_site_threads(cfg, loaded, states / THREADS)
    shards = None
    if own.own_prompts:
        data, equal = loaded.data.train, PromptPartitionConfig()
        shards = data_of(cfg).shards(data, cfg, names=names, partition=equal)

    def build(setup: Mapping[str, Any]) -> Engine:
        calibrations = as_calibrations(setup["calibrations"])
        hosted = processes.hosted(names)
        clients = build_clients(loaded, cfg, calibrations, hosted, shards=shards)
        kept = (
            states
            / check_name(setup["name"], "a run's name")
            / f"process_{processes.rank % own.processes_per_client}"
        )
        engine = own_engine(clients, cfg, processes, states=DiskStates(kept))
        if processes.size == 1:
            return engine
        assert isinstance(engine, LocalEngine)
        return ProcessesEngine(processes, names, engine)

    if not processes.is_server:
        engine = build(processes.broadcast())
        assert isinstance(engine, ProcessesEngine)
        engine.serve()
        return

    engines: list[Engine] = []

    def build_all(setup: Mapping[str, Any]) -> Engine:
        # The other processes wait for a broadcast and would die on malformed data from the server.
        as_calibrations(setup["calibrations"])
        name = check_name(setup["name"], "a run's name")
        _check_training_data(states / name, loaded.data.digest)
        processes.broadcast(setup)
        engine = build(setup)
        if cfg.strategy.secure:
            engine = SecureEngine(
                engine,
                site_identities(kit),
                num_clients=sum(len(own) for own in clients_by_site(federation_of(kit)).values()),
                run=run,
                least_in_mean=own.policy.least_in_mean,
                repeats=own.policy.repeats,
                ledger=ledger,
            )
        engines.append(engine)
        return engine

    agreement = Agreement(
        cfg.strategy, objectives=list(cfg.objectives), num_rounds=cfg.rounds, clients=names
    )
    ledger = Ledger(agreement, own.policy.budget, kit / LEDGER)
    site = Site(
        build_all,
        names,
        fingerprint=shared,
        agreement=agreement,
        policy=own.policy,
        ledger=ledger,
    )
    link.serve(kit / "local/attach_profile.json", site.answer)
    for engine in engines:
        engine.close()


def _check_training_data(states: Path, digest: str) -> None:
    """Raises `Refused` if a site's training data have changed since its clients shuffled them."""
    record = states / _TRAINING_DATA
    if not any(states.glob("*/*/round_*")):
        make_private_folder(states)
        replace_text(record, digest)
    elif record.exists() and record.read_text() != digest:
        raise Refused(
            "the training data differ from those that this site's clients have shuffled in this "
            "run; restore them, or start a run of another name"
        )


def set_site_threads(cfg: AlignmentConfig, loaded: LoadedRun, record: Path) -> None:
    """Sets the number of CPU threads; a site that is restarted uses the recorded one again."""
    if cfg.num_threads != AUTO or loaded.processes.size > 1:
        return
    if record.exists():
        torch.set_num_threads(int(record.read_text()))
        return
    set_threads(cfg, loaded, on_event=lambda name, text: logger.info(text))
    make_private_folder(record.parent)
    replace_text(record, str(torch.get_num_threads()))


def fingerprint(
    cfg: AlignmentConfig, loaded: LoadedRun, certificates: str | None = None
) -> dict[str, Any]:
    """Returns the values that must agree between server and sites, by human-readable name.

    With secure aggregation, includes the digest of the sites' certificates.
    """
    policy: Any = loaded.trainer.policy_model
    base = hashlib.sha256()
    for name, parameter in sorted(policy.named_parameters()):
        if "lora_" not in name:
            base.update(name.encode())
            base.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    tokenizer: PreTrainedTokenizerBase = loaded.trainer.tokenizer
    return {
        "version": version("firm-align"),
        "base model": base.hexdigest()[:16],
        **({} if certificates is None else {"sites' certificates": certificates}),
        "tokenizer": _digest(sorted(tokenizer.get_vocab().items())),
        _TEMPLATE: _digest(
            (
                tokenizer.chat_template,
                sorted(tokenizer.special_tokens_map.items()),
                loaded.trainer.end_ids,
            )
        ),
        **{f"key {key}": value for key, value in leaves(to_dict(cfg)) if not _is_own(key)},
    }


def digest_of_run(shared: Mapping[str, Any]) -> str:
    """Returns a digest of what a run keeps when it is resumed, from its fingerprint.

    The states of a site's clients are found by it.
    """
    renewed = ("version", _TEMPLATE, "sites' certificates", *(f"key {key}" for key in RENEWED_KEYS))
    return _digest(sorted((name, own) for name, own in shared.items() if name not in renewed))


def _is_own(key: str) -> bool:
    parts = key.split(".")
    if "rewards" in parts[:-1] and parts[-1] in OWN_REWARD_KEYS:
        return True
    if parts[0] == "pairs" and parts[-1] not in ("validation", "test"):  # the names must agree
        return True
    return any(key == own or key.startswith(f"{own}.") for own in OWN_KEYS)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


if __name__ == "__main__":
    site_process(Path(sys.argv[1]))
