"""Fixtures that every test may use, and the quiet, offline world that tests run in."""

import os
import re

from tests.processor import without_faulty_amx

os.environ.update(without_faulty_amx())
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import dataclasses
import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import settings

from firm.federation.strategies import STRATEGIES
from tests.browser import page  # noqa: F401  # a fixture
from tests.plugins import plugins_forgotten

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")

torch.set_num_threads(1)  # bit-for-bit promises hold at one thread count

gc.disable()  # imports leave no garbage, and looking for it takes 4 of their 14 seconds

# What tests left behind is not finalised in forks: threads that native code would wait for or stop
# do not exist there, and a collection there has ended in a segmentation fault.
os.register_at_fork(after_in_child=gc.freeze)

LONGEST = (
    "network/test_federations.py",
    "network/test_faults.py",
    "benchmarks/test_device_mutations.py",
    "docs/test_pages.py",
    "zoo/test_zoo.py",
    "alignment/test_gpu.py",
    "jobs/test_processes.py",
    "accelerator/test_alignment.py",
    "accelerator/test_memory.py",
    "federation/engines/test_hostile.py",
    "jobs/test_resume.py",
    "network/test_hostile_jobs.py",
    "jobs/test_sweep.py",
    "jobs/test_plan_time.py",
    "jobs/test_fmoo.py",
    "jobs/test_alignment.py",
    "alignment/test_client.py",
    "jobs/test_front.py",
    "alignment/test_rendering.py",
    "jobs/test_guard.py",
    "extensions/test_extensions.py",
    "cli/test_main.py",
    "alignment/adapters/test_conditioned.py",
    "jobs/test_pairs.py",
    "alignment/test_plan.py",
    "alignment/test_rollout.py",
    "alignment/test_stacked.py",
    "alignment/test_prompts.py",
    "cli/test_resume.py",
)
"""Files that take longest, those of the second tier first. They come first: with `--dist loadfile`
a long one that came last would leave the other workers without work."""


def pytest_collection_finish() -> None:
    """Collects garbage from here on, and never again looks through what was imported."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps xdist from handing out files by their number of tests, few of which may be long."""
    config.option.loadscopereorder = False


SECOND_TIER = (
    "accelerator",
    "benchmarks",
    "docs",
    "federation/test_schedule.py",
    "federation/strategies/test_torchjd.py",
    "fmoo/test_data.py",
    "fmoo/test_models.py",
    "fmoo/test_progress.py",
    "jobs/test_explore.py",
    "jobs/test_hub.py",
    "jobs/test_links.py",
    "jobs/test_paper_configs.py",
    "jobs/test_plan_time.py",
    "jobs/test_serve.py",
    "jobs/test_weights.py",
    "jobs/test_workspace.py",
    "miniature",
    "network/test_federations.py",
    "recipes/miniature",
    "recipes/paper",
    "recipes/theory",
    "report/test_browser.py",
    "report/test_front_page.py",
    "report/test_tables.py",
    "report/test_own_quantity.py",
    "report/test_poisoned_runs.py",
    "report/test_settings_",
    "report/test_static.py",
    "serving/test_load.py",
    "solvers/test_torchjd.py",
)
"""Tests that run where their code changes: browsers, networks, figures, pages of studies."""

CASES = 2
"""Cases of a test with parameters in the first tier, unless it says `every_case` or marks some."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, and into the second tier what the first need not wait for.

    Of a test with many parameters the first tier runs the first and the last case.
    """
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))
    slow = pytest.mark.slow
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        if item.path.relative_to(folder).as_posix().startswith(SECOND_TIER):
            item.add_marker(slow)
    for same in cases.values():
        marked = (item.get_closest_marker(name) for item in same for name in ("slow", "every_case"))
        for item in same[1 : 1 - CASES] if not any(marked) else ():
            item.add_marker(slow)


@pytest.fixture(scope="session")
def exact_config() -> Callable[..., Any]:
    """A strategy's configuration with nothing compressed: `exact_config(name, **options)`."""

    def build(name: str, **options: Any) -> Any:
        kind = get_type_hints(STRATEGIES[name])["cfg"]
        fields = {field.name for field in dataclasses.fields(kind)}
        exact = {"compressor": "none", "communication": "one_way"}
        return kind(**{key: value for key, value in exact.items() if key in fields}, **options)

    return build


def _same(first, second) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return first == second


@pytest.fixture(scope="session")
def same():
    """Whether two nested structures of tensors and plain values are equal, bit for bit."""
    return _same


@pytest.fixture
def new_plugins() -> Iterator[None]:
    """Lets a test register what it likes; it is forgotten at the end."""
    with plugins_forgotten():
        yield


NO_ERROR = r"running Python |loading the models$|[\w ]+: \d+ replies of up to \d+ tokens$"
"""Lines on standard error that may precede an error: whose code runs, and what takes long."""


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line in which a command ends with exit code 2, before which it only says what it does.

    Called with the function and what it takes; the words of a command line may be of any type.
    """

    def line_of(call: Callable[..., object], *arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            call(*([*map(str, each)] if isinstance(each, list) else each for each in arguments))
        assert end.value.code == 2
        printed = capsys.readouterr()
        lines = [line for line in printed.err.splitlines() if not re.match(NO_ERROR, line)]
        assert len(lines) == 1, printed.err
        assert lines[0].startswith("error: ")
        assert not printed.out
        return lines[0]

    return line_of


@pytest.fixture(scope="session")
def firm_data() -> Path:
    """The folder of real data that FIRM_DATA names; skips, saying so, without it."""
    folder = os.environ.get("FIRM_DATA")
    if not folder:
        pytest.skip("FIRM_DATA is not set: no folder of real data to test on")
    return Path(folder)


class _Notes(logging.Handler):
    """The warnings of what could not be drawn, with their tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.notes: list[str] = []
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(record.getMessage())
        self.tracebacks.append(traceback.format_exc())

    def clear(self) -> None:
        self.notes.clear()
        self.tracebacks.clear()


@pytest.fixture(scope="session", autouse=True)
def _notes() -> Iterator[_Notes]:
    """Listens to what becomes a note, in fixtures of modules, too."""
    notes, logger = _Notes(), logging.getLogger("firm.run.guard")
    logger.addHandler(notes)
    yield notes
    logger.removeHandler(notes)


@pytest.fixture(autouse=True)
def _everything_is_drawn(_notes: _Notes) -> Iterator[None]:
    """Fails a test in which something could not be drawn, unless it asks for `undrawn`."""
    yield
    told = [*_notes.notes, *_notes.tracebacks]
    _notes.clear()
    assert not told, "\n".join(told)


@pytest.fixture
def undrawn(_everything_is_drawn: None, _notes: _Notes) -> Iterator[list[str]]:
    """The notes of a test in which something cannot be drawn."""
    yield _notes.notes
    _notes.clear()
