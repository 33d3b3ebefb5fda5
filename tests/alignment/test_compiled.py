"""Sampling by compiled steps: the tokens of the eager path, without recompiling."""

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decode import per_token, steps_as_one_call
from firm.alignment import LoraSettings, PolicyConfig, compiled
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.adapters.folded import FoldedAdapters
from firm.alignment.compiled import (
    BLOCK,
    CompiledDecoder,
    bucket_of_lengths,
    bucket_of_rows,
)
from firm.alignment.policy import add_adapter, without_needless_warnings
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.rollout_engines import SampleRequest, TransformersEngine
from firm.alignment.sequences import has_plain_cache, takes_attention_masks
from firm.alignment.stacked.model import StackedModel
from firm.base.errors import TimeLimitError
from firm.federation import Processes
from firm.jobs.alignment_config import AlignmentConfig, client_names, compiles_rollouts
from firm.jobs.plan import costs, planning
from firm.run import parse
from firm.run.errors import UserError
from tests.alignment.test_decoding import own_samplers
from tests.runs import read_adapter
from tests.smoke import config, run
from tests.tokens import queries
from tests.zoo.architectures import ARCHITECTURES

ENDS = [2, 7]


class Tokenizer:
    pad_token_id = 0


def policy_of(adapter: str, *, num_objectives: int = 1, vocabulary: int = 40) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    settings = PolicyConfig(
        "it",
        adapter=adapter,
        lora=LoraSettings(r=3, alpha=5, dropout=0.0),
        conditioning=ConditioningConfig(kind="preference" if num_objectives > 1 else "none"),
    )
    policy = add_adapter(LlamaForCausalLM(config), settings, num_objectives=num_objectives)
    change_(policy)
    return policy.eval()


def change_(policy: Any) -> None:
    for name, parameter in policy.named_parameters():
        if "lora_" in name and parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape)


def asked(num_objectives: int = 1) -> Any:
    """Nine prompts of three lengths, two of them equal."""
    ids = torch.randint(8, 40, (9, 6))
    ids[2, :3] = ids[7, :1] = 0
    ids[5] = ids[4]
    shares = torch.rand(9, num_objectives)
    shares[5] = shares[4]
    return queries(ids, preferences=shares / shares.sum(1, keepdim=True))


