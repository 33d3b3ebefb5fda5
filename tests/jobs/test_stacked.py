"""Runs whose clients are stacked, beside those whose clients go one after the other."""

from pathlib import Path

import pytest

from firm.alignment import load_policy
from firm.alignment.adapters.lora import adapted_modules
from firm.run import UserError
from tests import smoke
from tests.runs import distance, read_rows

GROUPS = (
    "{other: {clients: [1], rewards: {positivity: {name: brevity}}},"
    " partial: {clients: [2], objectives: [brevity]},"
    " far: {clients: [3], attack: {kind: sign_flip, scale: 2}}}"
)
MANY = (
    *("--num_clients", 4, "--strategy.clients_per_round", 3, "--groups", GROUPS),
    *("--policy.lora.dropout", 0.1, "--evaluation.num_validation_prompts", 0),
    *("--estimator.micro_batch_size", 3, "--estimator.num_epochs", 1),
    *("--estimator.actor_optimizer", "sgd", "--estimator.actor_learning_rate", 0.1),
)
"""Partial participation, clients that differ, dropout, and minibatches in parts.

Adam would turn rounding of gradients near zero into whole steps.
"""
STACKED = ("--engine", "stacked", "--max_rows", 13)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory) -> Path:
    """A run whose clients go one after the other."""
    return smoke.run(*MANY, "--out", tmp_path_factory.mktemp("runs") / "in_turn")


@pytest.mark.slow
def test_clients_that_differ_end_stacked_as_in_turn(in_turn, tmp_path):
    stacked = smoke.run(*MANY, *STACKED, "--out", tmp_path / "stacked")
    assert distance(in_turn, stacked) < 1e-5
    pairs = zip(read_rows(in_turn, "client"), read_rows(stacked, "client"), strict=True)
    for expected, row in pairs:
        assert row["client"] == expected["client"]
        assert row["scores"] == expected["scores"]  # the same tokens
        assert all(seconds > 0 for seconds in row["seconds"].values())


def test_a_run_goes_on_stacked_where_it_stopped_in_turn(in_turn, tmp_path):
    smoke.run_stopped_in_round_2(*MANY, "--out", tmp_path / "run")
    resumed = smoke.run(*MANY, *STACKED, "--out", tmp_path / "run", "--resume", "true")
    assert distance(in_turn, resumed) < 1e-5


def test_clients_are_not_stacked_in_a_model_that_reorders_their_rows(monkeypatch, tmp_path):
    def reordering(*arguments, **options):
        policy = load_policy(*arguments, **options)
        *_, layer = adapted_modules(policy).values()
        forward = layer.forward
        layer.forward = lambda x: forward(x.flip(0)).flip(0)
        return policy

    monkeypatch.setattr("firm.jobs.alignment_loading.load_policy", reordering)
    with pytest.raises(ValueError, match=r"rows of a batch .* not independent .* --engine local"):
        smoke.run(*STACKED, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "local"], "max_rows must be null with engine local, got 13"),
        (["--max_rows", 0], "max_rows must be at least 1, got 0; null takes 128"),
        (
            ["--processes_per_client", 2],
            "processes_per_client must be 1 with engine stacked",
        ),
        (["--rollout.cache", "static"], "rollout.cache must be dynamic with engine stacked"),
        (["--client_timeout", 60], "client_timeout must be null with engine stacked"),
        (
            ["--policy.gradient_checkpointing", "true", "--policy.lora.dropout", 0.1],
            "policy.lora.dropout must be 0 with engine stacked and policy.gradient_checkpointing",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        smoke.config(*STACKED, *arguments)
