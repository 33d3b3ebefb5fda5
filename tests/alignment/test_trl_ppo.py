"""The trainer inside TRL's against stock TRL, and against the same stages without it."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForSequenceClassification

from firm.alignment import AlignmentClient, build_trainer, copy_adapter, load_adapter_
from firm.alignment.prompts import prompt_of
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.randomness import RandomStream
from firm.federation import LocalEngine, ServerState
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig

stock = pytest.importorskip("trl.experimental.ppo", reason="TRL has no PPO from 1.13 on")
ours = pytest.importorskip("firm.alignment.trl_ppo")

# what stock TRL, not our subclass, warns of
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


class LetterCount(torch.nn.Module):
    """A reward model for stock TRL: how often one letter stands among prompt and reply ids."""

    base_model_prefix = "trunk"

    def __init__(self, token_id: int):
        super().__init__()
        self.token_id = token_id
        self.score = torch.nn.Identity()

    def trunk(self, input_ids, attention_mask, **_):
        count = ((input_ids == self.token_id) & attention_mask).cumsum(1).unsqueeze(-1) / 8
        return SimpleNamespace(hidden_states=[count])


def without_padding(policy):
    """Returns a policy that never samples the pad token, which TRL takes for the end of a reply."""

    def unlikely(_module, _inputs, logits):
        return logits.index_fill(-1, torch.tensor([0]), -1e4)

    policy.get_output_embeddings().register_forward_hook(unlikely)
    return policy


@pytest.fixture
def make_value_model(make_model):
    """A value network of the policy's architecture, the same every time."""

    def make():
        config = make_model(num_labels=1).config
        torch.manual_seed(2)
        return LlamaForSequenceClassification(config)

    return make


@pytest.fixture
def train_stock(tokenizer, make_policy, make_value_model, prompt_dataset, tmp_path):
    """Trains by stock TRL, 18 optimizer steps; gives the states of policy and value network."""

    def train():
        trainer = stock.PPOTrainer(
            args=stock.PPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=16,
                gradient_accumulation_steps=1,
                num_mini_batches=2,
                num_ppo_epochs=3,
                total_episodes=16 * 3,
                response_length=10,
                temperature=0.8,
                stop_token="eos",
                learning_rate=3e-3,
                kl_coef=0.1,
                vf_coef=1.0,  # the factor of a loss does nothing under Adam, but rounds
                cliprange=0.1,
                missing_eos_penalty=0.5,
                bf16=False,
                use_cpu=True,
                activation_checkpointing=False,
                report_to="none",
                num_sample_generations=0,
                seed=3,
                save_strategy="no",
                disable_tqdm=True,
            ),
            processing_class=tokenizer,
            model=without_padding(make_policy()),
            ref_model=None,
            reward_model=LetterCount(tokenizer.convert_tokens_to_ids("a")),
            train_dataset=prompt_dataset,
            value_model=make_value_model(),
        )
        np.random.seed(4)
        trainer.train()
        return trainer.model.policy.state_dict(), trainer.model.value_model.state_dict()

    return train


@pytest.fixture
def make_central(make_trainer, make_policy, prompt_dataset):
    """A trainer for `train()`."""

    def build(config, **arguments):
        trl_arguments = {"seed": 3, "save_strategy": "no"}
        return ours.MultiObjectivePPOTrainer(
            config, train_dataset=prompt_dataset, trl_arguments=trl_arguments, **arguments
        )

    def make(**arguments):
        policy = without_padding(make_policy())
        return make_trainer(build=build, policy=policy, **arguments)

    return make


@pytest.fixture
def train_ours(make_central):
    """Trains by `MultiObjectivePPOTrainer.train`; gives the states of policy and critic."""

    def train(**arguments):
        trainer = make_central(**arguments)
        np.random.seed(4)
        trainer.train()
        return (
            trainer.stages.policy_model.state_dict(),
            trainer.learner.estimator.critic.state_dict(),
        )

    return train


def largest_difference(first, second) -> float:
    assert first.keys() == second.keys()
    return max((first[k] - second[k]).abs().max().item() for k in first)


