"""The main job on accelerators, and the page of what it costs there."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import gpu
from benchmarks.gpu_page import STAGES, Case, Row, Setting
from benchmarks.random_models import save_models

ROOT = Path(__file__).parents[2]


class Here:
    """A worker that measures in this process."""

    def row(self, setting, case, *, patience):
        return gpu._row(setting, case)

    def close(self):
        """Has nothing to end."""


def python(*arguments: object) -> str:
    """Runs Python in the project's root; gives what it prints."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_the_page_of_costs_has_every_case_with_its_figures(tmp_path, monkeypatch):
    for function in ("set_verbosity_error", "disable_progress_bar"):  # of this whole process
        monkeypatch.setattr(transformers.utils.logging, function, lambda: None)
    monkeypatch.setattr(gpu, "Worker", Here)  # a process for each case takes seconds
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    out = tmp_path / "page.md"
    gpu.main([*("--shape", "tiny", "--device", "cpu", "--clients", "2"), "--out", str(out)])
    page = out.read_text()
    cases = [[e, "2", engine] for e in ("critic_free", "ppo") for engine in ("stacked", "local")]
    ways = ("stacked, whole prompts", "local, static cache")
    cases += [["critic_free", "2", engine] for engine in ways]
    rounds = cells(page, "Seconds by stage")
    assert [row[:3] for row in rounds] == cases
    for _, _, engine, seconds, ratio, *stages in rounds:
        assert 0.5 * float(seconds) < sum(map(float, stages)) <= 1.01 * float(seconds)
        assert (engine == "local") == (ratio == "")
    for row in cells(page, "Throughput and memory"):
        case, (tokens, share, rows, peak, planned, up, planned_up) = row[:3], row[3:]
        assert case in cases
        assert rows == ("8" if "stacked" in case[2] else "4")
        assert all(float(cell.split()[0]) > 0 for cell in (tokens, share, peak, planned))
        sizes = [int(cell.replace(",", "")) for cell in (up, planned_up)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    times = {name: milliseconds for name, _, milliseconds in cells(page, "Milliseconds of a token")}
    for name, value in times.items():
        missing = {"compiled": "not run: compiled", "vLLM": "not installed"}
        expected = missing.get(name.rpartition(", ")[2])
        assert value.startswith(expected) if expected else float(value) > 0, name
    (replies, peer, *figures), vllm = cells(page, "Beside TRL")
    assert (replies, peer) == ("8", "trl")
    assert vllm[:3] == ["8", "trl, vLLM", "not installed"]
    assert float(figures[2]) == pytest.approx(float(figures[1]) / float(figures[0]), rel=0.05)


@pytest.mark.slow
def test_at_tinyllamas_widths_memory_and_adapters_are_as_planned(tmp_path):
    """In few layers, which still are large beside the rest of a process.

    In float32, which all CPUs multiply by the same kernels.
    """
    case, rows = Case("critic_free", "local", 2), []
    with closing(gpu.Worker()) as worker:
        for shape in ("tiny", "tinyllama-shallow"):
            folder = str(tmp_path / shape)
            setting = Setting(shape, "cpu", folder, checkpointing=False, dtype="float32")
            save_models(setting.shape, tmp_path / shape, torch.device("cpu"))
            rows.append(worker.row(setting, case, patience=3600))
    small, row = rows
    assert (small.note, row.note) == ("", "")
    libraries = small.peak - small.planned  # which the plan leaves out
    assert row.peak - libraries == pytest.approx(row.planned, rel=0.1)
    assert row.bytes_up == pytest.approx(row.planned_up, rel=0.001)


def test_cases_that_come_too_late_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    out = tmp_path / "page.md"
    options = ("--shape", "tiny", "--device", "cpu", "--clients", "1", "--budget", "0")
    gpu.main([*options, "--out", str(out)])
    page = out.read_text()
    late = "not run: 0 seconds were over"
    assert {row[3] for row in cells(page, "Seconds by stage")} == {late}
    tokens = cells(page, "Milliseconds of a token")
    assert {row[2] for row in tokens if "vLLM" not in row[0]} == {late}


def test_a_case_that_fails_is_a_row_of_the_page(tmp_path, monkeypatch):
    class Broken(RuntimeError):
        pass

    def measured(setting, case):
        if case.engine in ("stacked", "trl"):
            raise Broken("no kernel for a|b\non this device")
        stages = dict.fromkeys(STAGES, 0.1)
        sizes = {"bytes_up": 1, "planned_up": 1}
        return Row(case, seconds=1.0, stages=stages, tokens_per_second=1.0, **sizes)

    for name in ("_token_row", "_own_row", "_peer_row"):
        monkeypatch.setattr(gpu, name, measured)
    monkeypatch.setattr(gpu, "Worker", Here)
    out = tmp_path / "page.md"
    gpu.main([*("--shape", "tiny", "--device", "cpu", "--clients", "2"), "--out", str(out)])
    reason = "failed: Broken: no kernel for a\\|b"
    for section in ("Seconds by stage", "Throughput and memory"):
        rows = {tuple(row[:3]): row[3] for row in cells(out.read_text(), section)}
        assert len(rows) == 6
        for (_, _, engine), first in rows.items():
            assert (first == reason) == (engine == "stacked")
    assert cells(out.read_text(), "Beside TRL")[0][:3] == ["8", "trl", reason]


@pytest.mark.slow
def test_a_case_whose_process_is_killed_is_a_row_of_the_page(tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")  # which has imported what it needs
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(gpu, "_row", _killed)
    setting, case = Setting("tiny", "cpu", str(tmp_path), False), Case("ppo", "local", 1)
    with closing(gpu.Worker()) as worker:
        assert worker.row(setting, case, patience=60).note == "failed: its process was killed"
        monkeypatch.setattr(gpu, "_row", _hangs)
        assert worker.row(setting, case, patience=1).note == "failed: it did not end"
        monkeypatch.setattr(gpu, "_row", _ends)
        assert worker.row(setting, case, patience=60).seconds == 1.0  # the next is not the worse


def _killed(setting, case):
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(setting, case):
    time.sleep(600)


def _ends(setting, case):
    return Row(case, seconds=1.0)


def test_the_page_is_written_after_every_case(tmp_path, monkeypatch):
    out, before = tmp_path / "page.md", []

    def measured(setting, case):
        before.append(out.read_text() if out.exists() else "")
        raise RuntimeError("no kernel")

    for name in ("_token_row", "_own_row", "_peer_row"):
        monkeypatch.setattr(gpu, name, measured)
    monkeypatch.setattr(gpu, "Worker", Here)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    gpu.main([*("--shape", "tiny", "--device", "cpu", "--clients", "2"), "--out", str(out)])
    written = [cells(page, "Seconds by stage") if page else [] for page in before]
    failed = [sum("no kernel" in row[3] for row in rows) for rows in written]
    # in a table of their own, as TRL's, which is the second; vLLM is missing
    tokens = [0] * sum("vLLM" not in name for name, _ in gpu.SAMPLERS)
    assert failed == [*tokens, 0, 1, 1, 2, 3, 4, 5]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_a_gpu_the_command_says_what_runs_here(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no accelerator here; give --device cpu --shape tiny" in capsys.readouterr().err
