"""The number of CPU threads is measured once, said, recorded, and used again on resume."""

from functools import partial

import pytest
import torch

from firm.alignment.threads import choose, measure
from firm.federation import Processes
from firm.jobs import alignment
from firm.jobs import alignment_loading as loading
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_loading import load
from firm.jobs.network import set_site_threads
from firm.run import compose
from tests.runs import read_adapter
from tests.smoke import FRONT, SMOKE, config, run

SLOWER, FASTER = {1: 0.01, 2: 0.04}, {1: 0.04, 2: 0.01}
"""Seconds that a step takes by number of threads."""


class Clock:
    """A clock that advances whenever it is read, by the seconds of torch's number of threads."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def __call__(self):
        self.now += self.seconds[torch.get_num_threads()]
        return self.now


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    """Has torch say that it uses two threads, as real ones could slow the tests down."""
    number = 2

    def set_number(new):
        nonlocal number
        number = new

    monkeypatch.setattr(torch, "set_num_threads", set_number)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)


@pytest.fixture
def loaded():
    cfg = compose(AlignmentConfig, [SMOKE], [("num_threads", "auto")])
    return cfg, load(cfg, Processes(), measures=False)


@pytest.mark.parametrize(("seconds", "expected"), [(SLOWER, 1), (FASTER, 2)])
def test_the_faster_number_is_set_and_said_once(loaded, seconds, expected):
    cfg, models = loaded
    torch.manual_seed(0)
    before, lines = torch.get_rng_state(), []

    def on_event(name, text):
        lines.append((name, text))

    cfg = loading.set_threads(cfg, models, on_event=on_event, clock=Clock(seconds))
    assert cfg.num_threads == torch.get_num_threads() == expected
    other = 3 - expected
    reason = f"a short step takes 0.01 s; with {other}: 0.04 s"
    assert lines == [("threads", f"threads: {expected} of 2 ({reason})")]
    assert torch.equal(torch.get_rng_state(), before)
    assert not models.trainer.policy_model.training
    assert all(value.grad is None for value in models.trainer.adapter_parameters.values())


def test_numbers_in_between_are_measured_and_a_small_gain_does_not_count():
    done = []
    seconds = {1: 0.03, 4: 0.028, 8: 0.0275}
    torch.set_num_threads(8)
    found = measure(lambda: done.append(torch.get_num_threads()), 8, clock=Clock(seconds))
    assert found == pytest.approx(seconds)
    assert set(done) == {1, 4, 8}
    assert choose(found) == 1
    assert choose({**found, 8: 0.025}) == 8


def test_pauses_count_however_rare():
    """Where a second thread waits for its core once in a while, the median would be its."""
    clock, num_calls = Clock({1: 0.02, 2: 0.01}), 0

    def work():
        nonlocal num_calls
        num_calls += 1
        if num_calls % 10 == 0 and torch.get_num_threads() == 2:
            clock.now += 0.5

    found = measure(work, 2, clock=clock)
    assert found[2] > found[1]


def test_one_thread_needs_no_measurement(loaded):
    cfg, models = loaded
    torch.set_num_threads(1)
    cfg = loading.set_threads(cfg, models, clock=iter(()).__next__)
    assert cfg.num_threads == 1


@pytest.mark.parametrize("number", [1, None])
def test_a_given_number_is_not_measured(loaded, number):
    _, models = loaded
    cfg = compose(AlignmentConfig, [SMOKE], [("num_threads", number)])
    assert loading.set_threads(cfg, models, clock=iter(()).__next__) == cfg


def test_a_resumed_run_has_the_number_of_its_start_and_ends_with_the_same_adapter(
    tmp_path, monkeypatch, capsys
):
    def with_clock(seconds):
        replaced = partial(loading.set_threads, clock=Clock(seconds))
        monkeypatch.setattr(alignment, "set_threads", replaced)

    options = (
        *("--num_threads", "auto", "--rollout.max_new_tokens", 4, "--strategy.num_local_steps", 1),
        *("--evaluation.num_validation_prompts", 0, "--estimator.num_epochs", 1),
    )
    with_clock(FASTER)
    run(*options, "--out", tmp_path / "whole")
    assert "threads: 2 of 2 (" in capsys.readouterr().err
    run(*options, "--rounds", 1, "--out", tmp_path / "stopped")
    torch.set_num_threads(2)
    with_clock(SLOWER)
    run(*options, "--out", tmp_path / "stopped", "--resume", "true")
    assert torch.get_num_threads() == 2
    for name in ("whole", "stopped"):
        assert "num_threads: 2\n" in (tmp_path / name / "config.yaml").read_text()
    resumed = read_adapter(tmp_path / "stopped")
    for name, value in read_adapter(tmp_path / "whole").items():
        assert torch.equal(resumed[name], value)


def test_a_site_that_starts_again_has_the_same_number(loaded, tmp_path, monkeypatch):
    cfg, models = loaded
    record = tmp_path / "states/run/num_threads.txt"
    slower = partial(loading.set_threads, clock=Clock(SLOWER))
    monkeypatch.setattr("firm.jobs.network.set_threads", slower)
    set_site_threads(cfg, models, record)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    faster = partial(loading.set_threads, clock=Clock(FASTER))
    monkeypatch.setattr("firm.jobs.network.set_threads", faster)
    set_site_threads(cfg, models, record)
    assert torch.get_num_threads() == 1


def test_the_step_of_a_conditioned_adapter_is_measured():
    cfg = config(*FRONT, "--num_threads", "auto")
    models = load(cfg, Processes(), measures=False)
    assert loading.set_threads(cfg, models, clock=Clock(SLOWER)).num_threads == 1
