"""Dropout of the base model is off in updates, whatever the architecture calls it."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from firm.alignment.adapters.lora import LoraSettings
from firm.alignment.advantages import masked_mean
from firm.alignment.estimator_config import ESTIMATORS
from firm.alignment.policy import adapter_parameters, add_adapter, borrowed, set_mode
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import Prompt
from tests.stages import experience_of, rollouts_of

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROTARY = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1, "attention_dropout": 0.5}
MIXTURE = {"num_local_experts": 2, "router_jitter_noise": 0.5}
CONFIGS = {
    "opt": OPTConfig(
        **SIZES,
        ffn_dim=32,
        word_embed_proj_dim=16,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.5,
    ),
    "bloom": BloomConfig(
        vocab_size=32,
        hidden_size=16,
        n_layer=2,
        n_head=2,
        hidden_dropout=0.5,
        attention_dropout=0.5,
        pad_token_id=0,
    ),
    "gpt_neox": GPTNeoXConfig(
        **SIZES, intermediate_size=32, attention_dropout=0.5, hidden_dropout=0.5
    ),
    "granite": GraniteConfig(**ROTARY),
    "llama": LlamaConfig(**ROTARY),
    "mixtral": MixtralConfig(**ROTARY, **MIXTURE),
    "gpt2": GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5
    ),
}
every_architecture = pytest.mark.parametrize("name", CONFIGS)
TOKEN_IDS = torch.tensor([[4, 9, 7, 14, 5], [8, 8, 4, 6, 10]])


def make(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name])


def adapted(model, *, dropout=0.0, checkpointing=False):
    """A policy whose adapter does something."""
    settings = LoraSettings(r=2, dropout=dropout, target_modules=None)
    config = PolicyConfig("a model", gradient_checkpointing=checkpointing, lora=settings)
    policy = add_adapter(model, config)
    for name, parameter in adapter_parameters(policy).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return policy


def logits_of(policy, *, is_training):
    set_mode(policy, is_training=is_training)
    torch.manual_seed(1)
    return policy(input_ids=TOKEN_IDS, use_cache=False).logits


@every_architecture
@pytest.mark.parametrize("checkpointing", [False, True])
def test_without_dropout_of_the_adapter_updates_see_what_rollouts_saw(name, checkpointing):
    policy = adapted(make(name), checkpointing=checkpointing)
    rollout, update, after = (logits_of(policy, is_training=mode) for mode in (False, True, False))
    assert torch.equal(rollout, update)
    assert torch.equal(rollout, after)


@every_architecture
def test_gradients_are_those_without_checkpointing(name):
    gradients, recomputed = [], []
    for checkpointing in (False, True):
        policy = adapted(make(name), checkpointing=checkpointing)
        layer = next(m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer))
        norm, calls = next(m for m in layer.modules() if "Norm" in type(m).__name__), []
        norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss = logits_of(policy, is_training=True).square().sum()
        parameters = list(adapter_parameters(policy).values())
        gradients.append(torch.autograd.grad(loss, parameters))
        recomputed.append(len(calls))
    assert recomputed == [1, 2]
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@every_architecture
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_the_adapter_is_on_in_updates_alone(name, checkpointing):
    policy = adapted(make(name), dropout=0.5, checkpointing=checkpointing)
    rollout, update, after = (logits_of(policy, is_training=mode) for mode in (False, True, False))
    assert torch.equal(rollout, after)
    assert not torch.allclose(rollout, update)
    with policy.disable_adapter(), torch.no_grad():
        base = logits_of(policy, is_training=True)
        assert torch.equal(base, logits_of(policy, is_training=False))


@every_architecture
def test_a_lent_model_comes_back_with_its_own_dropout(name):
    model = make(name)
    model.train()

    def logits():
        torch.manual_seed(1)
        return model(input_ids=TOKEN_IDS, use_cache=False).logits

    before = logits()
    with borrowed(model):
        logits_of(adapted(model, checkpointing=True), is_training=True)
    assert torch.equal(logits(), before)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def a_trainer(make_trainer, letter_count, **arguments):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    return make_trainer(rewards=rewards, **arguments)


@every_architecture
def test_the_first_ratio_of_a_run_is_one(name, make_trainer, letter_count):
    trainer = a_trainer(make_trainer, letter_count, policy=adapted(make(name)))
    torch.manual_seed(0)
    prompts = [Prompt(text) for text in ("abc", "bade", "cafe ab", "d")] * 4
    experience = experience_of(trainer, rollouts_of(trainer, trainer.encode(prompts)))
    means = [masked_mean(row, experience.rollouts.mask) for row in experience.advantages]
    losses = trainer.gradients(
        trainer.learner, experience
    ).losses  # of the ratio times the advantage
    torch.testing.assert_close(losses, -torch.stack(means), rtol=0, atol=1e-5)


def test_the_adapter_s_dropout_is_as_configured_and_trl_does_not_change_it(
    make_trainer, letter_count
):
    policy = adapted(make("gpt2"), dropout=0.3)
    trainer = a_trainer(make_trainer, letter_count, policy=policy)
    set_mode(trainer.policy_model, is_training=True)
    dropouts = [m for m in policy.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    assert [dropout.p for dropout in dropouts] == [0.3, 0.3]  # one per layer


def test_a_critic_is_a_network_without_dropout(make_trainer, letter_count):
    policy = adapted(make("opt"))
    critic = ESTIMATORS["ppo"](critic="network").new_critic(policy, 2)
    options = {"policy": policy, "value_model": critic.train(), "critic": "network"}
    trainer = a_trainer(make_trainer, letter_count, **options)
    values = [trainer.learner.estimator.critic(TOKEN_IDS).logits for _ in range(2)]
    assert torch.equal(*values)
