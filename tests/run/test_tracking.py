import os
import pty
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from firm.run import Tracker, TrackingConfig
from firm.run.tracking import flatten

OBJECTIVES = ["helpful", "harmless", "brief"]
ROW = {
    "kind": "client",
    "round": 2,
    "client": "client_0",
    "num_steps": 4,
    "weights": [[0.25, 0.5, 0.25], [0.75, 0.25, 0.0]],
    "cosines": [[-0.5, 0.25, 0.0], [0.5, 0.75, 1.0]],
    "beta_effect": [0.25, 0.75],
    "reward": {"helpful": 0.125},
    "seconds": {"rollout": 1.5},
    "kl": None,
    "note": "text",
    "is_odd": True,
}


def test_a_row_becomes_flat_series_with_lists_averaged_over_solves() -> None:
    assert flatten(ROW, OBJECTIVES) == {
        "client_0/num_steps": 4.0,
        "client_0/weights/helpful": 0.5,
        "client_0/weights/harmless": 0.375,
        "client_0/weights/brief": 0.125,
        "client_0/cosines/helpful-harmless": 0.0,
        "client_0/cosines/helpful-brief": 0.5,
        "client_0/cosines/harmless-brief": 0.5,
        "client_0/beta_effect": 0.5,
        "client_0/reward/helpful": 0.125,
        "client_0/seconds/rollout": 1.5,
    }


def test_other_rows_are_grouped_by_kind_and_split() -> None:
    evaluation = {"kind": "evaluation", "round": 0, "split": "test", "scores": {"a": {"mean": 1}}}
    assert flatten(evaluation, OBJECTIVES) == {"evaluation/test/scores/a/mean": 1.0}
    server = {"kind": "round", "round": 1, "clients": ["a"], "failures": [], "bytes_up": 8}
    assert flatten(server, OBJECTIVES) == {"round/bytes_up": 8.0}
    assert flatten({"kind": "run", "rounds": 3}, OBJECTIVES) == {}


def offline_file(run_path: Path) -> bytes:
    [file] = run_path.glob("wandb/offline-run-*/run-*.wandb")
    return file.read_bytes()


def test_offline_mode_leaves_the_metrics_in_the_run_directory(tmp_path: Path, caplog) -> None:
    torch.manual_seed(0)
    generators = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(
        config, tmp_path, {"strategy": {"beta": 0.0625}}, objectives=OBJECTIVES
    ) as tracker:
        tracker.log({"kind": "run", "rounds": 3})
        tracker.log(ROW)
    content = offline_file(tmp_path)
    assert re.search(rb"client_0/weights/harmless.{1,4}0\.375", content, re.DOTALL)
    assert re.search(rb"client_0/seconds/rollout.{1,4}1\.5", content, re.DOTALL)
    assert b"0.0625" in content
    [line] = [r.getMessage() for r in caplog.records if r.name == "firm.run.tracking"]
    assert re.fullmatch(
        rf".* \(as configured\); upload with: wandb sync {tmp_path}/wandb/o.*", line
    )
    assert generators == (
        *(random.getstate(), str(np.random.get_state())),
        torch.get_rng_state().tolist(),
    ), "tracking must not move the generators of the run"


def test_a_disabled_tracker_writes_nothing(tmp_path: Path) -> None:
    with Tracker(TrackingConfig(), tmp_path, {}, objectives=OBJECTIVES) as tracker:
        tracker.log(ROW)
    assert os.listdir(tmp_path) == []


ONLINE = """
import os, sys
from firm.run import Tracker, TrackingConfig
config = TrackingConfig(mode="online", timeout_s=2)
for key in (None, "k" * 40):
    if key:
        os.environ["WANDB_API_KEY"] = key
    run_path = f"{sys.argv[1]}/{key}"
    os.mkdir(run_path)
    with Tracker(config, run_path, {}, objectives=["a"]) as tracker:
        tracker.log({"kind": "round", "round": 1, "seconds": 1.5})
"""


def test_online_without_key_or_network_goes_on_offline(tmp_path: Path) -> None:
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9"}  # nobody listens on discard
    terminal, inner = pty.openpty()  # on a terminal W&B would ask for the key
    try:
        done = subprocess.run(
            [sys.executable, "-c", ONLINE, str(tmp_path)],
            env=environment,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            timeout=90,
        )
        output = os.read(terminal, 10_000).decode()
    finally:
        os.close(terminal)
        os.close(inner)
    assert done.returncode == 0, output
    without_key, without_network = output.strip().splitlines()
    assert without_key.startswith("W&B is off line (No API key configured")
    assert without_network.startswith("W&B is off line (Timed out while retrying")
    for line, name in ((without_key, "None"), (without_network, "k" * 40)):
        assert f"upload with: wandb sync {tmp_path}/{name}/wandb/offline-run-" in line
        assert b"round/seconds" in offline_file(tmp_path / name)


def test_a_timeout_that_would_mean_for_ever_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        TrackingConfig(timeout_s=0)
