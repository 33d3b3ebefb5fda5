"""The trainer's stages: its gradients against single objectives, its options and its state."""

import asyncio
import dataclasses
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from firm.alignment import (
    AlignmentClient,
    KLConfig,
    PolicyConfig,
    PPOConfig,
    copy_adapter,
    load_policy,
)
from firm.alignment.advantages import masked_mean
from firm.alignment.prompts import prompt_of
from firm.alignment.trainer import copy_of_state
from firm.federation import RandomStream, local_training
from firm.federation.training import LocalTraining
from tests.stages import experience_of, rollouts_of
from tests.tokens import queries


@pytest.fixture
def train(make_trainer):
    """Trains for 3 local steps; gives the states of policy and critic."""

    def train_as(**arguments):
        trainer = make_trainer(**arguments)
        torch.manual_seed(4)
        prompts = [prompt_of(f"\n\nHuman: {text}\n\nAssistant:") for text in "abcdefghij" * 5]
        client = AlignmentClient("client_0", prompts, trainer, seed=4)
        adapter, objectives = copy_adapter(trainer.adapter_parameters), trainer.objectives
        for round in range(1, 4):
            request = LocalTraining(
                adapter=adapter,
                round=round,
                objectives=objectives,
                num_local_steps=1,
                weighting="firm",
                weighting_options={"beta": 0.01},
            )
            adapter = local_training(client, request).adapter
        return trainer.policy_model.state_dict(), client._learner.estimator.critic.state_dict()

    return train_as


def largest_difference(first, second) -> float:
    assert first.keys() == second.keys()
    return max((first[k] - second[k]).abs().max().item() for k in first)


@pytest.mark.parametrize("num_objectives", [2, 4])
def test_duplicated_objectives_equal_one_objective(train, letter_count, num_objectives):
    one = train(rewards={"a": letter_count("a")})
    rewards = {f"a{j}": letter_count("a") for j in range(num_objectives)}
    many = train(rewards=rewards)
    assert largest_difference(one[0], many[0]) < 1e-5  # sums of M equal products round differently
    for j in range(num_objectives):
        torch.testing.assert_close(many[1]["score.weight"][j], one[1]["score.weight"][0])


def test_row_j_of_the_jacobian_is_the_gradient_of_objective_j_alone(make_trainer, letter_count):
    rewards = {letter: letter_count(letter) for letter in "abc"}
    trainer = make_trainer(rewards=rewards)
    experience = some_experience(trainer)
    rows = trainer.gradients(trainer.learner, experience).jacobian
    for j, (name, reward) in enumerate(rewards.items()):
        alone = make_trainer(rewards={name: reward})
        own = alone.gradients(alone.learner, some_experience(alone)).jacobian
        torch.testing.assert_close(rows[j], own[0], rtol=1e-5, atol=1e-8)
        assert own.norm() > 1e-3


def some_experience(trainer):
    torch.manual_seed(5)
    query_ids = torch.randint(4, 10, (16, 6))
    prompts = trainer.tokenizer.batch_decode(query_ids)
    return experience_of(trainer, rollouts_of(trainer, queries(query_ids, prompts)))


def test_a_remote_judge_is_at_work_while_log_probabilities_are_computed(make_trainer, monkeypatch):
    began = threading.Event()

    async def judge(completions, **kwargs):
        await asyncio.to_thread(began.wait, 30)
        return [float(began.is_set())] * len(completions)

    trainer = make_trainer(rewards={"judge": judge})
    with_logprobs = trainer.with_logprobs
    monkeypatch.setattr(
        trainer, "with_logprobs", lambda *args, **kw: began.set() or with_logprobs(*args, **kw)
    )
    client = AlignmentClient("client_0", [prompt_of("?")] * 16, trainer, seed=4)
    adapter = copy_adapter(trainer.adapter_parameters)
    request = LocalTraining(
        adapter=adapter, round=1, objectives=("judge",), num_local_steps=1, weighting="firm"
    )
    assert local_training(client, request).metrics["scores"] == {"judge": 1.0}


@pytest.mark.parametrize("size", [3, 8, 16])
@pytest.mark.parametrize("critic", ["heads", "network"])
def test_micro_batches_sum_to_the_minibatch_and_are_one_optimizer_step(
    make_trainer, letter_count, size, critic
):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    arguments = {"rewards": rewards, "critic": critic, "minibatch_size": 16}

    def new_trainer(**changes):
        torch.manual_seed(6)  # of the value network
        return make_trainer(**arguments, **changes)

    whole, parts = new_trainer(), new_trainer(micro_batch_size=size)
    steps = []
    parts.learner.actor_optimizer.register_step_post_hook(lambda *_: steps.append(1))
    index = np.random.default_rng(0).permutation(16)
    expected = whole.gradients(whole.learner, some_experience(whole).rows(index))
    found = parts.gradients(parts.learner, some_experience(parts).rows(index))
    torch.testing.assert_close(found.jacobian, expected.jacobian, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.aux.own, expected.aux.own, rtol=1e-4, atol=1e-7)
    for name, figure in expected.aux.metrics.items():
        torch.testing.assert_close(found.aux.metrics[name], figure, rtol=1e-4, atol=1e-6)
    parts.step(parts.learner, found, torch.tensor([0.5, 0.5]))
    assert len(steps) == 1


