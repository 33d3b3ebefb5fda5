"""The network recipe: what it refuses, what crosses, and that a real network changes nothing."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.runs import read_adapter
from tests.smoke import ROOT, SMOKE

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from nvflare.apis.fl_constant import ConfigVarName, SystemConfigs
from nvflare.fuel.utils.config_service import ConfigService

from firm.alignment import Calibration
from firm.cli.main import main
from firm.federation import LocalEngine, Processes, RoundFailed, ServerState
from firm.federation.serialization import pack, unpack
from firm.federation.strategies import STRATEGIES
from firm.jobs import alignment
from firm.jobs import network as jobs_network
from firm.jobs import network_parties as network
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_loading import as_calibrations, build_clients, common_calibrations, load
from firm.jobs.network_config import (
    certificates_digest,
    federation_of,
    kit_config,
    site_identities,
)
from firm.network.agreement import Agreement
from firm.network.daemons import free_port
from firm.network.site import Site
from firm.network.site_policy import SitePolicy
from firm.network.sites import SitesEngine
from firm.run import UserError, compose, to_dict, to_yaml
from firm.run.differences import leaves
from firm.run.lock import hold

SITES = {"hospital": [0], "bank": [1], "university": [2]}
TWO_SITES = {"hospital": [0, 2], "bank": [1]}
OVERRIDES = {"num_clients": 3, "rounds": 4}


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    """Configs name the shipped checkpoints relative to the clone."""
    monkeypatch.chdir(ROOT)


def _federation(tmp_path, **changes):
    fields = {
        "sites": SITES,
        "out": tmp_path / "federation",
        "run": SMOKE,
        "overrides": OVERRIDES,
        **changes,
    }
    return network.FederationConfig(**fields)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": {}}, "sites must assign each client"),
        ({"sites": {"a": [0], "b": []}}, "sites must assign each client"),
        ({"sites": {"a": [0], "b": [0]}}, "sites must assign each client"),
        ({"sites": {"a": [0], "b": [2]}}, "sites must assign each client"),
        ({"sites": {"server": [0]}}, "the name 'server' is reserved"),
        ({"sites": {"st.mary": [0]}}, "a site's name must not contain '.', got 'st.mary'"),
        ({"sites": {"h": [0]}, "host": "h"}, "the name 'h' is the host's"),
        ({"sites": {"a": [0]}, "host": "my_host"}, "host must be a host name or an IPv4 address"),
        ({"sites": {"a": [0]}, "host": "::1"}, "got '::1'"),
        ({"sites": {"a": [0]}, "valid_days": 361}, "valid_days must be"),
        ({"sites": {"a b/c": [0]}}, "a site's name must be at most 64 letters"),
        ({"sites": {"../bank": [0]}}, "a site's name must be at most 64 letters"),
        ({"sites": {"bank\n": [0]}}, "a site's name must be at most 64 letters"),
        ({"name": "../clinics"}, "a federation's name must be at most 64 letters"),
        ({"heartbeat_interval": 30.0}, "heartbeat_timeout must be longer"),
    ],
)
def test_a_federation_that_cannot_be_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _federation(tmp_path, **changes)


PATHS = [
    "../../../traversal_run",
    "/tmp/run",
    "",
    ".",
    "..",
    "a/b",
    "run\n",
    "run\x1b[2J",
    "x" * 65,
]


@pytest.mark.parametrize("name", PATHS)
def test_a_runs_name_is_no_path(tmp_path, name):
    with pytest.raises(ValueError, match="a run's name must be at most 64 letters") as refused:
        network.AdminConfig(tmp_path, name=name)
    assert str(refused.value).isprintable()
    with pytest.raises(ValueError, match="a run's name must be at most 64 letters"):
        jobs_network.AlignmentController(
            name
        )  # in a job that whoever holds an administrator's kit has made


def test_a_runs_name_that_is_no_path_is_taken(tmp_path):
    assert network.AdminConfig(tmp_path, name="run-2.b_1").name == "run-2.b_1"
    jobs_network.AlignmentController("run-2.b_1")


def test_kits_for_another_number_of_clients_are_not_made(tmp_path):
    with pytest.raises(UserError, match="number of clients in sites, 3, got 2"):
        network.provision(_federation(tmp_path, overrides={}))
    assert list(tmp_path.iterdir()) == []


def test_kits_for_a_sharded_policy_are_not_made(tmp_path):
    overrides = {"policy.shard": True, "processes_per_client": 2}
    with pytest.raises(UserError, match=r"policy\.shard must be false in a run over a network"):
        network.provision(_federation(tmp_path, overrides=overrides))
    assert list(tmp_path.iterdir()) == []


def test_kits_that_exist_are_not_touched(tmp_path):
    cfg = _federation(tmp_path)
    cfg.out.mkdir()
    with pytest.raises(UserError, match="already exists; kits are created only once"):
        network.provision(cfg)
    assert list(cfg.out.iterdir()) == []


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    """The kits of a federation whose server does not run."""
    cfg = _federation(tmp_path_factory.mktemp("kits"), port=free_port())
    network.provision(cfg)
    return cfg.out


def test_a_server_that_does_not_run_is_told(kits):
    for command in (network.submit, network.status, network.stop):
        with pytest.raises(UserError, match=r"localhost:\d+ cannot be reached .*start the server"):
            command(network.AdminConfig(kits / "admin"))


def test_a_port_in_use_is_told_before_anything_is_written(kits):
    port = federation_of(kits / "server").port
    in_use = pytest.raises(UserError, match=f"port {port} is in use")
    with socket.create_server(("", port)), in_use:
        network.start_server(network.ServerConfig(kits / "server"))
    assert not (kits / "server/server.yaml").exists()


def test_a_demo_uses_the_port_of_its_configuration(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        cfg = _federation(tmp_path, port=port)
        with pytest.raises(UserError, match=f"port {port} is in use"):
            network.demo(cfg)
    assert not cfg.out.exists()


def test_a_site_waits_ten_minutes_for_a_server_that_starts_slowly(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", network._daemons(tmp_path, {})._environment)
    name = ConfigVarName.MAX_RUNNER_SYNC_TIMEOUT
    assert ConfigService.get_float_var(name, SystemConfigs.APPLICATION_CONF, 60.0) == 600.0


def test_kits_without_a_port_have_the_default_one(tmp_path):
    network.provision(_federation(tmp_path))
    assert federation_of(tmp_path / "federation/server").port == network.PORT
    assert network.server_address(tmp_path / "federation/bank") == ("localhost", network.PORT)


@pytest.mark.parametrize("port", [-1, 0, 65_536])
def test_a_port_that_no_machine_has_is_refused(tmp_path, port):
    with pytest.raises(ValueError, match=f"port must be at least 1 and at most 65,535.*got {port}"):
        _federation(tmp_path, port=port)


@pytest.fixture
def late(monkeypatch):
    """A day on which no certificate of these kits holds any more."""
    day = datetime.now(UTC) + timedelta(days=1000)
    expiry = network.certificates.expiry
    monkeypatch.setattr(network.certificates, "expiry", lambda kit: expiry(kit, now=day))


def test_a_certificate_that_has_ended_is_told_before_anything_starts(kits, late):
    for command, config in (
        (network.start_server, network.ServerConfig(kits / "server")),
        (network.start_site, network.SiteConfig(kits / "bank")),
        (network.submit, network.AdminConfig(kits / "admin")),
    ):
        with pytest.raises(UserError, match=r"\.(crt|pem) is valid from .* ask the creator of"):
            command(config)


@pytest.mark.parametrize(
    ("party", "start", "config", "written"),
    [
        ("server", network._server, network.ServerConfig, "server.yaml"),
        ("bank", network._site, network.SiteConfig, "site.yaml"),
    ],
)
def test_a_party_that_runs_already_is_told_before_anything_is_written(
    kits, party, start, config, written
):
    descriptor = hold(kits / party)
    try:
        with pytest.raises(UserError, match=rf"{party} is in use by process {os.getpid()} on "):
            start(config(kits / party))
    finally:
        os.close(descriptor)
    assert not (kits / party / written).exists()


@pytest.fixture(scope="module")
def secure_kits(tmp_path_factory):
    """The kits of a federation with secure aggregation."""
    overrides = {**OVERRIDES, "strategy.secure": "masks"}
    cfg = _federation(tmp_path_factory.mktemp("secure"), port=free_port(), overrides=overrides)
    network.provision(cfg)
    return cfg.out


def _files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def test_the_keys_that_sign_sums_are_each_at_their_own_site(secure_kits):
    keys = {site: (secure_kits / site / "startup/client.key").read_bytes() for site in SITES}
    for party in ("server", "admin", *SITES):
        held = [site for site in SITES if keys[site] in _files(secure_kits / party)]
        assert held == [site for site in SITES if site == party]
    ring = site_identities(secure_kits / "bank")
    signature = ring.sign("client_1", b"a statement")
    for site in SITES:
        site_identities(secure_kits / site).check("client_1", b"a statement", signature)
    for client, statement in (("client_0", b"a statement"), ("client_1", b"another")):
        with pytest.raises(ValueError, match="are not signed by its site"):
            ring.check(client, statement, signature)
    with pytest.raises(KeyError):
        ring.sign("client_0", b"a statement")  # the hospital's


@pytest.mark.parametrize("damage", ["no key", "no certificate", "another's", "another authority's"])
def test_a_site_without_its_keys_is_told_in_one_line_before_anything_starts(
    secure_kits, kits, damage, tmp_path
):
    kit = tmp_path / "bank"
    shutil.copytree(secure_kits / "bank", kit)
    path = kit / "sites/hospital.crt"
    if damage == "no key":
        (kit / "startup/client.key").unlink()
    elif damage == "no certificate":
        path.unlink()
    else:
        other = kit / "sites/university.crt" if damage == "another's" else kits / "bank/sites"
        path.write_bytes((other / path.name if other.is_dir() else other).read_bytes())
    with pytest.raises(UserError, match="bank lacks keys of secure aggregation") as told:
        network.start_site(network.SiteConfig(kit))
    assert "\n" not in str(told.value)
    assert not (kit / "site.yaml").exists()


def test_parties_with_other_certificates_are_told_apart(secure_kits, kits):
    (digest,) = {certificates_digest(secure_kits / party) for party in ("server", *SITES)}
    assert certificates_digest(kits / "server") != digest


def test_a_folder_that_is_no_kit_is_told(tmp_path):
    for command, config in (
        (network.start_server, network.ServerConfig(tmp_path)),
        (network.start_site, network.SiteConfig(tmp_path)),
        (network.submit, network.AdminConfig(tmp_path)),
    ):
        with pytest.raises(UserError, match="is not a kit; create kits with"):
            command(config)


@pytest.mark.parametrize(
    ("command", "party", "line"),
    [
        (network.start_site, "admin", "the administrator, for firm network submit; .* of a site"),
        (network.start_site, "server", "the server, for firm network start-server; .* of a site"),
        (network.start_server, "bank", "a site, for firm network start-site; .* of the server"),
        (network.submit, "bank", "a site, for firm network start-site; .* of the administrator"),
        (network.status, "server", "the server, for .*start-server; .* of the administrator"),
        (network.stop, "bank", "a site, for .*; this command needs the kit of the administrator"),
    ],
)
def test_the_kit_of_another_party_is_told_what_it_is_for(kits, command, party, line):
    config = {network.start_site: network.SiteConfig, network.start_server: network.ServerConfig}
    with pytest.raises(UserError, match=f"{party} is the kit of {line}"):
        command(config.get(command, network.AdminConfig)(kits / party))
    assert not (kits / party / network.OUTPUT).exists()  # no process was started


def test_a_sites_own_key_that_does_not_exist_is_told_at_its_start(kits):
    cfg = network.SiteConfig(kits / "hospital", overrides={"policy.pth": "x"})
    with pytest.raises(UserError, match=r"policy\.pth"):
        network.start_site(cfg)
    assert not (kits / "hospital/site.yaml").exists()


def test_a_command_that_does_not_exist_prints_those_that_do(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["network", "sumbit"])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "  network submit  " in printed.err
    assert "unknown command 'network sumbit'" in printed.err


def test_the_plugins_that_a_kit_names_are_not_imported_but_a_party_s_own_are(tmp_path):
    for name in ("theirs", "ours"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w').close()\n")
    run = compose(AlignmentConfig, [SMOKE], list(OVERRIDES.items()))
    text = to_yaml(run).replace("plugins: []", f"plugins: [{tmp_path / 'theirs.py'}]")
    (tmp_path / "run.yaml").write_text(text)
    assert "theirs.py" in text
    assert kit_config(tmp_path, {}).plugins == ()
    own = [str(tmp_path / "ours.py")]
    assert kit_config(tmp_path, {"plugins": own}).plugins == tuple(own)
    assert (tmp_path / "ours").exists()
    assert not (tmp_path / "theirs").exists()


@pytest.mark.slow
def test_a_reward_function_in_a_file_is_each_partys_own(tmp_path):
    run = compose(
        AlignmentConfig,
        [SMOKE],
        [("rewards", {"brief": {"name": "brief", "file": "kit/theirs.py"}})],
    )
    (tmp_path / "run.yaml").write_text(to_yaml(run))
    with pytest.raises(UserError, match=r"rewards\.brief\.file must be set in this party's own"):
        kit_config(tmp_path, {"data.train.source": "ours.jsonl"})
    for file in ("ours.py", "kit/theirs.py"):  # a copy may have the kit's name
        own = kit_config(tmp_path, {"rewards.brief.file": file})
        assert own.rewards["brief"].file == file
    assert jobs_network._is_own("rewards.brief.file")
    assert not jobs_network._is_own("rewards.brief.name")


@pytest.mark.slow
def test_a_site_keeps_the_states_of_each_run_by_its_name(kits, tmp_path, monkeypatch):
    kit = tmp_path / "hospital"
    shutil.copytree(kits / "hospital", kit)
    (kit / "site.yaml").write_text(to_yaml({"kit": str(kit), "own_prompts": True}))
    (kit / "run.yaml").write_text(
        to_yaml(compose(AlignmentConfig, [kit / "run.yaml"], [("data.hold_out", 0.5)]))
    )
    answers, told, loaded_data = [], {}, []
    loads, new = jobs_network.fingerprint, jobs_network.DiskStates

    def noted(cfg, loaded, *others):
        assert cfg.data.hold_out == 0.5  # as at the server
        loaded_data.append(loaded.data)
        told.update(loads(cfg, loaded, *others))
        return told

    monkeypatch.setattr(jobs_network, "fingerprint", noted)
    monkeypatch.setattr(jobs_network.link, "serve", lambda profile, answer: answers.append(answer))
    names = compose(AlignmentConfig, [kit / "run.yaml"], []).objectives
    calibrations = {name: Calibration("none").to_dict() for name in names}
    kept: list[Path] = []
    monkeypatch.setattr(jobs_network, "DiskStates", lambda path: kept.append(path) or new(path))
    for name in ("first", "second"):
        jobs_network.site_process(kit)
        setup = {"calibrations": calibrations, "name": name}
        meeting = {"do": "meet", "fingerprint": told, "setup": setup, "number": 1}
        assert "problem" not in unpack(answers[-1](pack(meeting)))
    rows = (ROOT / kit_config(kit, {}).data.train.source).read_text().splitlines()
    assert all(len(data.train) > 0.6 * len(rows) for data in loaded_data)  # a site's own
    first, second = kept
    assert first.parts[-2:] == ("first", "process_0")
    assert second == first.parents[1] / "second/process_0"
    jobs_network.site_process(kit)
    meeting["setup"] = {"calibrations": calibrations, "name": "../first"}
    assert unpack(answers[-1](pack(meeting)))["problem"] == "ValueError"
    assert len(kept) == 2

    def met(name):
        jobs_network.site_process(kit)
        setup = {"calibrations": calibrations, "name": name}
        return unpack(answers[-1](pack({**meeting, "setup": setup}))).get("problem", "")

    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(rows[1:]))
    site = {"kit": str(kit), "own_prompts": True, "overrides": {"data.train.source": str(own)}}
    (kit / "site.yaml").write_text(to_yaml(site))
    assert met("first") == ""  # nothing was shuffled yet
    (first / "client_0/round_000001").mkdir(parents=True)
    assert met("first") == ""
    own.write_text("\n".join(rows[2:]))
    assert "the training data differ" in met("first")
    assert met("second") == ""


# --- What must be the same, and what crosses ------------------------------------------------------


def test_what_shapes_the_training_must_be_the_same_and_the_rest_is_each_partys_own():
    cfg = compose(AlignmentConfig, [SMOKE], list(OVERRIDES.items()))
    shared = {key for key, _ in leaves(to_dict(cfg)) if not jobs_network._is_own(key)}
    for key in ("seed", "rounds", "estimator.batch_size", "strategy.beta", "policy.lora.r"):
        assert key in shared
    for key in (
        "data.train.source",
        "plugins",
        "policy.path",
        "policy.device",
        "out",
        "num_threads",
    ):
        assert key not in shared
    assert not any(key.endswith(".path") for key in shared)
    assert jobs_network._is_own("plugins.0")
    assert jobs_network._is_own("strategy.privacy.noise_seed")  # who knows it subtracts the noise
    assert not jobs_network._is_own("strategy.privacy.noise_multiplier")
    assert jobs_network._is_own("pairs.helpful.source")
    assert not jobs_network._is_own("pairs.helpful.test")  # without it, names could differ


def test_another_base_model_is_noticed_and_another_adapter_is_not():
    cfg = compose(AlignmentConfig, [SMOKE], list(OVERRIDES.items()))
    loaded = load(cfg, Processes(), measures=False)
    before = jobs_network.fingerprint(cfg, loaded)
    policy = loaded.trainer.policy_model
    names = dict(policy.named_parameters())
    with torch.no_grad():
        next(value for name, value in names.items() if "lora_" in name).add_(1.0)
    assert jobs_network.fingerprint(cfg, loaded) == before
    with torch.no_grad():
        names[min(name for name in names if "lora_" not in name)].view(-1)[-1:].add_(1e-3)
    after = jobs_network.fingerprint(cfg, loaded)
    assert [key for key in before if before[key] != after[key]] == ["base model"]
    secure = jobs_network.fingerprint(cfg, loaded, "0123")
    added = {key: secure[key] for key in secure if key not in after}
    assert added == {"sites' certificates": "0123"}
    # the states of clients are found again with more rounds, new certificates and a new version
    resumed = {**secure, "version": "99", "sites' certificates": "4567", "key rounds": 99}
    assert jobs_network.digest_of_run(resumed) == jobs_network.digest_of_run(secure)
    assert len({jobs_network.digest_of_run(each) for each in (before, after, {})}) == 3
    for key in ("seed", "estimator.batch_size"):
        other = {**secure, f"key {key}": 99}
        assert jobs_network.digest_of_run(other) != jobs_network.digest_of_run(secure)


class _Wire:
    """A network in memory that keeps all that crosses it."""

    def __init__(self, sites):
        self.sites, self.messages = sites, []

    def ask(self, messages, *, timeout):
        answers = {site: self.sites[site].answer(message) for site, message in messages.items()}
        self.messages += [*messages.values(), *answers.values()]
        return answers

    def returned(self):
        return []

    def close(self):
        self.sites = {}


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_no_prompt_no_reply_and_no_score_of_one_crosses(tmp_path, monkeypatch, estimator):
    settings = [*OVERRIDES.items(), ("estimator.name", estimator)]
    cfg = compose(AlignmentConfig, [SMOKE], settings)
    loaded = load(cfg, Processes())
    seen_texts, seen_scores, fails = [], [], []
    begin_scoring = loaded.trainer.begin_scoring

    def overheard(sampled, *judges, **options):
        result = begin_scoring(sampled, *judges, **options)()
        texts = [prompt.transcript for prompt in sampled.queries.prompts]
        seen_texts.extend(texts)
        seen_texts.extend(
            loaded.trainer.tokenizer.batch_decode(sampled.responses, skip_special_tokens=True)
        )
        seen_scores.extend(result.scores.flatten().tolist())
        seen_scores.extend(result.rewards.flatten().tolist())
        if fails:
            raise ValueError(f"cannot score {texts[0]} and {seen_texts[-1]}")
        return lambda: result

    monkeypatch.setattr(loaded.trainer, "begin_scoring", overheard)
    calibrations = common_calibrations(loaded, cfg, tmp_path / "run")
    places = {site: [f"client_{index}" for index in own] for site, own in SITES.items()}
    told = jobs_network.fingerprint(cfg, loaded)

    def build(names):
        return lambda setup: LocalEngine(
            build_clients(loaded, cfg, as_calibrations(setup["calibrations"]), names)
        )

    wire = _Wire(
        {
            site: Site(
                build(names),
                names,
                fingerprint=told,
                agreement=Agreement(
                    cfg.strategy,
                    objectives=list(cfg.rewards),
                    num_rounds=cfg.rounds,
                    clients=names,
                ),
                policy=SitePolicy(),
            )
            for site, names in places.items()
        }
    )
    engine = SitesEngine(wire, places, client_names(cfg), timeout=60)
    setup = {"calibrations": {key: c.to_dict() for key, c in calibrations.items()}}
    assert engine.meet(told, setup) == []
    state = ServerState(loaded.start, objectives=tuple(cfg.rewards), seed=cfg.seed)
    state, _ = STRATEGIES["firm"](state, client_names(cfg), engine, cfg.strategy)
    fails.append(True)
    with pytest.raises(RoundFailed, match="ValueError; see its site's log"):
        STRATEGIES["firm"](state, client_names(cfg), engine, cfg.strategy)

    crossed = b"".join(wire.messages)
    seen_texts += [prompt.text for prompt in loaded.data.train]
    lines = {line.strip() for text in seen_texts for line in text.splitlines()}
    lines -= {"Human:", "Assistant:"}
    assert len([line for line in lines if len(line) >= 6]) > 10
    assert not [line for line in lines if len(line) >= 6 and line.encode() in crossed]
    numbers = {value for message in wire.messages for value in _numbers(unpack(message))}
    # A share of a batch can be 5/8 as a score can; what is no such fraction is told apart.
    scores = {score for score in seen_scores if score * 1024 % 1}
    assert len(scores) > 10
    assert not scores & numbers
    shapes = {tuple(value.shape) for m in wire.messages for value in _tensors(unpack(m))}
    assert shapes == {tuple(value.shape) for value in loaded.start.values()}


def _numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if hasattr(value, "metrics"):
        value = [value.metrics]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, float) else []


def _tensors(value):
    if hasattr(value, "adapter"):
        value = value.adapter
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


# --- A real network -------------------------------------------------------------------------------


class Party:
    """A command of the recipe that runs in the background."""

    def __init__(self, kit: Path, command: str, *arguments: str):
        self.kit, self.command, self.arguments = kit, command, arguments
        self.printed = kit / f"{command}.txt"

    def __enter__(self):
        with self.printed.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "firm", "network"),
                    self.command,
                    "--kit",
                    str(self.kit),
                    *self.arguments,
                ],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self

    def __exit__(self, *exception):
        self.process.terminate()
        self.process.wait(30)

    def kill_tree(self):
        """Ends the party and all that it started, without a word."""
        for process in _descendants(self.process.pid):
            os.kill(process, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def find(self, word: str) -> int:
        """The number of a process that the party started whose command has this word."""
        for process in _descendants(self.process.pid):
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode().replace("\0", " ")
            if word in command:
                return process
        raise AssertionError(f"{self.kit} runs nothing with {word}")


def _descendants(parent: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, queue = [], [parent]
    while queue:
        own = children.get(queue.pop(), [])
        found += own
        queue += own
    return found


@pytest.fixture
def running(tmp_path):
    """Starts a server and its sites: ``running(overrides, arguments_by_site, **federation)``."""
    with ExitStack() as stack:

        def start(overrides=None, arguments=None, prepare=lambda kits: None, **changes):
            fields = {
                "port": free_port(),
                "overrides": {**OVERRIDES, **(overrides or {})},
                "timeout": 120,
                "meeting_timeout": 15,
                "heartbeat_interval": 1.0,
                "heartbeat_timeout": 8.0,
            }
            cfg = _federation(tmp_path, **{**fields, **changes})
            network.provision(cfg)
            prepare(cfg.out)
            parties = {"server": stack.enter_context(Party(cfg.out / "server", "start-server"))}
            for site in cfg.sites:
                party = Party(cfg.out / site, "start-site", *(arguments or {}).get(site, ()))
                parties[site] = stack.enter_context(party)
            _until(lambda: not network._reach(cfg.out / "admin"))
            parties["submit"] = stack.enter_context(Party(cfg.out / "admin", "submit"))
            return cfg.out, parties

        yield start


def _until(condition, patience=240.0):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.2)


def _rows(folder: Path, kind: str) -> list[dict]:
    path = folder / "server/runs/run/metrics.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [row for row in rows if row["kind"] == kind]


def _finished(folder: Path, parties) -> None:
    """Waits for the run's end, and ends the parties, which would load all for the next one."""
    code = parties["submit"].process.wait(600)
    for party in parties.values():
        party.__exit__()
    assert code == 0, parties["submit"].printed.read_text()
    assert (folder / "server/runs/run/report.html").exists()


