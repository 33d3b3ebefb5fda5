"""Rollout engines of other packages, and samples from a copy of the policy."""

import math
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from firm.alignment.estimator_config import CriticFreeConfig
from firm.alignment.estimators.critic_free import reply_losses
from firm.alignment.estimators.ppo import policy_losses
from firm.alignment.rollout import Sampler, find_ends, rollout
from firm.alignment.rollout_config import (
    ROLLOUT_ENGINES,
    RolloutConfig,
    TransformersConfig,
    VLLMConfig,
)
from firm.alignment.rollout_engines.vllm import VLLMEngine
from firm.base.errors import DivergedError, RolloutError, TimeLimitError
from firm.run.plugins import import_plugin
from tests.plugins import plugins_forgotten
from tests.tokens import queries

PROMPTS = torch.tensor([[0, 4, 5], [7, 8, 9], [0, 0, 6]])


@pytest.fixture
def shifted():
    """Settings of an engine whose log-probabilities are too low."""
    with plugins_forgotten():
        import_plugin(str(Path(__file__).parents[2] / "extensions/shifted_engine.py"))
        yield ROLLOUT_ENGINES["shifted"]


def rollouts_of(make_model, tokenizer, engine, **changes):
    model = make_model().requires_grad_(False)
    config = RolloutConfig(max_new_tokens=6, temperature=1.0, stop_strings=[], engine=engine)
    config = replace(config, **changes)
    own = engine.engine(model, tokenizer, config)
    torch.manual_seed(3)
    return rollout(Sampler(model, tokenizer, config, nullcontext, engine=own), queries(PROMPTS))


@pytest.mark.parametrize(
    ("device", "devices", "shown", "expected"),
    [
        ("cuda:1", None, None, "1"),  # the policy's own
        ("cuda:0", [2, 3], None, "2,3"),
        ("cuda:0", [1], "4,7", "7"),
        ("cpu", None, None, None),
    ],
)
def test_vllm_sees_its_own_gpus_alone(monkeypatch, device, devices, shown, expected):
    started = {}

    def start(**arguments):
        started.update(arguments, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
        engine_core = SimpleNamespace(shutdown=lambda: None)
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=engine_core))

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    engine = VLLMEngine(VLLMConfig(devices=devices), policy_on(device), RolloutConfig())
    engine._start()
    engine.close()
    assert started["visible"] == expected
    assert started.get("tensor_parallel_size") == (expected and len(expected.split(",")))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == shown


def test_what_vllm_cannot_start_with_is_one_line(monkeypatch):
    def start(**arguments):
        raise RuntimeError("Engine core initialization failed.\nSee the root cause above.")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=start))
    for dtype, message in (
        (torch.float32, "policy.dtype must be bfloat16 or float16 .* got float32"),
        (torch.bfloat16, r"vLLM cannot start \(Engine core initialization failed\.\)"),
    ):
        engine = VLLMEngine(VLLMConfig(), policy_on("cuda:0", dtype), RolloutConfig())
        with pytest.raises(RolloutError, match=message):
            engine._start()


def test_vllm_starts_again_after_a_batch_that_was_interrupted(monkeypatch):
    """It would return the batch's replies with those of the next one."""
    engine, closed = VLLMEngine(VLLMConfig(), policy_on("cpu"), RolloutConfig()), []

    def late():
        raise TimeLimitError("it has not finished within 1 s")

    monkeypatch.setattr(engine, "_start", late)
    monkeypatch.setattr(engine, "_stop", lambda: closed.append(True))
    with pytest.raises(TimeLimitError):
        engine.sample([])
    assert closed


def policy_on(device, dtype=torch.bfloat16):
    """Returns what `VLLMEngine` reads of a policy when it starts."""
    settings = SimpleNamespace(base_model_name_or_path="base", r=8)
    embeddings = SimpleNamespace(weight=torch.zeros(1, dtype=dtype))
    return SimpleNamespace(
        peft_config={"default": settings},
        get_input_embeddings=lambda: embeddings,
        device=torch.device(device),
    )


