"""The engine `vllm` on a real model, in an environment with vLLM: `make test-vllm`.

The model is SmolLM2-135M-Instruct as fetched by `firm fetch smollm2`, or that of FIRM_MODEL.
"""

import shutil
from dataclasses import replace
from glob import glob

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from firm.alignment import rollout_config
from firm.alignment.policy import (
    adapter_parameters,
    copy_adapter,
    load_adapter_,
    load_tokenizer,
)
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import Prompt
from firm.alignment.rollout import encode_prompts
from firm.alignment.rollout_config import RolloutConfig, VLLMConfig
from firm.alignment.rollout_engines import SampleRequest, TransformersEngine
from firm.alignment.rollout_engines.vllm import SHARED_MEMORY
from firm.alignment.sequences import Sequences, response_logprobs, set_preferences
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.run.command_line import parse
from tests.runs import read_rows

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own, and of what it imports

TEXTS = (
    "How do I cook rice?",
    "Why is the sky blue?",
    "Name three rivers in Europe, and say where they end.",
    "Write a short poem about rain.",
)
NUM_LAYERS = 4
ROLLOUT = RolloutConfig(
    max_new_tokens=16,
    max_prompt_tokens=96,
    temperature=0.7,
    engine=VLLMConfig(max_loras=3, cache_gb=0.5),
)


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(PolicyConfig(path))