def _alone(tmp_path, **overrides) -> Path:
    """The same run in one process."""
    settings = [*OVERRIDES.items(), *overrides.items(), ("out", tmp_path / "alone")]
    return alignment.main(compose(AlignmentConfig, [SMOKE], settings))


def _with_clients(rounds: list[list[str]], tmp_path, **overrides) -> list[torch.Tensor]:
    """The adapter of a run in one process that draws these clients, round by round."""
    settings = [*OVERRIDES.items(), *overrides.items(), ("rounds", len(rounds))]
    cfg = compose(AlignmentConfig, [SMOKE], settings)
    loaded = load(cfg, Processes())
    calibrations = common_calibrations(loaded, cfg, tmp_path)
    engine = LocalEngine(build_clients(loaded, cfg, calibrations, client_names(cfg)))
    state = ServerState(loaded.start, objectives=tuple(cfg.rewards), seed=cfg.seed)
    for drawn in rounds:
        state, _ = STRATEGIES["firm"](state, drawn, engine, cfg.strategy)
    return [tensor for _, tensor in sorted(state.adapter.items())]


def _same(run: Path, expected: list[torch.Tensor]) -> bool:
    saved = read_adapter(run)
    pairs = zip([tensor for _, tensor in sorted(saved.items())], expected, strict=True)
    return all(torch.equal(mine, other) for mine, other in pairs)


