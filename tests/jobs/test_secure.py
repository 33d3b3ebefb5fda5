"""Runs with secure sums, beside those whose server sees the updates."""

from pathlib import Path

import pytest

from firm.cli.main import COMMANDS
from tests import smoke
from tests.runs import distance, read_rows

MASKS = ("--strategy.secure", "masks")
CLIENTS = ("--num_clients", 3, "--evaluation.num_validation_prompts", 0)
NOISE = "{clip_norm: 0.5, noise_multiplier: 0.1, noise_seed: 7, at: %s}"
CLOSE = 2e-6


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A run without masks."""
    return smoke.run(*CLIENTS, "--out", tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> Path:
    """The same with masks."""
    return smoke.run(*CLIENTS, *MASKS, "--out", tmp_path_factory.mktemp("runs") / "masked")


def test_a_run_under_masks_ends_with_the_adapter_of_one_without(plain, masked):
    assert 0 < distance(plain, masked) < CLOSE
    for row in read_rows(masked, "round"):
        assert row["secure"]["num_updates"] == 3
        assert "retries" not in row


def test_stacked_clients_end_under_masks_as_without(tmp_path):
    stacked = (*CLIENTS, "--engine", "stacked")
    first = smoke.run(*stacked, "--out", tmp_path / "plain")
    second = smoke.run(*stacked, *MASKS, "--out", tmp_path / "masked")
    assert distance(first, second) < CLOSE


def test_a_run_under_masks_resumes_as_if_it_had_not_stopped(masked, tmp_path):
    smoke.run_stopped_in_round_2(*CLIENTS, *MASKS, "--out", tmp_path / "run")
    resumed = smoke.run(*CLIENTS, *MASKS, "--out", tmp_path / "run", "--resume", "true")
    assert distance(masked, resumed) == 0


def test_noise_of_the_sum_goes_under_masks(masked, tmp_path):
    privacy = ("--strategy.privacy", NOISE % "sum")
    run = smoke.run(*CLIENTS, *MASKS, *privacy, "--out", tmp_path / "run")
    assert distance(masked, run) > 0.01
    for row in read_rows(run, "round"):
        assert row["privacy"]["epsilon"] == row["privacy"]["epsilon_server"]
    for row in read_rows(run, "client"):
        assert not row.keys() & {"weights", "seconds", "rewards", "num_steps"}


def test_rounds_too_small_for_the_colluders_of_the_federation_are_refused(refusal, tmp_path):
    keys = ["--num_clients", 9, "--strategy.secure", "masks", "--strategy.clients_per_round", 4]
    line = refusal(
        COMMANDS["align"].run, ["--config", smoke.SMOKE, *keys, "--out", tmp_path / "run"]
    )
    assert "a sum of 4 clients hides nothing from 3 that collude; it requires 5 clients" in line
    assert not (tmp_path / "run").exists()
