"""Stacked clients: those of one pass are as those that run one after the other."""

from functools import partial
from typing import get_type_hints
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconH1Config, JambaConfig, MambaConfig

from firm.alignment import (
    AlignmentClient,
    Judges,
    LoraSettings,
    PolicyConfig,
    copy_adapter,
    decoding,
    load_policy,
)
from firm.alignment import head as heads
from firm.alignment.adapters.lora import Lora, adapted_modules
from firm.alignment.policy import add_adapter
from firm.alignment.prompts import prompt_of
from firm.alignment.sequences import Queries, Sequences
from firm.alignment.stacked.model import StackedModel
from firm.alignment.stacked.passes import ClientPart
from firm.alignment.stacked.trainer import stacked_trainers
from firm.federation import LocalEngine, RandomStream, ServerState
from firm.federation.engines.stacked import StackedEngine
from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from tests.cabs import PROMPTS

PROMPTS = [*PROMPTS, *(prompt_of(f"\n\nHuman: {letter}\n\nAssistant:") for letter in "abcdefghij")]
WITHOUT_LOSSES = {
    name: get_type_hints(strategy)["cfg"]
    for name, strategy in STRATEGIES.items()
    if not get_type_hints(strategy)["cfg"].reads_losses
}


@pytest.fixture
def federation(make_trainer, letter_count):
    """State, engine and names of clients, each with prompts of its own."""

    def make(engine, *, max_rows=None, judges=(), dropout=0.1, new_policy=None, **options):
        rewards = {letter: letter_count(letter) for letter in "ab"}
        if new_policy:
            options["policy"] = new_policy()
        trainer = make_trainer(rewards=rewards, dropout=dropout, **options)
        new_trainer = stacked_trainers(trainer) if engine == "stacked" else lambda: trainer
        names = ["client_0", "client_1", "client_2"]
        own = dict(judges)
        clients = [
            AlignmentClient(name, PROMPTS[at:], new_trainer(), seed=3, judges=own.get(name))
            for at, name in enumerate(names)
        ]
        start = copy_adapter(trainer.adapter_parameters)
        state = ServerState(start, objectives=("a", "b"), seed=3)
        if engine == "local":
            return state, LocalEngine(clients), names
        return state, StackedEngine(clients, max_rows=max_rows or 1000), names

    return make


@pytest.fixture
def both(federation):
    """State and metrics after some rounds, by engine."""

    def run(strategy, cfg, *, rounds=2, max_rows=None, **options):
        results = {}
        for engine in ("local", "stacked"):
            limit = max_rows if engine == "stacked" else None
            state, runs, names = federation(engine, max_rows=limit, **options)
            start, rows = state.adapter, []
            for _ in range(rounds):
                state, row = strategy(state, names, runs, cfg)
                rows.append(row)
            assert largest_difference(start, state.adapter) > 1e-4
            results[engine] = state, rows, runs
        return results

    return run


def largest_difference(first, second) -> float:
    return max((first[name] - second[name]).abs().max().item() for name in first)


def _names(row) -> list[str]:
    """Those that took part."""
    return [own["client"] for own in row["clients"]]


def assert_same(results, tolerance=1e-5):
    (state, rows, _), (other, others, _) = results.values()
    for row, theirs in zip(rows, others, strict=True):
        assert _names(row) == _names(theirs)
        for mine, yours in zip(row["clients"], theirs["clients"], strict=True):
            assert mine.get("scores") == yours.get("scores")  # the same tokens
    assert largest_difference(state.adapter, other.adapter) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "ppo"},
        {"estimator": "ppo", "critic": "network", "micro_batch_size": 3},
        {"estimator": "critic_free"},
        {"estimator": "critic_free", "ratio": "ppo", "micro_batch_size": 3},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_two_rounds_of_adam_end_as_with_clients_in_turn(both, options):
    max_rows = 10 if "micro_batch_size" in options else None
    results = both(firm_round, FirmConfig(num_local_steps=2), max_rows=max_rows, **options)
    first = [rows[0]["clients"][0]["weights"][0] for _, rows, _ in results.values()]
    assert first[0] == pytest.approx(first[1], abs=1e-6)
    assert_same(results)


@pytest.mark.slow
def test_large_vocabularies_end_as_with_clients_in_turn(both, monkeypatch):
    """Their tokens take one random number per row, and equal prompts one row of a pass."""
    monkeypatch.setattr(decoding, "LARGE_VOCABULARY", 0)
    monkeypatch.setattr(heads, "LARGE_VOCABULARY", 0)
    monkeypatch.setattr(heads, "_formulas", WeakKeyDictionary())
    results = both(firm_round, FirmConfig(num_local_steps=2), estimator="critic_free")
    assert_same(results)