def test_gpus_that_are_hidden_or_repeated_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    engine = VLLMEngine(VLLMConfig(devices=[1]), policy_on("cuda:0"), RolloutConfig())
    with pytest.raises(ValueError, match="has the index 1, but CUDA_VISIBLE_DEVICES shows 1 GPU"):
        engine._start()
    for devices in ([], [0, 0]):
        with pytest.raises(ValueError, match="must be distinct indices of GPUs, or null"):
            VLLMConfig(devices=devices)


def test_training_takes_the_policys_own_log_probabilities(make_model, tokenizer, shifted):
    exact = rollouts_of(make_model, tokenizer, TransformersConfig())
    rollouts = rollouts_of(make_model, tokenizer, shifted(shift=0.25))
    assert torch.equal(rollouts.query_responses, exact.query_responses)
    torch.testing.assert_close(rollouts.logprobs, exact.logprobs, rtol=1e-4, atol=1e-5)
    assert rollouts.mismatch is not None
    wanted = torch.where(rollouts.mask, -0.25, 0.0)
    torch.testing.assert_close(rollouts.mismatch, wanted, rtol=1e-4, atol=1e-5)


def test_an_engine_without_log_probabilities_has_no_mismatch(make_model, tokenizer, shifted):
    exact = rollouts_of(make_model, tokenizer, TransformersConfig())
    rollouts = rollouts_of(make_model, tokenizer, shifted(shift=None))
    assert rollouts.mismatch is None
    torch.testing.assert_close(rollouts.logprobs, exact.logprobs, rtol=1e-4, atol=1e-5)


def test_a_large_mismatch_is_an_error(make_model, tokenizer, shifted):
    with pytest.raises(RolloutError, match=r"differ by 0\.75 nats per token.*another base model"):
        rollouts_of(make_model, tokenizer, shifted(shift=0.75))
    rollouts_of(make_model, tokenizer, shifted(shift=0.75, max_mismatch=1.0))
    with pytest.raises(DivergedError, match="are not finite; lower the learning rate"):
        rollouts_of(make_model, tokenizer, shifted(shift=math.nan))


def test_log_probabilities_of_a_copy_cannot_be_asked_for(shifted):
    with pytest.raises(ValueError, match=r"rollout\.logprobs must be forward or null"):
        RolloutConfig(engine=shifted(), logprobs="generation")


def test_importance_weights_are_truncated_ratios(shifted):
    log_ratios = torch.tensor([0.0, math.log(1.5), math.log(5.0), -1.0])
    weights = shifted(importance_cap=2.0).importance_weights(log_ratios)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.5, 2.0, math.exp(-1)]))
    assert shifted(importance_cap=None).importance_weights(log_ratios) is None
    assert TransformersConfig().importance_weights(log_ratios) is None


@pytest.mark.parametrize("ratio", ["cispo", "ppo", "none"])
def test_critic_free_losses_weight_each_token(ratio):
    config = CriticFreeConfig(ratio=ratio)
    old = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])
    new = (old + 0.05).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0]])
    mask = torch.tensor([[True, True], [True, False]])
    weights = torch.tensor([[2.0, 0.5], [0.25, 1.0]])

    def token_gradients(importance):
        terms, _ = reply_losses(new, old, advantages, mask, config, importance)
        total = torch.stack([coefficients @ losses for losses, coefficients in terms]).sum()
        return torch.autograd.grad(total, new)[0]

    torch.testing.assert_close(token_gradients(weights), weights * token_gradients(None))


def test_ppo_losses_weight_each_token():
    old = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])
    new = (old + 0.05).requires_grad_()
    advantages = torch.tensor([[[1.0, -1.0], [0.5, 2.0]]])
    mask = torch.tensor([[True, True], [True, False]])
    weights = torch.tensor([[2.0, 0.5], [0.25, 1.0]])

    def token_gradients(importance):
        losses, _ = policy_losses(new, old, advantages, mask, clip_range=0.2, importance=importance)
        return torch.autograd.grad(losses.sum(), new)[0]

    torch.testing.assert_close(token_gradients(weights), weights * token_gradients(None))


def test_negative_tokens_are_after_the_end(tokenizer):
    responses = torch.tensor([[4, 5, -1, -1], [4, 5, 6, 7]])
    lengths, ended, texts = find_ends(responses, tokenizer=tokenizer, end_ids=[2], stop_strings=[])
    assert lengths.tolist() == [2, 4]
    assert ended.tolist() == [False, False]
    assert texts == ["ab", "abcd"]
