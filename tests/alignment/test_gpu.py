"""The main job on accelerators, and the page of what it costs there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import gpu
from benchmarks.gpu_page import STAGES, Case, Row, Setting
from tests.runs import read_adapter, read_rows

ROOT = Path(__file__).parents[2]
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


def cells(page: str, section: str) -> list[list[str]]:
    """The cells of a section's table, without its headings."""
    lines = page.split(f"## {section}")[1].split("##")[0].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_the_page_of_costs_has_every_case_with_its_figures(tmp_path, monkeypatch):
    for function in ("set_verbosity_error", "disable_progress_bar"):  # of this whole process
        monkeypatch.setattr(transformers.utils.logging, function, lambda: None)
    monkeypatch.setattr(gpu, "_measured", gpu._row)  # a process for each case takes seconds
    out = tmp_path / "page.md"
    gpu.main([*("--shape", "tiny", "--device", "cpu", "--clients", "2"), "--out", str(out)])
    page = out.read_text()
    cases = [[e, "2", engine] for e in ("ppo", "critic_free") for engine in ("local", "stacked")]
    cases.append(["critic_free", "2", "local, static cache"])
    rounds = cells(page, "Seconds by stage")
    assert [row[:3] for row in rounds] == cases
    for _, _, engine, seconds, ratio, *stages in rounds:
        assert 0.5 * float(seconds) < sum(map(float, stages)) <= 1.01 * float(seconds)
        assert (engine == "local") == (ratio == "")
    for row in cells(page, "Throughput and memory"):
        case, (tokens, share, rows, peak, planned, up, planned_up) = row[:3], row[3:]
        assert case in cases
        assert rows == ("8" if case[2] == "stacked" else "4")
        assert all(float(cell.split()[0]) > 0 for cell in (tokens, share, peak, planned))
        sizes = [int(cell.replace(",", "")) for cell in (up, planned_up)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    ((replies, *figures),) = cells(page, "Beside TRL")
    assert replies == "8"
    assert float(figures[2]) == pytest.approx(float(figures[1]) / float(figures[0]), rel=0.05)


@pytest.mark.slow
def test_at_tinyllamas_true_shape_memory_and_adapters_are_as_planned(tmp_path, capsys):
    pages = {}
    for shape in ("tiny", "tinyllama-short"):
        out = tmp_path / f"{shape}.md"
        options = ("--shape", shape, "--device", "cpu", "--clients", 2, "--out", out)
        python("benchmarks/gpu.py", *options, "--minutes", 60)
        pages[shape] = out.read_text()
    with capsys.disabled():
        sys.stdout.write(pages["tinyllama-short"])
    tiny, true = (cells(page, "Throughput and memory") for page in pages.values())
    for small, row in zip(tiny, true, strict=True):
        libraries = float(small[6]) - float(small[7])  # which the plan leaves out
        assert float(row[6]) - libraries == pytest.approx(float(row[7]), rel=0.1)
        sizes = [int(cell.replace(",", "")) for cell in row[8:]]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.001)


def test_cases_that_come_too_late_say_so(tmp_path):
    out = tmp_path / "page.md"
    options = ("--shape", "tiny", "--device", "cpu", "--clients", "1", "--minutes", "0")
    gpu.main([*options, "--out", str(out)])
    page = out.read_text()
    assert {row[3] for row in cells(page, "Seconds by stage")} == {"not run: 0 minutes were over"}


def test_a_case_that_fails_is_a_row_of_the_page(tmp_path, monkeypatch):
    class Broken(RuntimeError):
        pass

    def measured(setting, case):
        if case.engine in ("stacked", "trl"):
            raise Broken("no kernel for a|b\non this device")
        stages = dict.fromkeys(STAGES, 0.1)
        sizes = {"bytes_up": 1, "planned_up": 1}
        return Row(case, seconds=1.0, stages=stages, tokens_per_second=1.0, **sizes)

    for name in ("_own_row", "_peer_row"):
        monkeypatch.setattr(gpu, name, measured)
    monkeypatch.setattr(gpu, "_measured", gpu._row)
    out = tmp_path / "page.md"
    gpu.main([*("--shape", "tiny", "--device", "cpu", "--clients", "2"), "--out", str(out)])
    reason = "failed: Broken: no kernel for a\\|b"
    for section in ("Seconds by stage", "Throughput and memory"):
        rows = {tuple(row[:3]): row[3] for row in cells(out.read_text(), section)}
        assert len(rows) == 5
        for (_, _, engine), first in rows.items():
            assert (first == reason) == (engine == "stacked")
    assert cells(out.read_text(), "Beside TRL")[0][:2] == ["8", reason]


@pytest.mark.slow
def test_a_case_whose_process_is_killed_is_a_row_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_row", _killed)
    row = gpu._measured(Setting("tiny", "cpu", str(tmp_path), False), Case("ppo", "local", 1))
    assert row.note == "failed: its process was killed"


def _killed(setting, case):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_says_what_runs_here(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA device here; give --device cpu --shape tiny" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_stacked_clients_end_on_a_gpu_as_clients_in_turn(tmp_path, estimator):
    adapters = []
    for engine in ("local", "stacked"):
        options = ("--engine", engine, "--estimator.name", estimator, "--policy.lora.dropout", 0)
        out = tmp_path / engine
        python(
            *("recipes/firm_hh.py", "--config", "configs/smoke.yaml", "--out", out),
            *(*options, "--rounds", 1, "--policy.device", "cuda"),
        )
        adapters.append(read_adapter(out))
    for name, value in adapters[0].items():
        torch.testing.assert_close(value, adapters[1][name], atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_processes_work_as_one_by_nccl(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    (tmp_path / "team.py").write_text(TEAM)
    python(*launcher, tmp_path / "team.py")
    run = ("recipes/firm_hh.py", "--config", "configs/smoke.yaml", "--rounds", 1)
    python(*launcher, *run, "--processes_per_client", 2, "--out", tmp_path / "run")
    assert read_rows(tmp_path / "run")[0]["processes"] == [["client_0", "client_1"]] * 2
