"""The Flower app gives the adapter of `firm align`, in Flower's simulation and on two SuperNodes.

It needs Flower, in an environment of its own: `make test-flower`.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

from firm.federation.processes import Processes
from firm.jobs.alignment import main as align
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_data import data_of
from firm.jobs.alignment_loading import load
from firm.network.daemons import free_port
from firm.run.command_line import parse
from tests.runs import read_adapter
from tests.smoke import ROOT

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed here: run `make test-flower`", allow_module_level=True)

APP = ROOT / "recipes/flower"
BIN = Path(sys.executable).parent
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of Flower and PEFT, and of what they import
]

Start = Callable[..., None]


def test_a_reward_is_the_mean_over_the_clients_that_have_it(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    mean_of = importlib.import_module("firm_flower").mean_of
    row = {"kl": 0.5, "reward-a": 0.3, "has-a": 0.5, "reward-b": 0.0, "has-b": 0.0}
    assert mean_of(row) == {"kl": 0.5, "reward-a": 0.6}


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """Starts a program of Flower's in the background, in a folder: `start(folder, name, *args)`.

    What it starts itself ends soon after it.
    """
    with ExitStack() as stack:

        def start(folder: Path, name: str, *arguments: str) -> None:
            folder.mkdir(exist_ok=True)
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            command = [BIN / name, "--insecure", "--host", "127.0.0.1", *arguments]
            variables = environment(tmp_path)
            process = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)

        yield start


def environment(home: Path) -> dict[str, str]:
    """Returns the variables of Flower's programs, which keep their files in `home`."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **QUIET, "FLWR_HOME": str(home / "flwr"), "PATH": path}


def wait_for(port: int) -> None:
    """Waits until a SuperLink answers."""
    for _ in range(300):
        with suppress(OSError), closing(urlopen(f"http://127.0.0.1:{port}/health")):
            return
        time.sleep(0.2)
    pytest.fail("the SuperLink does not answer")


def flwr_run(home: Path, port: int, arguments: str, *more: str) -> str:
    """Runs the app on a SuperLink; returns the log of its server."""
    (home / "flwr").mkdir(exist_ok=True)
    (home / "flwr/config.toml").write_text(
        '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    settings = f"align={json.dumps(arguments)} out={json.dumps(str(home / 'flower'))}"
    command = [BIN / "flwr", "run", ".", "--stream", "--run-config", settings, *more]
    done = subprocess.run(
        command, cwd=APP, env=environment(home), capture_output=True, text=True, timeout=540
    )
    return done.stdout + done.stderr


def assert_equal(first: Path, second: Path) -> None:
    """Compares the adapters of two runs bit for bit."""
    mine, theirs = read_adapter(first), read_adapter(second)
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert torch.equal(values, theirs[name]), name


def test_simulated_nodes_train_the_adapter_of_firm_align(tmp_path, start):
    """PPO, whose critic and moments stay at the clients; three, so that a mean needs rounding."""
    arguments = "--config smoke --num_clients 3 --checkpoints.keep_best false"
    align(parse(AlignmentConfig, [*arguments.split(), "--out", str(tmp_path / "align")]))
    port = free_port()
    start(tmp_path / "link", "flower-superlink", "--simulation", "--port", str(port),
          "--control-api-address", f"127.0.0.1:{free_port()}")  # fmt: skip
    wait_for(port)
    log = flwr_run(tmp_path, port, arguments, "--federation-config", "num-supernodes=3")
    assert (tmp_path / "flower/metrics.json").is_file(), log
    assert_equal(tmp_path / "flower", tmp_path / "align")
    rounds = json.loads((tmp_path / "flower/metrics.json").read_text())
    weights = [rounds["train"]["2"][f"weight-{name}"] for name in ("brevity", "positivity")]
    assert sum(weights) == pytest.approx(1)
    assert [*rounds["test"]] == ["0", "1", "2"]


def test_nodes_train_on_their_own_prompts(tmp_path, start):
    """Two SuperNodes, each with a file of its own prompts, that of a client of `firm align`."""
    arguments = "--config smoke --checkpoints.keep_best false"
    cfg = parse(AlignmentConfig, arguments.split())
    shards = data_of(cfg).shards(load(cfg, Processes()).data.train, cfg)
    align(parse(AlignmentConfig, [*arguments.split(), "--out", str(tmp_path / "align")]))
    port = free_port()
    start(tmp_path / "link", "flower-superlink", "--port", str(port),
          "--control-api-address", f"127.0.0.1:{free_port()}")  # fmt: skip
    wait_for(port)
    for index, prompts in enumerate(shards.values()):
        node = tmp_path / f"node_{index}"
        node.mkdir()
        rows = [json.dumps({"prompt": prompt.transcript}) for prompt in prompts]
        (node / "prompts.jsonl").write_text("\n".join(rows))
        own = f"--data.train.source {node / 'prompts.jsonl'}"
        start(node, "flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port",
              str(free_port()), "--node-config",
              f'partition-id={index} own-prompts=true align="{own}"')  # fmt: skip
    log = flwr_run(tmp_path, port, arguments)
    assert (tmp_path / "flower/metrics.json").is_file(), log
    assert_equal(tmp_path / "flower", tmp_path / "align")


def test_what_a_mean_is_not_enough_for_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    app = importlib.import_module("firm_flower")
    for setting, named in {
        "upload.bits 8": "upload",
        "robust.rule median": "robust",
        "server_learning_rate 0.5": "server_learning_rate",
        "clients_per_round 1": "clients_per_round",
        "schedule.shares [[1,0],[0,1]]": "schedule",
        "name fedavg --strategy.decay 0.5": "decay",
        "name fedmgda": "name fedmgda",
        "name fedcmoo": "name fedcmoo",
        "name fedavg --strategy.normalize_updates true": "name fedavg",
    }.items():
        with pytest.raises(ValueError, match=f"strategy.{named} needs more of the server"):
            app.config_of(f"--config smoke --num_clients 8 --strategy.{setting}")
    assert app.config_of("--config smoke --strategy.name fedavg").num_clients == 2
