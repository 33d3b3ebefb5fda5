"""A run that is killed again and again, or finds the disk full, ends with the same adapter."""

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import NO_ERROR
from tests.nursery import nursery
from tests.runs import read_adapter, read_rows
from tests.smoke import SMOKE

pytestmark = pytest.mark.slow


# A `death` is a stage, which of its calls, and after how many of Python's calls and returns in
# there the run kills itself (at the latest when the stage is over); or, with `room` in bytes, the
# size that files can have from then on.
NURSERY = """
import json, os, resource, signal, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # imports may print
import firm.federation.rounds
import firm.jobs.alignment, firm.jobs.alignment_config, firm.jobs.alignment_loading
import firm.run.directory
from firm.alignment import MultiObjectiveTrainer
from firm.run import run_cli

STAGES = {
    "start": (firm.jobs.alignment_loading, "load_policy"),
    "rollout": (MultiObjectiveTrainer, "sample"),
    "update": (MultiObjectiveTrainer, "step"),
    "aggregation": (firm.federation.rounds.Round, "finish"),
    "checkpoint": (firm.run.directory, "save_state"),
}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def doom(stage, call, num_events=0, room=None):
    place, name = STAGES[stage]
    function = getattr(place, name)

    def count(*_):
        nonlocal num_events
        num_events -= 1
        if num_events <= 0:
            die()

    def doomed(*args, **kwargs):
        nonlocal call
        call -= 1
        if call:
            return function(*args, **kwargs)
        if room is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            return function(*args, **kwargs)
        sys.setprofile(count)
        try:
            return function(*args, **kwargs)
        finally:
            die()

    setattr(place, name, doomed)

for line in sys.stdin:
    argv, errors, death = json.loads(line)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            if death:
                doom(**death)
            run_cli(firm.jobs.alignment.main, firm.jobs.alignment_config.AlignmentConfig, argv)
            status = 0
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
"""

NUM_CALLS = {"start": 1, "rollout": 8, "update": 32, "aggregation": 2, "checkpoint": 3}
"""How often a run of configs/smoke.yaml comes to each stage: 2 rounds, 2 clients, 2 local steps of
2 epochs of 2 minibatches; a checkpoint is written before the first round, too."""


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., int]]:
    """Takes up or starts the run in a folder and returns its exit code, -9 if it was killed."""
    with nursery(NURSERY) as (ask, answer):

        def run(path: Path, **death: object) -> int:
            ask(
                ["--config", str(SMOKE), "--out", str(path), "--resume", "auto"],
                f"{path}.log",
                death,
            )
            return answer()

        yield run


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory) -> Path:
    """A run that nothing has interrupted."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert start(path) == 0, Path(f"{path}.log").read_text()
    return path


def assert_same(path: Path, whole: Path) -> None:
    ours, theirs = (read_adapter(p) for p in (path, whole))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    kinds = [[row["kind"] for row in read_rows(p)] for p in (path, whole)]
    assert kinds[0] == kinds[1]
    assert any(tensor.any() for name, tensor in ours.items() if "lora_B" in name)


def test_ten_kills_at_random_moments_change_nothing(start, whole, tmp_path):
    draw = random.Random(4)
    stages = list(NUM_CALLS) * 2
    draw.shuffle(stages)
    path = tmp_path / "run_0"
    num_runs = 1
    for stage in stages:
        death = {
            "stage": stage,
            "call": draw.randint(1, NUM_CALLS[stage]),
            "num_events": int(10 ** draw.uniform(0, 4)),
        }
        while (status := start(path, **death)) == 0:  # it was past that call already
            assert_same(path, whole)
            path = tmp_path / f"run_{num_runs}"
            num_runs += 1
        assert status == -signal.SIGKILL, Path(f"{path}.log").read_text()
    assert start(path) == 0, Path(f"{path}.log").read_text()
    assert_same(path, whole)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_disk_that_is_full_at_a_checkpoint_costs_no_more_than_its_round(
    call, start, whole, tmp_path
):
    path = tmp_path / "run"
    assert start(path, stage="checkpoint", call=call, room=10_000) == 2
    errors = Path(f"{path}.log").read_text().splitlines()
    unwritten = (
        f"checkpoint of round {call - 1} in {path}/checkpoints",
        f"client_0 in {path}/clients",
    )
    assert any(f"{part} cannot be written" in errors[-1] for part in unwritten)
    assert errors[-1].endswith("free space on the disk, then continue with `firm resume`.")
    told = [line for line in errors[:-1] if not re.match(NO_ERROR, line)]
    assert all("report.html could not be drawn (OSError" in line for line in told)  # no room, too
    kept = [f"round_{number:04d}" for number in range(call - 1)]
    assert sorted(os.listdir(path / "checkpoints")) == kept
    assert json.loads((path / "run.json").read_text())["status"] == "failed"
    assert start(path) == 0, Path(f"{path}.log").read_text()
    assert_same(path, whole)