@pytest.fixture(scope="module")
def engine(policy, tokenizer):
    engine = ROLLOUT.engine.engine(policy, tokenizer, ROLLOUT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def queries(tokenizer):
    prompts = [Prompt(text) for text in TEXTS]
    return encode_prompts(
        prompts, tokenizer, prompt_format=PolicyConfig("").prompt, max_prompt_tokens=96
    )


@pytest.fixture(scope="module")
def shallow(path, tmp_path_factory) -> str:
    """A copy of the model with its first layers alone, for runs."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    folder = tmp_path_factory.mktemp("shallow")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return str(folder)


def changed(policy, seed: int, *, size: float = 0.02):
    """Returns the policy's adapter with random matrices B."""
    generator = torch.Generator().manual_seed(seed)
    adapter = copy_adapter(adapter_parameters(policy))
    for name, values in adapter.items():
        if "lora_B" in name:
            values.copy_(size * torch.randn(values.shape, generator=generator))
    return adapter


def request(queries, adapter=None, *, seed: int = 0, **changes) -> SampleRequest:
    generator = torch.Generator().manual_seed(seed)
    config = replace(ROLLOUT, **changes)
    return SampleRequest(queries, config, [2], adapter=adapter, generator=generator)


def mismatch(policy, queries, samples, adapter) -> float:
    """Returns the largest difference of log-probabilities from the policy's forward pass."""
    ends = samples.token_ids[:, queries.token_ids.size(1) :]
    sequences = Sequences(queries, samples.token_ids.clamp(min=0), (ends >= 0).sum(1))
    fresh = copy_adapter(adapter_parameters(policy))
    load_adapter_(adapter_parameters(policy), adapter)
    set_preferences(policy, queries.preferences)
    with torch.no_grad():
        own = response_logprobs(policy, sequences, ROLLOUT.temperature)
    load_adapter_(adapter_parameters(policy), fresh)
    set_preferences(policy, None)
    return (own - samples.logprobs)[sequences.mask].abs().max().item()


def test_greedy_tokens_are_those_of_transformers(policy, tokenizer, engine, queries):
    adapter = changed(policy, 1)
    (samples,) = engine.sample([request(queries, adapter, temperature=1e-6)])
    load_adapter_(adapter_parameters(policy), adapter)
    asked = replace(request(queries, temperature=1e-6), generator=None)
    (own,) = TransformersEngine(policy, tokenizer).sample([asked])
    load_adapter_(adapter_parameters(policy), changed(policy, 0, size=0.0))
    at = queries.token_ids.size(1)
    theirs, ours = samples.token_ids[:, at:], own.token_ids[:, at:]
    real = theirs >= 0
    equal = (theirs == ours) & real
    print(f"{int(equal.sum())} of {int(real.sum())} greedy tokens are equal")  # noqa: T201
    # a flip by rounding changes all later tokens of its row
    first = real.sum(1) - equal.int().cumprod(1).sum(1)
    assert (first == 0).sum() >= 3


def test_adapters_of_a_batch_each_have_their_own_effect(policy, engine, queries):
    adapters = [changed(policy, 1), changed(policy, 2)]
    both = engine.sample([request(queries, a, seed=at) for at, a in enumerate(adapters)])
    for samples, own, other in zip(both, adapters, adapters[::-1], strict=True):
        assert mismatch(policy, queries, samples, own) < 2e-3
        assert mismatch(policy, queries, samples, other) > 0.1
    assert not set(both[0].versions) & set(both[1].versions)


def test_rows_are_sampled_at_their_own_preferences(policy, engine, queries):
    adapter = changed(policy, 3)
    shares = torch.tensor([[1.0, 0.0], [0.25, 0.75], [1.0, 0.0], [0.0, 1.0]])
    asked = replace(queries, preferences=shares)
    (samples,) = engine.sample([request(asked, adapter)])
    assert samples.versions[0] == samples.versions[2]
    assert len(set(samples.versions)) == 3
    assert mismatch(policy, asked, samples, adapter) < 2e-3
    turned = replace(queries, preferences=shares.flip(1))
    assert mismatch(policy, turned, samples, adapter) > 0.1


def test_an_updated_adapter_is_used_and_old_versions_leave(policy, engine, queries):
    versions = set()
    for seed in range(10, 14):
        adapter = changed(policy, seed)
        (samples,) = engine.sample([request(queries, adapter)])
        assert mismatch(policy, queries, samples, adapter) < 2e-3
        versions |= set(samples.versions)
    assert len(versions) == 4
    assert len(engine._llm.llm_engine.list_loras()) <= 3
    assert len(list(engine._folder.iterdir())) <= 3


def test_more_adapters_than_vllm_holds_take_several_batches(policy, engine, queries):
    adapters = [changed(policy, seed) for seed in range(20, 24)]
    found = engine.sample([request(queries, adapter) for adapter in adapters])
    for samples, adapter in zip(found, adapters, strict=True):
        assert mismatch(policy, queries, samples, adapter) < 2e-3


def test_equal_generators_give_equal_samples(policy, engine, queries):
    adapter = changed(policy, 1)
    first, again, other = (
        engine.sample([request(queries, adapter, seed=seed)])[0].token_ids for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_an_adapter_that_vllm_has_lost_is_an_error(policy, engine, queries):
    adapter = changed(policy, 1)
    (samples,) = engine.sample([request(queries, adapter)])
    version = samples.versions[0]
    engine._llm.llm_engine.remove_lora(engine._ids[version])
    with pytest.raises(RuntimeError, match="no longer has the adapters"):
        engine.sample([request(queries, adapter)])
    del engine._ids[version]  # it is loaded again under another id
    shutil.rmtree(engine._folder / version)
    (again,) = engine.sample([request(queries, adapter)])
    assert torch.equal(again.token_ids, samples.token_ids)


@pytest.mark.parametrize("kind", ["local", "stacked"])
def test_a_run_finishes_with_a_small_mismatch(shallow, engine, tmp_path, kind):
    engine.close()  # each copy takes gigabytes
    options = {
        "policy.path": shallow,
        "policy.device": "cpu",
        "engine": kind,
        "rounds": 2,
        "num_clients": 2,
        "rewards.brevity": "{name: brevity, normalization: none}",
        "rewards.plain": "{name: reading_ease, normalization: none}",
        "data.train.source": "firm/questions/train.jsonl",
        "data.test.source": "firm/questions/test.jsonl",
        "rollout.max_new_tokens": 12,
        "rollout.max_prompt_tokens": 96,
        "rollout.engine.name": "vllm",
        "rollout.engine.cache_gb": 0.5,
        "estimator.name": "critic_free",
        "estimator.batch_size": 8,
        "estimator.minibatch_size": 8,
        "estimator.num_epochs": 1,
        "strategy.num_local_steps": 1,
        "evaluation.num_calibration_prompts": 4,
        "evaluation.num_validation_prompts": 0,
        "evaluation.num_test_prompts": 4,
        "out": tmp_path / "run",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    align(parse(AlignmentConfig, words))
    assert not glob(f"{SHARED_MEMORY}/firm-vllm-*")
    rows = read_rows(tmp_path / "run", "client")
    print([row["logprob_mismatch"] for row in rows])  # noqa: T201
    assert len(rows) == 4
    assert all(0 < row["logprob_mismatch"] < 1e-3 for row in rows)


def test_without_vllm_the_message_has_the_command(monkeypatch):
    monkeypatch.setattr(rollout_config, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="vllm, which is not installed: pip install"):
        VLLMConfig().engine(None, None, RolloutConfig())
