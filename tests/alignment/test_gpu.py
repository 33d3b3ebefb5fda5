"""The main job on accelerators: a step at the paper's shape, and two processes on two devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import gpu_step
from tests.runs import read_rows

ROOT = Path(__file__).parents[2]
STAGES = (
    "rollout and reference",
    "rewards, values, advantages",
    "forward and backward",
    "Gram matrix and weights",
    "optimizer step",
    "step",
)

TEAM = """
import torch
import torch.distributed as dist
from firm.federation import Processes

processes = Processes.join(per_client=2)
team = processes.team()
device = torch.device("cuda", torch.cuda.current_device())
assert device.index == processes.rank, device
total = team.sum(torch.full((3,), processes.rank + 1.0, device=device))
assert total.device == device and total.tolist() == [3.0, 3.0, 3.0], total
assert team.group._get_backend(device).name() == "nccl"
rows = torch.arange(5.0, device=device)[team.share(5)]
assert torch.cat(team.gather(rows)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
dist.destroy_process_group()
"""


def python(*arguments: object) -> str:
    """Runs Python in the project's root; gives what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def peaks(output: str) -> list[float]:
    """Peak gigabytes of a whole step, by variant."""
    return [float(peak) for peak in re.findall(r"^ *step +[\d.]+ +([\d.]+)", output, re.M)]


def test_the_benchmark_of_a_step_times_every_stage_with_and_without_checkpointing(
    capsys, monkeypatch
):
    for function in ("set_verbosity_error", "disable_progress_bar"):  # of this whole process
        monkeypatch.setattr(transformers.utils.logging, function, lambda: None)
    gpu_step.main(["--shape", "tiny", "--device", "cpu"])
    output = capsys.readouterr().out
    for variant in ("off", "on"):
        assert f"gradient checkpointing {variant}" in output
    for stage in STAGES:
        seconds = re.findall(rf"^ *{stage} +([\d.]+) +-", output, re.M)
        assert len(seconds) == 2, stage
    assert all(float(s) > 0 for s in re.findall(r"^ *step +([\d.]+)", output, re.M))
    assert len(re.findall(r"^planned: [\d.e-]+ GB on cpu", output, re.M)) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_at_the_papers_shape_fits_and_checkpointing_saves_memory(capsys):
    output = python("benchmarks/gpu_step.py")
    with capsys.disabled():
        sys.stdout.write(output)
    kept, computed_again = peaks(output)
    assert computed_again < kept < 0.9 * torch.cuda.mem_get_info()[1] / 1e9


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_processes_work_as_one_by_nccl(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    (tmp_path / "team.py").write_text(TEAM)
    python(*launcher, tmp_path / "team.py")
    run = ("recipes/firm_hh.py", "--config", "configs/smoke.yaml", "--rounds", 1)
    python(*launcher, *run, "--processes_per_client", 2, "--out", tmp_path / "run")
    assert read_rows(tmp_path / "run")[0]["processes"] == [["client_0", "client_1"]] * 2