def slot(policy: Any, rows: Any, *, compiles: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens, and the generator's state in the end."""
    torch.manual_seed(1)
    config = RolloutConfig(max_new_tokens=2 * BLOCK + 5, compile=compiles)
    engine = TransformersEngine(policy, Tokenizer())  # type: ignore[arg-type]
    (samples,) = engine.sample([SampleRequest(rows, config, ENDS)])
    return samples.token_ids, torch.get_rng_state()


def stacked(stack: StackedModel, adapters: Any, rows: Any, *, compiles: bool) -> list[torch.Tensor]:
    """Returns tokens of clients with 2, 3 and 4 of the prompts, and their generators' states."""
    config = RolloutConfig(max_new_tokens=2 * BLOCK + 5, compile=compiles)
    generators = [torch.Generator().manual_seed(at) for at in range(3)]
    requests = [
        SampleRequest(rows.rows(own), config, ENDS, adapter=adapter, generator=generator)
        for own, adapter, generator in zip(
            (slice(2), slice(2, 5), slice(5, 9)), adapters, generators, strict=True
        )
    ]
    samples = stack.sample(requests)
    return [*(own.token_ids for own in samples), *(own.get_state() for own in generators)]


def logprobs_of(policy: Any, rows: Any, *, compiles: bool) -> torch.Tensor:
    torch.manual_seed(1)
    config = RolloutConfig(max_new_tokens=BLOCK, compile=compiles)
    engine = TransformersEngine(policy, Tokenizer())  # type: ignore[arg-type]
    (samples,) = engine.sample([SampleRequest(rows, config, [])])
    assert samples.logprobs is not None
    return samples.logprobs


@pytest.mark.parametrize(
    ("adapter", "num_objectives", "vocabulary"),
    [("lora", 1, 40), ("lora_xs", 1, 9000), ("lora", 3, 9000), ("lora_xs", 3, 40)],
)
def test_tokens_and_generators_are_those_of_the_eager_path(adapter, num_objectives, vocabulary):
    policy = policy_of(adapter, num_objectives=num_objectives, vocabulary=vocabulary)
    policy.compiled_decoder = CompiledDecoder(policy, backend=None)
    for _ in range(2):
        rows = asked(num_objectives)
        own, expected = (slot(policy, rows, compiles=each) for each in (True, False))
        assert all(map(torch.equal, own, expected))
        change_(policy)
    scores = [logprobs_of(policy, rows, compiles=each) for each in (True, False)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)
    stack = StackedModel(policy)
    adapters = [stack.new_adapter() for _ in range(3)]
    for _ in range(2):
        rows = asked(num_objectives)
        own, expected = (stacked(stack, adapters, rows, compiles=each) for each in (True, False))
        assert all(map(torch.equal, own, expected))
        for adapter_of in adapters:
            for value in adapter_of.values():
                value.data += 0.1 * torch.randn(value.shape)


def test_each_of_several_adapters_of_a_policy_has_steps_of_its_own():
    policy = policy_of("lora")
    policy.add_adapter("other", policy.peft_config["default"])
    policy.compiled_decoder = CompiledDecoder(policy, backend=None)
    rows = asked()
    for name in ("default", "other"):
        policy.set_adapter(name)
        slot(policy, rows, compiles=True)
    names = {key.adapters for key in policy.compiled_decoder._steps}
    assert names == {("default",), ("other",)}


def test_an_adapter_that_is_not_lora_samples_by_its_own_layers():
    model = policy_of("lora").unload()
    lora = LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "up_proj"])
    with without_needless_warnings():
        policy = get_peft_model(model, lora).eval()
    change_(policy)
    policy.compiled_decoder = decoder = CompiledDecoder(policy, backend=None)
    for _ in range(2):
        rows = asked()
        own, expected = (slot(policy, rows, compiles=each) for each in (True, False))
        assert all(map(torch.equal, own, expected))
        change_(policy)
    assert decoder._steps
    assert not decoder._folded
    with policy.disable_adapter():
        own, expected = (slot(policy, rows, compiles=each) for each in (True, False))
    assert all(map(torch.equal, own, expected))


def test_nothing_is_compiled_again_for_other_clients_rounds_and_preferences():
    policy = policy_of("lora", num_objectives=3)
    policy.compiled_decoder = decoder = CompiledDecoder(policy, backend="eager")
    stack = StackedModel(policy)
    counters.clear()
    ids = torch.randint(8, 30, (2, 6))
    config = RolloutConfig(max_new_tokens=3, compile=True)
    for round in range(4):
        for preference in [*torch.eye(3).tolist(), [0.2, 0.3, 0.5], [1 / 3] * 3]:
            rows = queries(ids + round, preferences=torch.tensor([preference] * 2))
            requests = [
                SampleRequest(
                    rows,
                    config,
                    [],
                    adapter=stack.new_adapter(),
                    generator=torch.Generator().manual_seed(at),
                )
                for at in range(8)
            ]
            stack.sample(requests)
            change_(policy)
    assert len(decoder._steps) == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]


def test_python_starts_few_operations_of_a_compiled_token_and_waits_once_in_a_block():
    for conditioned in (False, True):
        for name, sample in own_samplers(1, conditioned=conditioned, compiles=True).items():
            if "generate" in name:
                continue
            with steps_as_one_call():
                operations, waits = per_token(sample, 8, (BLOCK, 3 * BLOCK))
            assert 2 < operations <= 60, name
            assert 0 < waits <= 0.1, name


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def test_every_architecture_samples_the_same_tokens_by_steps_unless_it_is_refused():
    taken = set()
    rows = queries(torch.tensor([[8, 9, 10, 11], [0, 0, 12, 9], [13, 8, 8, 10], [13, 8, 8, 10]]))
    for name, architecture in ARCHITECTURES.items():
        if architecture.refused:
            continue
        model = architecture.model(SPECIAL).requires_grad_(False)
        if takes_attention_masks(model):
            taken.add(name)
            model.compiled_decoder = CompiledDecoder(model, backend=None)
            own, expected = (slot(model, rows, compiles=each) for each in (True, False))
            assert all(map(torch.equal, own, expected)), name
            assert model.compiled_decoder._steps, name
        elif has_plain_cache(model):
            assert name == "falcon_alibi"  # whose positions come from the mask of tokens
    assert taken >= {"llama", "qwen2", "qwen3", "gemma", "gpt2", "opt", "mixtral", "deepseek_v3"}