@pytest.mark.parametrize("empty", [range(3), range(16)], ids=["some", "all of a minibatch"])
def test_empty_replies_add_nothing_in_micro_batches_as_in_whole_ones(
    make_trainer, letter_count, empty
):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    index, results = np.arange(16), []
    for size in (None, 1):
        trainer = make_trainer(rewards=rewards, micro_batch_size=size, batch_size=32)
        torch.manual_seed(5)
        query_ids = torch.randint(4, 10, (32, 6))
        prompts = trainer.tokenizer.batch_decode(query_ids)
        rollouts = rollouts_of(trainer, queries(query_ids, prompts))
        num_tokens = rollouts.num_tokens.clone()
        num_tokens[list(empty)] = 0
        rollouts = replace(rollouts, num_tokens=num_tokens)
        results.append(
            trainer.gradients(trainer.learner, experience_of(trainer, rollouts).rows(index))
        )
    whole, parts = results
    assert whole.jacobian.isfinite().all()
    assert bool(whole.jacobian.any()) == (len(empty) < 16)
    torch.testing.assert_close(parts.jacobian, whole.jacobian, rtol=1e-4, atol=1e-7)
    for name, figure in whole.aux.metrics.items():
        assert figure.isfinite().all(), name
        torch.testing.assert_close(parts.aux.metrics[name], figure, rtol=1e-4, atol=1e-6)


EFFECTIVE = {
    "batch_size": 32,
    "minibatch_size": 4,
    "num_epochs": 1,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "actor_optimizer": "sgd",
    "learning_rate_schedule": "constant",
    "critic": "network",
    "clip_range": 1e-3,
    "value_clip_range": 1e-3,
    "gamma": 0.5,
    "gae_lambda": 0.1,
    "whiten_rewards": True,
    "advantage_scale": "shared",
    "missing_end_penalty": 0.0,
    "max_gradient_norm": 1e-7,
    "max_approx_kl": 1e-6,
    "kl": KLConfig(controller="fixed", coefficient=1.0),
}
"""Another value of each option than that of the tests' trainer."""


@pytest.mark.slow
def test_every_option_has_an_effect(train, letter_count):
    fields = {field.name for field in dataclasses.fields(PPOConfig)}
    assert set(EFFECTIVE) == fields - {"name", "micro_batch_size"}  # which must have none
    rewards = {"a": letter_count("a"), "few": lambda **k: [v / 9 for v in letter_count("b")(**k)]}
    arguments = {"rewards": rewards, "num_rounds": 2}  # the second has another learning rate
    usual, effects = train(**arguments), {}
    for option, value in EFFECTIVE.items():
        changed = train(**arguments, **{option: value})
        effects[option] = max(
            largest_difference(one, other) if one.keys() == other.keys() else 1.0
            for one, other in zip(usual, changed, strict=True)
        )
    assert [option for option, effect in effects.items() if effect < 1e-4] == []


@pytest.mark.parametrize(("estimator", "num_passes"), [("ppo", 2), ("critic_free", 1)])
def test_gradient_checkpointing_computes_again_and_changes_nothing(
    make_trainer, checkpoint, letter_count, estimator, num_passes
):
    rewards = {letter: letter_count(letter) for letter in "ab"}

    def gradients(checkpointing):
        config = PolicyConfig(str(checkpoint), gradient_checkpointing=checkpointing)
        policy = load_policy(config, stream=RandomStream(0, "adapter"))
        ratio = {"ratio": "cispo"} if estimator == "critic_free" else {}
        trainer = make_trainer(rewards=rewards, policy=policy, estimator=estimator, **ratio)
        experience = some_experience(trainer)
        calls = []
        attention = policy.get_base_model().model.layers[0].self_attn
        attention.register_forward_pre_hook(lambda *_: calls.append(1))
        return trainer.gradients(trainer.learner, experience).jacobian, len(calls)

    plain, num_calls = gradients(False)
    again, num_calls_again = gradients(True)
    assert plain.norm() > 1e-3
    assert torch.equal(plain, again)
    assert (num_calls, num_calls_again) == (1, 1 + num_passes)  # once more per backward pass


def test_below_float32_the_first_ratio_is_one(make_trainer, make_policy, letter_count):
    trainer = make_trainer(
        rewards={letter: letter_count(letter) for letter in "ab"},
        policy=make_policy(dtype=torch.bfloat16),
        micro_batch_size=3,
    )
    experience = some_experience(trainer)
    assert experience.rollouts.mismatch.abs().max() > 1e-3
    means = [masked_mean(row, experience.rollouts.mask) for row in experience.advantages]
    losses = trainer.gradients(
        trainer.learner, experience
    ).losses  # of the ratio times the advantage
    torch.testing.assert_close(losses, -torch.stack(means), rtol=0, atol=1e-6)