@pytest.mark.parametrize("name", WITHOUT_LOSSES)
@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_every_strategy_ends_as_with_clients_in_turn(both, name, estimator):
    cfg = WITHOUT_LOSSES[name]
    options = {"num_local_steps": 1} if "num_local_steps" in cfg.__dataclass_fields__ else {}
    assert_same(both(STRATEGIES[name], cfg(**options), rounds=1, estimator=estimator))


def test_weights_per_batch_and_clients_with_fewer_objectives_end_as_in_turn(both, letter_count):
    judges = {"client_1": Judges({"b": letter_count("b")})}
    assert_same(both(firm_round, FirmConfig(solve_per="batch"), rounds=1, judges=judges))


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_an_adapted_head_ends_as_with_clients_in_turn(both, make_policy, estimator):
    new_policy = partial(make_policy, dropout=0.1, target_modules=["q_proj", "lm_head"])
    options = {"new_policy": new_policy, "estimator": estimator}
    assert_same(both(firm_round, FirmConfig(num_local_steps=2), **options))


HYBRIDS = {
    "parallel": FalconH1Config(
        vocab_size=15, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, mamba_d_ssm=16, mamba_n_heads=2,
        mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=8, initializer_range=0.3,
    ),
    "alternating": JambaConfig(
        vocab_size=15, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=9, expert_layer_offset=8, num_experts=1, num_experts_per_tok=1,
        mamba_d_state=4, mamba_dt_rank=2, initializer_range=0.3, use_mamba_kernels=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fast path.*")
@pytest.mark.parametrize("name", HYBRIDS)
def test_models_with_states_of_linear_attention_end_as_with_clients_in_turn(both, name):
    def new_policy():
        torch.manual_seed(0)
        lora = LoraSettings(r=2, dropout=0.0)
        base = AutoModelForCausalLM.from_config(HYBRIDS[name])
        return add_adapter(base, PolicyConfig("it", lora=lora))

    assert_same(both(firm_round, FirmConfig(num_local_steps=2), new_policy=new_policy))


def test_states_after_a_round_are_those_of_clients_in_turn(both):
    results = both(firm_round, FirmConfig(), rounds=1)
    accepted = dict.fromkeys(("client_0", "client_1", "client_2"), 1)
    local, stacked = (runs.client_states(accepted) for _, _, runs in results.values())
    for name in accepted:
        mine, theirs = local[name]["state"], stacked[name]["state"]
        for stream in ("prompts", "rollout", "update"):
            assert str(mine[stream]) == str(theirs[stream])
        moments = [s["learner"]["actor_optimizer"]["state"] for s in (mine, theirs)]
        for index, own in moments[0].items():
            torch.testing.assert_close(own["exp_avg"], moments[1][index]["exp_avg"])


def test_who_else_is_in_the_batch_changes_no_token(federation):
    scores = []
    for asked in (["client_1"], ["client_0", "client_1", "client_2"]):
        state, engine, _ = federation("stacked")
        _, row = firm_round(state, asked, engine, FirmConfig())
        scores += [own["scores"] for own in row["clients"] if own["client"] == "client_1"]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_a_client_whose_reward_is_not_a_number_fails_alone(both, letter_count, estimator):
    def broken(prompts, completions, **_):
        return [float("nan")] * len(completions)

    judges = {"client_1": Judges({"a": letter_count("a"), "b": broken})}
    results = both(firm_round, FirmConfig(), rounds=1, judges=judges, estimator=estimator)
    assert_same(results)
    assert _names(results["stacked"][1][0]) == ["client_0", "client_2"]


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
@pytest.mark.parametrize("advantage", [float("inf"), 3e38])
def test_gradients_that_are_not_finite_are_their_client_s_alone(
    federation, monkeypatch, estimator, advantage
):
    errors, states = {}, {}
    for engine in ("local", "stacked"):
        state, runs, names = federation(engine, estimator=estimator)
        client = runs._clients["client_1"]
        draw = client.batches

        def spoilt(num_steps, draw=draw):
            for batch in draw(num_steps):
                batch.experience.advantages[0] = advantage
                yield batch

        monkeypatch.setattr(client, "batches", spoilt)
        states[engine], row = firm_round(state, names, runs, FirmConfig())
        assert _names(row) == ["client_0", "client_2"]
        errors[engine] = [failure["reason"] for failure in row["round"]["failures"]]
    assert errors["stacked"] == errors["local"]
    assert "finite" in errors["local"][0]  # the gradient, or the loss that overflows
    assert largest_difference(*(state.adapter for state in states.values())) < 1e-5


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_an_adapter_that_is_not_finite_is_its_client_s_alone(federation, monkeypatch, estimator):
    states = {}
    for engine in ("local", "stacked"):
        state, runs, names = federation(engine, estimator=estimator)
        client = runs._clients["client_1"]

        def spoilt(adapter, round, load=client.load):
            load({name: torch.full_like(own, torch.nan) for name, own in adapter.items()}, round)

        monkeypatch.setattr(client, "load", spoilt)
        states[engine], row = firm_round(state, names, runs, FirmConfig())
        assert _names(row) == ["client_0", "client_2"]
        (failure,) = row["round"]["failures"]
        assert "lower the learning rate" in failure["reason"]
        if engine == "stacked":  # before a server samples for all clients of the batch
            assert failure["reason"].startswith("DivergedError")
    assert largest_difference(*(state.adapter for state in states.values())) < 1e-5


def test_a_reward_model_that_all_ask_gets_all_replies_at_once_and_each_its_own_share(federation):
    class Long:
        calls = 0

        def __call__(self, prompts, completions, **_):
            self.calls += 1
            self.truncated = [len(completion) > 8 for completion in completions]
            return [float(len(completion)) for completion in completions]

    rewards, results = Long(), {}
    own = {f"client_{at}": Judges({"a": rewards, "b": rewards}) for at in range(3)}
    for engine in ("local", "stacked"):
        state, runs, names = federation(engine, judges=own)
        _, row = firm_round(state, names, runs, FirmConfig())
        results[engine] = [each["truncated_share"] for each in row["clients"]], rewards.calls
        rewards.calls = 0
    assert results["local"][0] == results["stacked"][0]
    assert len({share["a"] for share in results["local"][0]}) > 1  # clients differ
    assert (results["local"][1], results["stacked"][1]) == (3, 1)


def test_no_pass_has_more_rows_than_allowed(federation):
    state, engine, names = federation("stacked", max_rows=20)
    sizes = []
    policy = engine._clients["client_0"]._trainer.policy_model

    def note(module, args, kwargs):
        sizes.append(len(kwargs["input_ids"]))

    policy.register_forward_pre_hook(note, with_kwargs=True)
    firm_round(state, names, engine, FirmConfig())
    assert max(sizes) == 16  # two batches of 16 do not fit
    assert sizes.count(16) > sizes.count(8) / 2 > 0  # two minibatches of 8 do


def test_the_policy_s_own_adapter_stays_as_it_was(federation):
    state, engine, names = federation("stacked")
    policy = engine._clients["client_0"]._trainer.policy_model
    token_ids = torch.tensor([[4, 5, 6, 7]])
    policy.eval()
    before = policy(input_ids=token_ids).logits.detach().clone()
    firm_round(state, names, engine, FirmConfig())
    policy.eval()
    assert torch.equal(policy(input_ids=token_ids).logits, before)


def test_what_cannot_be_stacked_is_refused(make_trainer, checkpoint, letter_count):
    config = PolicyConfig(str(checkpoint), gradient_checkpointing=True)
    policy = load_policy(config, stream=RandomStream(0, "adapter"))
    trainer = make_trainer(rewards={"a": letter_count("a")}, policy=policy)
    with pytest.raises(ValueError, match="gradient checkpointing together with dropout"):
        stacked_trainers(trainer)
    mamba = MambaConfig(vocab_size=15, hidden_size=16, num_hidden_layers=1, state_size=4)
    config = PolicyConfig("it", lora=LoraSettings(dropout=0.0, target_modules=None, r=2))
    policy = add_adapter(AutoModelForCausalLM.from_config(mamba), config)
    trainer = make_trainer(rewards={"a": letter_count("a")}, policy=policy)
    with pytest.raises(
        ValueError, match=r"^engine must be local with a MambaForCausalLM, which has no key"
    ):
        stacked_trainers(trainer)
    with pytest.raises(ValueError, match="timeout must be None, got 3"):
        StackedEngine([], timeout=3.0)


def test_layers_with_the_same_input_share_it_in_the_adapters_dtype(make_policy, monkeypatch):
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    policy = make_policy(dtype=torch.bfloat16, fresh=True, target_modules=modules)
    stack, seen = StackedModel(policy), {}
    names = {layer: name for name, layer in adapted_modules(policy).items()}
    output = Lora.output

    def noted(kind, layer, rows, x, result):
        seen[names[layer]] = x
        return output(kind, layer, rows, x, result)

    monkeypatch.setattr(Lora, "output", noted)
    ids = torch.arange(1, 9)[None]
    queries = Queries([prompt_of("a")], ids[:, :5], torch.tensor([5]))
    rows = Sequences(queries, ids, torch.tensor([3]))
    stack.forward([ClientPart(rows, stack.new_adapter(), has_gradient=True)])
    inputs = {
        name: [x for own, x in seen.items() if own.endswith(f"layers.0.self_attn.{name}")]
        for name in modules
    }
    (first,), (second,), (third,), (other,) = inputs.values()
    assert first is second is third
    assert other is not first
    assert {x.dtype for x in seen.values()} == {torch.float32}
    assert policy.adapter_forward._latest is None  # a graph would stay in memory with it