CONDITIONED = {
    "estimator.name": "critic_free",
    "policy.conditioning.kind": "preference",
    "strategy.name": "fedavg",
}
STEADY = {
    "policy.lora.dropout": 0.0,
    "estimator.actor_optimizer": "sgd",
    "estimator.actor_learning_rate": 0.1,
}
"""Settings under which only rounding tells a divided batch from a whole one."""


@pytest.mark.slow
def test_sites_of_two_processes_and_of_stacked_clients_give_the_adapter_of_one(running, tmp_path):
    sites = {"hospital": [0, 2], "bank": [1, 3]}
    arguments = {
        "hospital": ("--processes", "2", "--processes_per_client", "2"),
        "bank": ("--overrides.engine", "stacked", "--overrides.max_rows", "12"),
    }
    overrides = {"num_clients": 4, "rounds": 2, **CONDITIONED, **STEADY}
    folder, parties = running(overrides, arguments, sites=sites)
    _finished(folder, parties)
    expected = read_adapter(_alone(tmp_path, **overrides))
    for name, value in read_adapter(folder / "server/runs/run").items():
        torch.testing.assert_close(value, expected[name], atol=2e-6, rtol=0)
    assert all(len(row["clients"]) == 4 for row in _rows(folder, "round"))
    assert len(list((folder / "hospital/states").glob("*/run/process_*/client_*"))) == 4
    followed = parties["submit"].printed.read_text().splitlines()
    assert [line for line in followed if line.startswith("round 2/2")]