def test_models_without_plain_caches_are_named_and_sample_as_before(caplog):
    for name in ("mistral", "bloom", "falcon_h1"):  # windows, positions by masks, other states
        model = ARCHITECTURES[name].model({}).requires_grad_(False)
        rows = queries(torch.randint(8, 12, (3, 5)))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            own, expected = (slot(model, rows, compiles=each) for each in (True, False))
            slot(model, rows, compiles=True)
        assert all(map(torch.equal, own, expected))
        (line,) = (each.message for each in caplog.records if "rollout.compile" in each.message)
        assert type(model).__name__ in line


@pytest.mark.parametrize("engine", ["local", "stacked"])
def test_a_whole_run_ends_with_the_same_adapter(tmp_path, monkeypatch, engine):
    seen = []

    class Decoder(CompiledDecoder):
        def __init__(self, model):
            super().__init__(model, backend=None)
            seen.append(self)

    monkeypatch.setattr(compiled, "CompiledDecoder", Decoder)
    adapters = []
    for value in ("false", "true"):
        options = ("--engine", engine, "--rollout.logprobs", "forward", "--rollout.compile", value)
        run(*options, "--rounds", 1, "--out", tmp_path / value)
        adapters.append(read_adapter(tmp_path / value))
    assert len(seen) == 1
    assert seen[0]._steps
    assert all(map(torch.equal, adapters[0].values(), adapters[1].values()))


def test_a_rollout_without_finite_logits_does_not_reach_the_next_one():
    policy = policy_of("lora")
    policy.compiled_decoder = CompiledDecoder(policy, backend=None)
    rows = asked()
    expected = slot(policy, rows, compiles=True)
    weight = next(own for name, own in policy.named_parameters() if "lora_B" in name)
    kept = weight.detach().clone()
    weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="logits are not finite"):
        slot(policy, rows, compiles=True)
    weight.data.copy_(kept)
    assert all(map(torch.equal, slot(policy, rows, compiles=True), expected))


def test_clients_whose_adapters_do_not_fold_sample_with_their_own(monkeypatch, caplog):
    policy = policy_of("lora")
    policy.compiled_decoder = CompiledDecoder(policy, backend=None)
    stack, rows = StackedModel(policy), asked()
    adapters = [stack.new_adapter() for _ in range(3)]
    change_(policy)  # the slot's adapter is no client's
    monkeypatch.setattr(compiled, "folds", lambda *_: False)  # as with 4-bit weights
    own, expected = (stacked(stack, adapters, rows, compiles=each) for each in (True, False))
    assert all(map(torch.equal, own, expected))
    assert "cannot be combined with each client's adapter" in caplog.text


def test_a_model_that_does_not_compile_is_named_and_samples_as_before(caplog, monkeypatch):
    def broken(graph, examples):
        raise RuntimeError("no such instruction")

    policy = policy_of("lora", vocabulary=9000)
    for name, parameter in policy.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    policy.compiled_decoder = decoder = CompiledDecoder(policy, backend=broken)
    rows, calls, output = asked(), [], FoldedAdapters.output

    def counted(self, *args):
        calls[-1] += 1
        return output(self, *args)

    monkeypatch.setattr(FoldedAdapters, "output", counted)
    results = []
    with caplog.at_level(logging.WARNING):
        for compiles in (True, True, False):
            calls.append(0)
            results.append(slot(policy, rows, compiles=compiles))
    for own in results[:2]:
        assert all(map(torch.equal, own, results[2]))
    assert calls[0] == calls[1] == calls[2] > 0  # adapters cast once for all tokens
    assert not decoder._storage
    (line,) = (each.message for each in caplog.records if "rollout.compile" in each.message)
    assert "no such instruction" in line


def test_a_time_limit_during_a_compilation_is_not_the_compilers_failure():
    """Otherwise the client would go on without a limit, and end the process."""

    def late(graph, examples):
        raise TimeLimitError("it has not finished within 1 s")

    policy = policy_of("lora", vocabulary=9000)
    policy.compiled_decoder = CompiledDecoder(policy, backend=late)
    with pytest.raises(TimeLimitError):
        slot(policy, asked(), compiles=True)


