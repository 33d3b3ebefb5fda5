"""LoRA-XS: what a layer adds, what is trained of it, and the ordinary adapter that is saved."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from firm.alignment import (
    AlignmentClient,
    LoraSettings,
    PolicyConfig,
    copy_adapter,
    fill_adapter_,
    load_adapters,
    load_policy,
)
from firm.alignment.adapter_files import save_adapter, save_folded
from firm.alignment.adapters import lora_xs as module
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.policy import adapter_parameters, load_adapter_, without_needless_warnings
from firm.alignment.sequences import forward, response_logprobs, set_preferences
from firm.alignment.stacked.trainer import stacked_trainers
from firm.federation import LocalEngine, RandomStream, ServerState
from firm.federation.engines.stacked import StackedEngine
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from tests.cabs import PROMPTS, TOKENS

LORA = LoraSettings(r=3, alpha=6.0, dropout=0.0, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def make_small(checkpoint):
    """A policy of LoRA-XS whose matrices R are drawn, or zero as at the start of a training."""

    def make(*, fresh=False, num_objectives=1, kind="none", **options):
        config = PolicyConfig(
            str(checkpoint),
            adapter="lora_xs",
            lora=replace(LORA, **options),
            conditioning=ConditioningConfig(kind=kind),
        )
        policy = load_policy(
            config, stream=RandomStream(0, "adapter"), num_objectives=num_objectives
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in adapter_parameters(policy).values() if not fresh else ():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        return policy.eval()

    return make


def _logits(model):
    with torch.no_grad():
        return forward(model, TOKENS, TOKENS != 0).logits


def _layers(policy):
    return {name: m for name, m in policy.named_modules() if hasattr(m, "xs_left")}


def test_r_squared_numbers_per_layer_are_trained_and_a_fresh_one_changes_nothing(make_small):
    policy = make_small(fresh=True)
    shapes = {name: tuple(p.shape) for name, p in adapter_parameters(policy).items()}
    assert len(shapes) == len(_layers(policy)) > 0
    assert set(shapes.values()) == {(3, 3)}
    with policy.disable_adapter():
        base = _logits(policy)
    assert torch.equal(_logits(policy), base)
    assert set(shapes) == set(adapter_parameters(policy))  # switching it back on thaws nothing


def test_a_layer_s_fixed_matrices_are_the_best_approximation_of_its_weight(make_small):
    for layer in _layers(make_small()).values():
        weight = layer.base_layer.weight.double()
        u, sizes, vh = torch.linalg.svd(weight)
        best = u[:, :3] * sizes[:3] @ vh[:3]
        own = layer.xs_left.double() @ layer.lora_A["default"].weight.double()
        torch.testing.assert_close(own, best, rtol=1e-4, atol=1e-5)
        largest = layer.xs_left.gather(0, layer.xs_left.abs().argmax(0, keepdim=True))
        assert (largest > 0).all()


def test_what_is_saved_is_an_ordinary_adapter_and_comes_back(make_small, checkpoint, tmp_path):
    policy = make_small()
    save_adapter(policy, tmp_path / "small")
    expected = _logits(policy)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    with without_needless_warnings():
        by_peft = PeftModel.from_pretrained(plain, str(tmp_path / "small")).eval()
    torch.testing.assert_close(_logits(by_peft), expected, rtol=1e-4, atol=1e-4)
    with policy.disable_adapter():
        assert (_logits(policy) - expected).abs().max() > 0.1
    config = PolicyConfig(str(checkpoint), lora=LORA)
    ours = load_adapters(config, [tmp_path / "small"])
    torch.testing.assert_close(_logits(ours), expected, rtol=1e-4, atol=1e-4)

    other = make_small(fresh=True)
    fill_adapter_(other, tmp_path / "small", str(checkpoint))
    trained = adapter_parameters(policy)
    for name, values in adapter_parameters(other).items():
        torch.testing.assert_close(values, trained[name], rtol=1e-4, atol=1e-4)


def test_an_adapter_of_other_vectors_is_refused(make_small, make_policy, checkpoint, tmp_path):
    policy = make_small()
    ordinary = load_policy(
        PolicyConfig(str(checkpoint), lora=LORA), stream=RandomStream(0, "adapter")
    )
    for parameter in adapter_parameters(ordinary).values():
        parameter.data = torch.randn_like(parameter)
    save_adapter(ordinary, tmp_path / "ordinary")
    before = copy_adapter(adapter_parameters(policy))
    with pytest.raises(ValueError, match="is not made of the layer's singular vectors"):
        fill_adapter_(policy, tmp_path / "ordinary", str(checkpoint))
    save_adapter(make_small(r=2), tmp_path / "smaller")
    with pytest.raises(ValueError, match="has shape"):
        fill_adapter_(policy, tmp_path / "smaller", str(checkpoint))
    for name, values in adapter_parameters(policy).items():
        assert torch.equal(values, before[name])


def test_a_rank_above_a_layer_s_smaller_side_is_refused(make_small):
    with pytest.raises(
        ValueError, match=r"policy\.lora\.r must be at most 8 .*, the smaller side of v_proj"
    ):
        make_small(r=9)


def test_a_conditioned_one_folds_into_ordinary_adapters(make_small, checkpoint, tmp_path):
    policy = make_small(kind="preference", num_objectives=3)
    assert {tuple(p.shape) for p in adapter_parameters(policy).values()} == {(3, 3)}
    preferences = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.4, 0.6]])
    set_preferences(policy, preferences)
    expected = _logits(policy)
    save_adapter(policy, tmp_path / "all")
    for row, preference in enumerate(preferences.tolist()):
        save_folded(policy, tmp_path / str(row), preference)
        for folder, chosen in ((tmp_path / str(row), None), (tmp_path / "all", preference)):
            config = PolicyConfig(str(checkpoint), lora=LORA)
            alone = load_adapters(config, [folder], preference=chosen)
            logits = _logits(alone)[row]
            torch.testing.assert_close(logits, expected[row], rtol=1e-3, atol=1e-3)


@pytest.fixture
def make_client(make_trainer, make_small, letter_count):
    def make(policy=None, **options):
        trainer = make_trainer(
            rewards={letter: letter_count(letter) for letter in "ab"},
            policy=policy or make_small(dropout=0.1),
            **options,
        )
        return AlignmentClient("client_0", PROMPTS, trainer, seed=3), trainer

    return make


def test_the_gradient_is_that_of_autograd(make_client, make_small):
    policy = make_small()
    client, trainer = make_client(policy, estimator="critic_free", ratio="none")
    client.load(copy_adapter(trainer.adapter_parameters))
    (batch,) = client.batches(1)
    rows = batch.whole
    gradients = client.gradients(rows)
    logprobs = response_logprobs(policy, rows.rollouts, 0.8)
    mask = rows.rollouts.mask
    per_reply = (logprobs * mask).sum(1) / mask.sum()
    for row, advantages in zip(gradients.jacobian, rows.advantages, strict=True):
        parameters = list(trainer.adapter_parameters.values())
        loss = -(advantages * per_reply).sum()
        own = torch.autograd.grad(loss, parameters, retain_graph=True)
        flat = torch.cat([part.flatten() for part in own])
        torch.testing.assert_close(row, flat, rtol=1e-3, atol=1e-5)
        assert flat.abs().max() > 1e-3


@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_stacked_clients_end_as_in_turn(make_client, estimator):
    ends = []
    for engine in ("local", "stacked"):
        _, trainer = make_client(estimator=estimator, micro_batch_size=3)
        new_trainer = stacked_trainers(trainer) if engine == "stacked" else lambda own=trainer: own
        names = ["client_0", "client_1", "client_2"]
        clients = [
            AlignmentClient(name, PROMPTS[at:], new_trainer(), seed=3)
            for at, name in enumerate(names)
        ]
        runs = {"local": LocalEngine, "stacked": StackedEngine}[engine](clients)
        start = copy_adapter(trainer.adapter_parameters)
        state = ServerState(start, objectives=("a", "b"), seed=3)
        for _ in range(2):
            state, _ = firm_round(state, names, runs, FirmConfig())
        ends.append(state.adapter)
        assert all((state.adapter[name] - start[name]).abs().max() > 1e-4 for name in start)
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=0, atol=1e-5)


def test_vectors_of_large_matrices_are_found_once_for_each_base_model(
    make_small, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "CACHED_SIZE", 1)
    found, own = [], module._vectors

    def noted(*arguments):
        found.append(own(*arguments))
        return found[-1]

    monkeypatch.setattr(module, "_vectors", noted)
    first = make_small()
    assert len(found) == len(_layers(first))
    again = make_small()
    assert len(found) == len(_layers(first))
    for name, layer in _layers(again).items():
        assert torch.equal(layer.xs_left, _layers(first)[name].xs_left)
    make_small(r=2)
    assert len(found) == 2 * len(_layers(first))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert not list(tmp_path.rglob("*.draft"))
    layers = dict(list(_layers(first).items()))
    weights = {name: layer.base_layer.weight.detach().clone() for name, layer in layers.items()}
    next(iter(weights.values()))[0, 0] += 1e-3
    module._left_singular_vectors(weights, 3)
    assert len(found) == 3 * len(_layers(first))


def test_a_place_that_cannot_be_written_costs_no_run(make_small, monkeypatch, tmp_path):
    expected = make_small()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(module, "CACHED_SIZE", 1)
    assert torch.equal(_logits(make_small()), _logits(expected))


def test_an_adapter_loads_into_the_live_parameters(make_small):
    policy, other = make_small(), make_small(fresh=True)
    load_adapter_(adapter_parameters(other), copy_adapter(adapter_parameters(policy)))
    assert torch.equal(_logits(other), _logits(policy))