@pytest.mark.slow
def test_a_server_of_secure_aggregation_holds_the_mean_and_no_update(running, tmp_path):
    mean, *updates = _first_round(tmp_path)
    kept = {"checkpoints.keep_last": 8}
    secure = {"strategy.secure": "masks", "rounds": 8, **kept}
    folder, parties = running(secure, sites=TWO_SITES)
    _until(lambda: _rows(folder, "round"))
    in_memory = {
        pattern
        for content in _memory(parties["server"].process.pid)
        for pattern in (mean, *updates)
        if pattern in content
    }
    assert in_memory == {mean}
    _finished(folder, parties)
    on_disk = b"".join(_files(folder / "server"))
    assert mean in on_disk  # in a checkpoint
    assert not any(update in on_disk for update in updates)
    saved = read_adapter(folder / "server/runs/run")
    alone = read_adapter(_alone(tmp_path, rounds=8))
    for name, value in saved.items():
        torch.testing.assert_close(value, alone[name], atol=1e-6, rtol=0)


def _first_round(tmp_path) -> list[bytes]:
    """A part of the mean after one round with secure aggregation, and of each update in it."""
    settings = [*OVERRIDES.items(), ("strategy.secure", "masks")]
    cfg = compose(AlignmentConfig, [SMOKE], settings)
    loaded = load(cfg, Processes())
    calibrations = common_calibrations(loaded, cfg, tmp_path)
    inner = LocalEngine(build_clients(loaded, cfg, calibrations, client_names(cfg)))
    updates = []

    class Overheard:
        def map(self, request, clients):
            replies, failures = inner.map(request, clients)
            updates.extend(reply.content.adapter for reply in replies)
            return replies, failures

    state = ServerState(loaded.start, objectives=tuple(cfg.rewards), seed=cfg.seed)
    engine = cfg.strategy.around(Overheard(), cfg.num_clients)
    state, _ = STRATEGIES["firm"](state, client_names(cfg), engine, cfg.strategy)
    name = next(name for name in state.adapter if "lora_B" in name)
    parts = [adapter[name].numpy().tobytes()[:64] for adapter in (state.adapter, *updates)]
    assert len(set(parts)) == 4
    return parts


