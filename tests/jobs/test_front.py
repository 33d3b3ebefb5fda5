"""Runs whose policy is conditioned on the preference: resumed, in every engine, and refused."""

import pytest
import torch
from safetensors.torch import load_file

from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.fedavg import fedavg
from firm.run import UserError
from tests import smoke
from tests.runs import read_adapter

FRONT = (
    *("--estimator.name", "critic_free", "--estimator.num_replies", 2),
    *("--policy.conditioning.kind", "preference", "--strategy.name", "fedavg"),
)


def _slopes(run):
    return load_file(run / "adapter/conditioned.safetensors")


def _same(first, second, tolerance=0.0):
    for read in (read_adapter, _slopes):
        mine, theirs = read(first), read(second)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return smoke.run(*FRONT, "--out", tmp_path_factory.mktemp("front") / "run")


def test_a_run_that_was_stopped_ends_as_one_that_was_not(trained, tmp_path, monkeypatch):
    def stops_in_round_2(state, *arguments):
        if state.round == 1:
            raise KeyboardInterrupt
        return fedavg(state, *arguments)

    with monkeypatch.context() as patch:
        patch.setitem(STRATEGIES, "fedavg", stops_in_round_2)
        with pytest.raises(KeyboardInterrupt):
            smoke.run(*FRONT, "--out", tmp_path / "run")
    resumed = smoke.run(*FRONT, "--out", tmp_path / "run", "--resume", "true")
    _same(trained, resumed)
    assert any(value.abs().max() > 1e-4 for value in _slopes(trained).values())


def test_stacked_clients_end_as_in_turn(trained, tmp_path):
    stacked = smoke.run(*FRONT, "--engine", "stacked", "--out", tmp_path / "run")
    _same(trained, stacked, tolerance=5e-5)  # Adam enlarges what rounding does to small gradients


def test_frozen_a_sends_the_matrices_b_alone(trained, tmp_path):
    frozen = smoke.run(*FRONT, "--policy.lora.freeze_a", "true", "--out", tmp_path / "run")
    assert _slopes(frozen).keys() == _slopes(trained).keys()
    folded = smoke.run(
        *("--start", f"{{{frozen / 'adapter'}: 1}}", "--start_preference", "[1, 0]"),
        *("--rounds", 0, "--out", tmp_path / "folded"),
    )
    own, slopes, centre = read_adapter(folded), _slopes(frozen), read_adapter(frozen)
    for name, value in centre.items():
        slope = slopes.get(name.replace("lora_B", "lora_B1"), torch.zeros(()))
        torch.testing.assert_close(own[name], value + slope)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--estimator.name", "ppo"], "needs an estimator that compares replies"),
        (["--strategy.lora_mean", "products"], "strategy.lora_mean must be factors"),
        (["--start", "{a: 1}"], "start must be empty with policy.conditioning.kind preference"),
        (["--start_preference", "[1, 1]"], "start_preference needs a start to be folded"),
        (["--policy.conditioning.corner_share", 2], "policy.conditioning.corner_share"),
        (["--rewards", "{brevity: {name: brevity}}"], "must be none with a single objective"),
    ],
)
def test_what_cannot_be_conditioned_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        smoke.config(*(FRONT[4:] if "ppo" in arguments else FRONT), *arguments)


def test_an_ordinary_adapter_is_not_folded(tmp_path, trained):
    plain = smoke.run("--rounds", 1, "--out", tmp_path / "plain")
    with pytest.raises(ValueError, match=r"has no conditioned\.safetensors"):
        smoke.run(
            *("--start", f"{{{plain / 'adapter'}: 1}}", "--start_preference", "[1, 0]"),
            *("--rounds", 0, "--out", tmp_path / "folded"),
        )