def test_a_bfloat16_policy_trains_a_float32_adapter(make_trainer, make_policy, letter_count):
    policy = make_policy(dtype=torch.bfloat16)
    for parameter in policy.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    trainer = make_trainer(rewards={letter: letter_count(letter) for letter in "ab"}, policy=policy)
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    gradients = trainer.gradients(trainer.learner, some_experience(trainer))
    assert gradients.jacobian.dtype == torch.float32
    assert gradients.jacobian.isfinite().all()
    before = [p.detach().clone() for p in trainer.adapter_parameters.values()]
    trainer.step(trainer.learner, gradients, torch.tensor([0.5, 0.5]))
    for parameter, old in zip(trainer.adapter_parameters.values(), before, strict=True):
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, old)


@pytest.mark.slow
def test_a_compiled_policy_gives_the_same_gradients(make_trainer, make_policy, letter_count):
    def gradients(compiled):
        policy = make_policy()
        if compiled:  # "eager" traces the model as the other backends do, and generates no code
            policy.get_base_model().model.compile(backend="eager")
        trainer = make_trainer(rewards={"a": letter_count("a")}, policy=policy)
        return trainer.gradients(trainer.learner, some_experience(trainer)).jacobian

    torch.testing.assert_close(gradients(True), gradients(False))


def test_adapter_dropout_is_active_in_updates_and_off_in_rollouts(make_trainer, letter_count):
    def gradients_twice(dropout):
        trainer = make_trainer(rewards={"a": letter_count("a")}, dropout=dropout)
        experience = some_experience(trainer)
        both = [trainer.gradients(trainer.learner, experience).jacobian for _ in range(2)]
        return experience, both

    without, (first, second) = gradients_twice(0.0)
    assert torch.equal(first, second)
    with_dropout, (first, second) = gradients_twice(0.5)
    assert not torch.allclose(first, second)
    assert torch.equal(without.rollouts.logprobs, with_dropout.rollouts.logprobs)


def test_the_critic_does_not_move_the_adapter_and_steps_at_its_own_rate(
    train, make_policy, letter_count
):
    policy, critic = train(
        rewards={"a": letter_count("a")}, critic_learning_rate=0.5, actor_learning_rate=1e-12
    )
    assert largest_difference(make_policy().state_dict(), policy) < 1e-9
    assert critic["score.weight"].abs().max() > 1e-2


def test_sgd_takes_the_plain_gradient_step_of_algorithm_1(make_trainer, letter_count):
    trainer = make_trainer(
        rewards={"a": letter_count("a"), "b": letter_count("b")},
        actor_optimizer="sgd",
        actor_learning_rate=0.25,
    )
    gradients = trainer.gradients(trainer.learner, some_experience(trainer))
    before = torch.cat([p.detach().flatten() for p in trainer.adapter_parameters.values()])
    weights = torch.tensor([0.3, 0.7])
    trainer.step(trainer.learner, gradients, weights)
    after = torch.cat([p.detach().flatten() for p in trainer.adapter_parameters.values()])
    expected = before - 0.25 * (0.3 * gradients.jacobian[0] + 0.7 * gradients.jacobian[1])
    torch.testing.assert_close(after, expected)


def test_a_learner_continues_from_its_state_as_if_it_had_not_stopped(make_trainer, letter_count):
    trainer = make_trainer(rewards={"a": letter_count("a")})
    experience = some_experience(trainer)
    weights = torch.ones(1)

    def step():
        trainer.step(trainer.learner, trainer.gradients(trainer.learner, experience), weights)
        trainer.learner.estimator.end_batch(experience)

    step()
    adapter = [p.detach().clone() for p in trainer.adapter_parameters.values()]
    state = trainer.learner.state()
    step()
    expected = [p.detach().clone() for p in trainer.adapter_parameters.values()]
    trainer.learner = trainer.new_learner()
    trainer.learner.restore(state)
    with torch.no_grad():
        for parameter, value in zip(trainer.adapter_parameters.values(), adapter, strict=True):
            parameter.copy_(value)
    step()
    for parameter, value in zip(trainer.adapter_parameters.values(), expected, strict=True):
        assert torch.equal(parameter, value)


@pytest.mark.parametrize("missing", ["trl.experimental", "trl.experimental.ppo"])
def test_where_trl_has_no_ppo_the_stages_stand_alone(
    make_trainer, letter_count, monkeypatch, missing
):
    monkeypatch.delitem(sys.modules, "trl.experimental.ppo", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # what importing it then raises
    trainer = make_trainer(rewards={"a": letter_count("a")})
    assert trainer.trl is None
    assert trainer.gradients(trainer.learner, some_experience(trainer)).jacobian.isfinite().all()


def test_a_copied_state_shares_nothing_with_the_original():
    original = {"step": 3, "moments": {0: [torch.ones(2), (torch.zeros(1),)]}, "names": ["a"]}
    copied = copy_of_state(original)
    assert copied["names"] == ["a"]
    assert copied["step"] == 3
    original["names"].append("b")
    original["moments"][0][0].add_(1)
    original["moments"][0][1][0].add_(1)
    original["moments"][1] = []
    assert copied["names"] == ["a"]
    (first, (second,)), *others = copied["moments"].values()
    assert (first.tolist(), second.tolist(), others) == ([1, 1], [0], [])