def _memory(parent: int) -> Iterator[bytes]:
    """What the descendants of a process hold in memory, as long as they are there."""
    for pid in _descendants(parent):
        with (
            suppress(OSError),
            open(f"/proc/{pid}/mem", "rb") as memory,
            open(f"/proc/{pid}/maps") as maps,
        ):
            for line in maps.read().splitlines():
                span, mode = line.split()[:2]
                start, end = (int(number, 16) for number in span.split("-"))
                if mode.startswith("rw"):
                    memory.seek(start)
                    with suppress(OSError):  # it has just been given back
                        yield memory.read(end - start)


@pytest.mark.slow
def test_after_kills_of_a_process_a_site_and_the_server_the_adapter_is_as_it_should_be(
    running, tmp_path
):
    short = {"strategy.num_local_steps": 1, "estimator.num_epochs": 1}
    folder, parties = running({"rounds": 40, **short}, sites=TWO_SITES)

    def is_complete(number: int) -> bool:
        """Whether rounds of all clients came since a number of rounds that lacked some."""
        counts = [len(row["clients"]) for row in _rows(folder, "round")]
        since = counts[max((i for i, count in enumerate(counts) if count < 3), default=0) :]
        return sum(count < 3 for count in counts) >= number and len(since) > 2

    _until(lambda: is_complete(0))
    os.kill(parties["bank"].find("firm.jobs.network"), signal.SIGKILL)
    _until(lambda: is_complete(1))
    num_missed = sum(len(row["clients"]) < 3 for row in _rows(folder, "round"))
    parties["bank"].kill_tree()
    _until(lambda: sum(len(r["clients"]) < 3 for r in _rows(folder, "round")) > num_missed)
    with Party(folder / "bank", "start-site"):
        _until(lambda: is_complete(num_missed + 1))
        parties["server"].kill_tree()
        with Party(folder / "server", "start-server"):
            _finished(folder, parties)
    rows = _rows(folder, "round")
    assert [row["round"] for row in rows] == list(range(1, 41))
    rounds = [row["clients"] for row in rows]
    assert rounds[-1] == ["client_0", "client_1", "client_2"]
    assert ["client_0", "client_2"] in rounds
    reasons = [failure["reason"] for row in rows for failure in row["failures"]]
    assert all("bank" in reason for reason in reasons)
    assert _same(folder / "server/runs/run", _with_clients(rounds, tmp_path, **short))


@pytest.mark.slow
def test_parties_of_another_federation_configuration_or_version_are_told(running, kits, tmp_path):
    older = tmp_path / "older.py"
    older.write_text("import __main__\n__main__.version = lambda package: '0.0.1'\n")

    def change(folder: Path) -> None:
        run = (folder / "bank/run.yaml").read_text()
        (folder / "bank/run.yaml").write_text(run.replace("beta: 0.01", "beta: 0.5"))

    arguments = {"hospital": ("--overrides.plugins", f"[{older}]")}
    port = federation_of(kits / "server").port
    folder, parties = running({}, arguments, change, sites=TWO_SITES, port=port)
    with pytest.raises(UserError, match=r"certificate does not belong to this kit.*use the kit"):
        network.submit(network.AdminConfig(kits / "admin"))
    assert parties["submit"].process.wait(300) == 2
    told = {
        "bank": "key strategy.beta is 0.5, the server's 0.01",
        "hospital": f"version is '0.0.1', the server's '{version('firm-align')}'",
    }
    for site, difference in told.items():
        assert difference in parties["submit"].printed.read_text()
        assert difference in (folder / f"{site}/output.txt").read_text()
