"""What an estimator of another package needs: its file, and that of a figure it logs."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from firm.alignment import AlignmentClient, copy_adapter
from firm.alignment.estimator_config import (
    ESTIMATORS,
    EstimatorConfig,
    PPOConfig,
    register_estimator,
)
from firm.alignment.policy import set_mode
from firm.alignment.sequences import token_logprobs
from firm.federation import LocalEngine, ServerState
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FedCmooConfig, FirmConfig
from firm.run.plugins import import_plugin
from tests.cabs import PROMPTS
from tests.plugins import plugins_forgotten
from tests.stages import experience_of, rollouts_of


@pytest.fixture(scope="module", autouse=True)
def plugin():
    with plugins_forgotten():
        for name in ("reinforce", "reply_loss"):
            import_plugin(str(Path(__file__).parents[2] / f"extensions/{name}.py"))
        yield


@pytest.fixture
def make(make_trainer, letter_count):
    """A trainer of groups of four replies to each of four prompts."""

    def make(**changes):
        return make_trainer(
            rewards={letter: letter_count(letter) for letter in "abc"},
            estimator="reinforce",
            **changes,
        )

    return make


def run(trainer, cfg, strategy):
    engine = LocalEngine([AlignmentClient("client_0", PROMPTS, trainer, seed=1)])
    state = ServerState(
        copy_adapter(trainer.adapter_parameters), objectives=trainer.objectives, seed=1
    )
    rows = []
    for _ in range(2):
        state, metrics = strategy(state, ["client_0"], engine, cfg)
        rows.append(metrics["clients"][0])
    return state.adapter, rows


def test_the_adapters_dropout_is_active_in_each_part_of_its_updates(make, monkeypatch):
    trainer, seen = make(dropout=0.5, micro_batch_size=3), []
    kind = type(trainer.learner.estimator)
    gradients = kind.gradients

    def noted(self, *arguments):
        modules = trainer.policy_model.named_modules()
        seen.extend(module.training for name, module in modules if name.endswith("lora_dropout"))
        found = gradients(self, *arguments)
        set_mode(trainer.policy_model, is_training=False)  # as another stacked client's sampling
        return found

    monkeypatch.setattr(kind, "gradients", noted)
    run(trainer, FirmConfig(), firm_round)
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("cfg", "strategy"), [(FirmConfig(num_local_steps=2), firm_round), (FedCmooConfig(), fedcmoo)]
)
def test_it_trains_a_client_whose_row_has_its_figures_and_none_of_ppo_s(make, cfg, strategy):
    trainer = make()
    before = copy_adapter(trainer.adapter_parameters)
    adapter, rows = run(trainer, cfg, strategy)
    assert any(not torch.equal(adapter[name], before[name]) for name in before)
    for row in rows:
        assert row["reply_loss"] > 0
        assert row["policy_loss"].keys() == {"a", "b", "c"}
        assert row["num_steps"] == cfg.num_local_steps
        assert not {"value_loss", "clip_fraction"} & row.keys()


def test_replies_to_a_prompt_stand_together_and_an_epoch_has_each_prompt_once(make):
    trainer = make()
    client = AlignmentClient("client_0", PROMPTS[:8], trainer, seed=1)
    assert client.batches_per_epoch == 2
    client.load(copy_adapter(trainer.adapter_parameters))
    drawn = []
    for batch in client.batches(2):
        prompts = batch.whole.rollouts.queries.prompts
        assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
        assert len(set(batch.whole.rollouts.completions)) > 4  # each reply is sampled by itself
        drawn += prompts[::4]
    assert sorted(prompt.text for prompt in drawn) == sorted(p.text for p in PROMPTS[:8])


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_one_backward_pass_gives_all_gradients(make, micro_batch_size):
    trainer = make(micro_batch_size=micro_batch_size)
    torch.manual_seed(0)
    experience = experience_of(trainer, rollouts_of(trainer, trainer.encode(PROMPTS[:4])))
    rollouts = experience.rollouts
    output = trainer.policy_model(
        input_ids=rollouts.query_responses, attention_mask=rollouts.attention_mask
    )
    logits = output.logits[:, rollouts.context_length - 1 : -1] / 0.8
    logprobs = (token_logprobs(logits, rollouts.responses) * rollouts.mask).sum(1)
    parameters = list(trainer.adapter_parameters.values())
    expected = [
        torch.autograd.grad(-(row * logprobs).mean(), parameters, retain_graph=True)
        for row in experience.coefficients
    ]
    calls = []
    head = trainer.policy_model.get_base_model().lm_head
    handle = head.register_full_backward_hook(lambda *_: calls.append(1))
    gradients = trainer.gradients(trainer.learner, experience)
    handle.remove()
    assert len(calls) == (1 if micro_batch_size is None else 6)
    for row, alone in zip(gradients.jacobian, expected, strict=True):
        flat = torch.cat([gradient.flatten() for gradient in alone])
        torch.testing.assert_close(row, flat, rtol=1e-3, atol=1e-5)


def test_a_batch_has_whole_groups():
    with pytest.raises(ValueError, match="multiple of the 3 replies to a prompt, got 16"):
        ESTIMATORS["reinforce"](group_size=3)


def test_a_name_is_taken_once():
    assert ESTIMATORS["ppo"] is PPOConfig

    @dataclass(frozen=True)
    class Second(PPOConfig):
        """Another one."""

    @dataclass(frozen=True)
    class Nameless(EstimatorConfig):
        """A configuration without a name."""

    refusals = {
        Second: "an estimator 'ppo' is already registered",
        Nameless: "needs a name, got ''",
    }
    for config, message in refusals.items():
        with pytest.raises(ValueError, match=message):
            register_estimator(config)