def test_a_smaller_bucket_that_fails_after_it_has_run_leaves_the_larger_one_its_rows():
    class Decoder(CompiledDecoder):
        def _replay(self, step):
            super()._replay(step)
            if step.key.rows < 16 and self.failure is None:
                for layer in step.layers:  # as the pass itself, but seen in any token
                    layer.keys[:, :, 0] = layer.values[:, :, 0] = 50
                raise RuntimeError("no graph of these rows")

    policy, rows = policy_of("lora"), asked()
    policy.compiled_decoder = decoder = Decoder(policy, backend="eager")
    own, expected = (slot(policy, rows, compiles=each) for each in (True, False))
    assert decoder.failure == "no graph of these rows"
    assert all(map(torch.equal, own, expected))


def test_random_numbers_that_a_failed_step_has_broken_are_named(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("Offset increment outside graph capture")

    error = ValueError("operation not permitted when stream is capturing")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "rand", broken)
        patched.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
        compiled._check_random_numbers(torch.device("cpu"), error)  # has no graphs
        with pytest.raises(RuntimeError, match=r"stream is capturing.*rollout\.compile: false"):
            compiled._check_random_numbers(torch.device("cuda"), error)


def test_long_runs_on_cuda_devices_compile_by_default():
    long = config("--rollout.max_new_tokens", 128, "--rounds", 16, "--engine", "local")
    assert compiles_rollouts(long, "cuda")
    assert not compiles_rollouts(long, "cpu")
    for change in ("--rounds", 1), ("--rollout.compile", "false"), ("--rollout.cache", "static"):
        options = ("--rollout.max_new_tokens", 128, "--rounds", 16, "--engine", "local", *change)
        assert not compiles_rollouts(config(*options), "cuda"), change
    assert compiles_rollouts(config("--rollout.compile", "true"), "cpu")
    pairs = parse(
        AlignmentConfig, ["--config", "miniature_pairs", "--rollout.max_new_tokens", "4096"]
    )
    assert not compiles_rollouts(pairs, "cuda")  # which samples no replies


def test_a_plan_counts_the_buffers_of_compiled_rollouts(monkeypatch):
    cfg = config("--rollout.max_new_tokens", 20, "--rollout.max_prompt_tokens", 30)
    for module in (costs, planning):
        monkeypatch.setattr(module, "compiles_rollouts", lambda cfg, device: True)
    monkeypatch.setattr(costs, "evaluated_rows", lambda cfg: 1)
    plan = planning.make_plan(cfg, client_names(cfg), Processes())
    assert plan.memory is not None
    assert plan.memory.engine == plan.memory.cache * 64 // 50  # lengths are rounded up
    assert any("rollout.compile" in note for note in plan.notes)
    monkeypatch.setattr(costs, "evaluated_rows", lambda cfg: 256)
    evaluating = planning.make_plan(cfg, client_names(cfg), Processes())
    assert evaluating.memory is not None
    rows = costs.bucket_of_rows(cfg.estimator.batch_size)
    assert evaluating.memory.engine == pytest.approx(plan.memory.engine * 256 / rows, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        ("--rollout.cache", "static"),
        ("--policy.device_map", "auto"),
        ("--processes_per_client", "2", "--policy.shard", "true"),
        ("--rollout.engine.name", "vllm"),
    ],
)
def test_what_excludes_compiled_rollouts_is_refused(options):
    with pytest.raises(UserError, match=r"rollout\.(compile|cache) must be (false|dynamic) with"):
        config("--rollout.compile", "true", *options)


def test_buckets_hold_what_they_are_for():
    for count in range(1, 600):
        assert count <= bucket_of_rows(count) < max(2, 2 * count)
        assert count <= bucket_of_lengths(count) <= max(64, 1.5 * count)
    assert {bucket_of_lengths(count) for count in range(1, 400)} == {
        64,
        96,
        128,
        192,
        256,
        384,
        512,
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_torchs_own_compiler_gives_the_same_tokens():
    policy = policy_of("lora", num_objectives=3)
    rows = asked(3)
    own, expected = (slot(policy, rows, compiles=each) for each in (True, False))
    assert all(map(torch.equal, own, expected))
    assert policy.compiled_decoder._steps  # a failed compilation leaves none