def test_one_objective_with_a_value_network_equals_stock_trl_bit_for_bit(
    train_stock, train_ours, make_policy, make_value_model, letter_count
):
    def ours_on(letter: str, **changes):
        rewards = {letter: letter_count(letter)}
        return train_ours(
            rewards=rewards, critic="network", value_model=make_value_model(), **changes
        )

    expected, found = train_stock(), ours_on("a")
    for stock_state, our_state in zip(expected, found, strict=True):
        assert stock_state.keys() == our_state.keys()
        for name in stock_state:
            assert torch.equal(stock_state[name], our_state[name]), name
    # the comparison has something to compare, and notices another reward or clip range
    assert largest_difference(expected[0], make_policy().state_dict()) > 1e-3
    assert largest_difference(expected[0], ours_on("b")[0]) > 1e-4
    assert largest_difference(expected[0], ours_on("a", clip_range=0.01)[0]) > 1e-4


def test_training_without_a_batch_of_prompts_says_so(make_central, letter_count):
    trainer = make_central(rewards={"a": letter_count("a")})
    trainer.train_dataset_len = 1
    with pytest.raises(ValueError, match=r"at least one batch of prompts \(16\), got 1"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["heads", "network"])
@pytest.mark.parametrize("solve_per", ["minibatch", "batch"])
def test_clients_train_the_same_adapter_within_trl_s_trainer_and_without_it(
    make_trainer, letter_count, critic, solve_per
):
    """What runs where TRL has no PPO is what runs where it has one."""

    def run(build):
        torch.manual_seed(0)  # of the value network
        trainer = make_trainer(
            build=build,
            rewards={letter: letter_count(letter) for letter in "ab"},
            critic=critic,
            dropout=0.1,
            micro_batch_size=3,
        )
        assert isinstance(trainer.trl, stock.PPOTrainer) == (build is build_trainer)
        torch.manual_seed(int(build is build_trainer))  # the global generators decide nothing
        prompts = [prompt_of(f"\n\nHuman: {letter} cab\n\nAssistant:") for letter in "abcdefgh" * 2]
        clients = [AlignmentClient(name, prompts, trainer, seed=7) for name in ("one", "two")]
        start = copy_adapter(trainer.adapter_parameters)
        state = ServerState(start, objectives=trainer.objectives, seed=7)
        engine, cfg = LocalEngine(clients), FirmConfig(solve_per=solve_per, num_local_steps=2)
        for _ in range(2):
            state, _ = firm_round(state, ["one", "two"], engine, cfg)
        load_adapter_(trainer.adapter_parameters, start)
        return start, state.adapter

    start, wrapped = run(build_trainer)
    own_start, own = run(MultiObjectiveTrainer)
    assert all(torch.equal(start[name], own_start[name]) for name in start)
    assert all(torch.equal(wrapped[name], own[name]) for name in wrapped)
    assert largest_difference(start, own) > 1e-3


def test_a_trainer_leaves_the_model_the_tokenizer_and_the_generators_as_they_were(
    make_trainer, make_policy, letter_count
):
    """Whatever TRL's set-up changes is put back; this notices what a later release changes."""
    states = []

    def recorded(config, **arguments):
        states.append(state_of(arguments["policy"], arguments["tokenizer"]))
        trainer = build_trainer(config, **arguments)
        states.append(state_of(arguments["policy"], arguments["tokenizer"]))
        return trainer

    policy = make_policy()
    policy.generation_config.eos_token_id = [2, 5]
    policy.base_model.model.model.layers[0].extra = torch.nn.Dropout(0.3).eval()
    with RandomStream(5, "here"):
        trainer = make_trainer(build=recorded, rewards={"a": letter_count("a")}, policy=policy)
    assert trainer.trl is not None
    before, after = states
    assert before == after


def state_of(policy: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns what others would notice of a policy, its tokenizer and the global generators."""
    modules = {
        name: (
            module.training,
            getattr(module, "p", None),
            "forward" in vars(module),
            [len(hooks) for key, hooks in vars(module).items() if key.endswith("_hooks")],
        )
        for name, module in policy.named_modules()
    }
    return {
        "generation": policy.generation_config.to_dict(),
        "config": policy.config.to_dict(),
        "modules": modules,
        "parameters": {n: (p.requires_grad, p.dtype) for n, p in policy.named_parameters()},
        "tokenizer": (repr(tokenizer), tokenizer.padding_side, tokenizer.chat_template),
        "generators": (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # type: ignore[index]
        ),
    }
