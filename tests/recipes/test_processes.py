"""The main recipe on several processes: the same run, and an end in good order when one dies."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]

REWARD = """
import os
from pathlib import Path
from reward_models import reward_model

@reward_model("words")
def words(completions, *, log="", dies="", **kwargs):
    with open(log, "a") as file:
        file.write(f"{os.environ.get('RANK', '0')}\\\\n")
    if dies and os.environ["RANK"] == "1" and Path(log).read_text().count("1") == 3:
        os.kill(os.getpid(), 9)
    return [float(len(text.split())) for text in completions]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipe(runs):
    """Runs the smoke config with a reward that notes its process: ``recipe(name, number, ...)``."""
    rewards = runs / "rewards.py"
    rewards.write_text(REWARD.replace("\\\\n", "\\n"))

    def run(name: str, num_processes: int, *arguments: str) -> subprocess.CompletedProcess:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
        command = [
            *(sys.executable, *((*torchrun, num_processes) if num_processes > 1 else ())),
            *("recipes/firm_hh.py", "--config", "configs/smoke.yaml", "--out", runs / name),
            *("--policy.lora.dropout", 0, "--rewards.words.name", "words"),
            *("--rewards.words.file", rewards),
            *("--rewards.words.options", f"{{log: {runs / name}.log}}"),
            *arguments,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        return subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True
        )

    return run


@pytest.fixture(scope="module")
def one(recipe, runs) -> Path:
    """A run in one process."""
    done = recipe("one", 1)
    assert done.returncode == 0, done.stderr
    return runs / "one"


def adapter(folder: Path) -> dict:
    return load_file(folder / "adapter/adapter_model.safetensors")


def distance(first: dict, second: dict) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def run_row(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


def client_rows(folder: Path) -> list[dict]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "client"]


def test_two_processes_share_the_clients_and_give_the_adapter_of_one(recipe, runs, one):
    done = recipe("two", 2)
    assert done.returncode == 0, done.stderr
    assert distance(adapter(one), adapter(runs / "two")) == 0
    for row, expected in zip(client_rows(runs / "two"), client_rows(one), strict=True):
        measured = ("seconds", "bytes_up")  # the update tells its seconds, in as many digits
        assert {key: value for key, value in row.items() if key not in measured} == {
            key: value for key, value in expected.items() if key not in measured
        }
    assert run_row(one)["processes"] == [["client_0", "client_1"]]
    assert run_row(runs / "two")["processes"] == [["client_0"], ["client_1"]]
    asked = [(runs / f"{name}.log").read_text().split() for name in ("one", "two")]
    assert set(asked[0]) == {"0"}
    assert asked[1].count("1") == 2 * 2  # rounds, local steps of the other process's one client
    assert sorted(map(len, asked))[0] == len(asked[1])  # nothing was scored twice


def test_a_process_that_dies_ends_the_run_with_a_word_and_the_run_resumes(recipe, runs, one):
    start = time.monotonic()
    options = ("--rewards.words.options", f"{{log: {runs}/dying.log, dies: 'yes'}}")
    died = recipe("dying", 2, *options)
    assert died.returncode != 0
    assert time.monotonic() - start < 60
    assert "resume from the last checkpoint" in died.stderr
    assert "process 1 of the run's 2, which worked on client_1, is gone" in died.stderr
    assert "]: Traceback" not in died.stderr  # how torchrun's processes would show theirs
    resumed = recipe("dying", 2, *options, "--resume", "true")
    assert resumed.returncode == 0, resumed.stderr
    assert distance(adapter(runs / "dying"), adapter(one)) == 0


def test_two_processes_on_one_client_equal_one(recipe, runs, one):
    done = recipe("team", 2, "--processes_per_client", "2")
    assert done.returncode == 0, done.stderr
    rows = list(zip(client_rows(runs / "team"), client_rows(one), strict=True))
    for mine, theirs in rows[:2]:  # of round 1, the first solve: Adam then amplifies rounding
        # float32 sums over half batches: they differ by less than 1e-6 on one processor, by 3e-6 on
        # another
        assert mine["weights"][0] == pytest.approx(theirs["weights"][0], abs=1e-5)
        assert mine["gradient_norms"][0] == pytest.approx(theirs["gradient_norms"][0], rel=1e-5)
    for mine, theirs in rows:
        assert mine["reward_raw"] == pytest.approx(theirs["reward_raw"], rel=1e-6)
    assert distance(adapter(one), adapter(runs / "team")) < 5e-5  # 1.3e-5 on one processor
    asked = (runs / "team.log").read_text().split()
    assert asked.count("1") == 2 * 2 * 2  # rounds, local steps, clients: its share of each batch


def test_processes_per_client_that_do_not_divide_are_refused(recipe, runs):
    done = recipe("odd", 1, "--processes_per_client", "2")
    assert done.returncode == 2
    assert "processes_per_client must divide the number of processes, got 2 and 1" in done.stderr
    assert not (runs / "odd").exists()
