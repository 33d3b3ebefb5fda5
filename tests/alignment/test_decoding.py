"""Work of a sampled token: operations that Python starts, values that it waits for."""

from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decode import adapted, new_base, per_token, samplers, update_work
from firm.alignment import LoraSettings, PolicyConfig
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.adapters.folded import FoldedAdapters
from firm.alignment.adapters.forward import cast_once, forward_of
from firm.alignment.policy import add_adapter
from firm.alignment.sequences import set_preferences
from firm.alignment.stacked.model import StackedModel
from firm.alignment.stacked.passes import ClientPart
from tests.tokens import queries

LAYERS = 22
"""Those of TinyLlama."""


def own_samplers(
    num_layers: int, *, device: str = "cpu", conditioned: bool, compiles: bool = False
):
    options = Namespace(model="", shape="narrow", layers=num_layers, dtype="bfloat16")
    policy = adapted(new_base(options, torch.device(device)), conditioned=conditioned)
    return samplers(policy, policy.get_base_model(), prompt_tokens=8, clients=4, compiles=compiles)


@pytest.mark.parametrize(("conditioned", "most"), [(False, 1250), (True, 1400)])
def test_a_token_waits_once_and_casts_no_adapter(conditioned, most):
    few, more = (own_samplers(count, conditioned=conditioned) for count in (1, 2))
    names = [name for name in few if "generate" not in name]
    assert len(names) == 2
    for name in names:
        (first, waits), (second, _) = (per_token(each[name], 8) for each in (few, more))
        assert waits == 1, name
        assert second + (LAYERS - 2) * (second - first) <= most, name


@pytest.mark.parametrize("prompts_once", [False, True])
def test_passes_of_stacked_clients_start_hardly_more_operations_than_those_of_one(prompts_once):
    options = Namespace(model="", shape="narrow", layers=8, dtype="bfloat16")
    policy = adapted(new_base(options, torch.device("cpu")), conditioned=False)
    alone, many = (
        update_work(policy, clients=clients, rows=4, prompts_once=prompts_once)
        for clients in (1, 3)
    )
    for name, own in alone.items():  # heads and losses are each client's own
        assert 100 < own.dispatches < many[name].dispatches < 1.25 * own.dispatches, name


def policy_of(dtype: str, adapter: str, *, num_objectives: int = 1):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    settings = PolicyConfig(
        "it",
        adapter=adapter,
        lora=LoraSettings(r=3, alpha=5, dropout=0.0),
        dtype=dtype,  # type: ignore[arg-type]
        conditioning=ConditioningConfig(kind="preference" if num_objectives > 1 else "none"),
    )
    policy = add_adapter(model, settings, num_objectives=num_objectives).eval()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    return policy


@torch.no_grad()
@pytest.mark.parametrize(
    ("adapter", "num_objectives", "counts"),
    [("lora", 1, (1, 5)), ("lora_xs", 1, (3, 3)), ("lora", 3, (3, 3)), ("lora_xs", 3, (1, 5))],
)
def test_converted_adapters_compute_what_their_kinds_do(adapter, num_objectives, counts):
    policy = policy_of("float32", adapter, num_objectives=num_objectives)
    asked = queries(torch.randint(1, 40, (6, 5)))
    shares = torch.rand(6, num_objectives)
    preferences = shares / shares.sum(1, keepdim=True) if num_objectives > 1 else None
    own = policy(asked.token_ids).logits
    kind = forward_of(policy).kind
    with forward_of(policy).using(policy, FoldedAdapters(policy, kind, [None])):
        torch.testing.assert_close(policy(asked.token_ids).logits, own)
        set_preferences(policy, preferences)
        found = policy(asked.token_ids).logits
    if preferences is not None:
        assert (found - own).abs().max() > 0.01
    torch.testing.assert_close(found, policy(asked.token_ids).logits)
    set_preferences(policy, None)
    stack = StackedModel(policy)
    adapters = [stack.new_adapter() for _ in counts]
    for parameter in adapters[1].values():
        parameter.data.neg_()
    parts = [
        ClientPart(queries(ids, preferences=own_shares), adapter)
        for ids, own_shares, adapter in zip(
            asked.token_ids.split(list(counts)),
            [None, None] if preferences is None else preferences.split(list(counts)),
            adapters,
            strict=True,
        )
    ]
    joint = stack._pass(parts)
    results = []
    folded = FoldedAdapters(policy, kind, [None, None])
    folded.write_(adapters)
    for context in (nullcontext(), stack._forward.using(policy, folded)):
        with context, stack._forward.of(joint):
            results.append(policy(asked.token_ids).logits)
    torch.testing.assert_close(*results)


@torch.no_grad()
def test_an_adapter_in_bfloat16_adds_no_more_error_than_the_model_has():
    exact, rounded = policy_of("float32", "lora"), policy_of("bfloat16", "lora")
    ids = torch.randint(1, 40, (64, 12), generator=torch.Generator().manual_seed(0))
    expected = exact(ids).logits.log_softmax(-1)
    errors = []
    for context in (nullcontext(), cast_once(rounded)):
        with context:
            own = rounded(ids).logits.float().log_softmax(-1)
        errors.append((own - expected).square().mean().sqrt())
    assert errors[0] != errors[1]  # the adapter was cast
    assert errors[1] < 2 * errors[0] < 0.002  # nats
    for name, parameter in rounded.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)


def test_adapters_of_any_name_are_sampled_as_they_are():
    policy = policy_of("bfloat16", "lora")
    settings = policy.peft_config["default"]
    policy.add_adapter("other", settings)
    policy.set_adapter("other")
    policy.delete_adapter("default")  # as `firm evaluate` names those that it compares
    with cast_once(policy), torch.no_grad():
        assert policy(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
