"""Critic-free gradients: advantages over groups, and all rows of the Jacobian from one pass."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from firm.alignment.estimator_config import CriticFreeConfig, KLConfig
from firm.alignment.estimators.critic_free import reply_losses
from firm.alignment.group_advantages import RewardSums, group_advantages, sum_advantages
from firm.alignment.policy import set_mode, without_needless_warnings
from firm.alignment.rewards import filled, values_or_none
from firm.alignment.sequences import INVALID_LOGPROB, response_logprobs
from firm.gradients import jacobian
from tests.draws import draw_mask, draw_normal
from tests.stages import experience_of, rollouts_of
from tests.tokens import queries

seeds = st.integers(0, 2**32)
examples = settings(max_examples=30, derandomize=True)
NO_PENALTY = torch.zeros(12)


def advantages_of(rewards: torch.Tensor, penalty: torch.Tensor = NO_PENALTY, **options: Any):
    return group_advantages(rewards, penalty, CriticFreeConfig(**{"num_replies": 4, **options}))


# --- Advantages -----------------------------------------------------------------------------------


@examples
@given(seeds, st.sampled_from(["group", "leave_one_out"]))
def test_the_baseline_is_the_mean_of_the_group_or_of_its_other_replies(seed, baseline):
    rewards = draw_normal(seed, 3, 12)
    advantages = advantages_of(rewards, baseline=baseline, scale="none")
    for j, b in product(range(3), range(12)):
        group = range(b // 4 * 4, b // 4 * 4 + 4)
        compared = [i for i in group if baseline == "group" or i != b]
        expected = rewards[j, b] - rewards[j, compared].mean()
        torch.testing.assert_close(advantages[j, b], expected, rtol=1e-5, atol=1e-6)


@examples
@given(seeds, st.sampled_from(["group_std", "batch_std", "none"]))
def test_what_all_replies_to_a_prompt_share_changes_nothing(seed, scale):
    rewards, shift = draw_normal(seed, 2, 12), draw_normal(seed + 1, 2, 3)
    shifted = rewards + shift.repeat_interleave(4, dim=1)
    torch.testing.assert_close(
        advantages_of(shifted, scale=scale),
        advantages_of(rewards, scale=scale),
        rtol=1e-3,
        atol=1e-5,
    )


@examples
@given(seeds)
def test_scales_are_those_of_the_group_and_of_the_batch(seed):
    rewards = draw_normal(seed, 2, 12) * torch.tensor([[1.0], [50.0]])
    by_group = advantages_of(rewards, scale="group_std", std_floor=0.0).unflatten(1, (3, 4))
    torch.testing.assert_close(by_group.std(2), torch.ones(2, 3).double())
    by_batch = advantages_of(rewards, scale="batch_std", std_floor=0.0)
    torch.testing.assert_close(by_batch.std(1), torch.ones(2).double())
    together = advantages_of(rewards, scale="batch_std", advantage_scale="shared", std_floor=0.0)
    torch.testing.assert_close(together.mean(0).std(), torch.tensor(1.0).double())
    assert together[1].std() > 5 * together[0].std()


@examples
@given(seeds, st.sampled_from(["group_std", "batch_std", "none"]))
def test_on_a_shared_scale_the_rows_mean_is_the_advantage_of_the_mean_reward(seed, scale):
    rewards = draw_normal(seed, 3, 12)
    rows = advantages_of(rewards, scale=scale, advantage_scale="shared")
    alone = advantages_of(rewards.mean(0, keepdim=True), scale=scale)
    torch.testing.assert_close(rows.mean(0), alone[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("floor", [0.0, 1e-4, 1.0])
def test_groups_with_equal_rewards_have_no_advantage(scale, floor):
    rewards = torch.full((2, 12), 0.7, dtype=torch.float64)  # whose mean over three is not 0.7
    rewards[0, 3:6] = torch.tensor([0.1, 0.3, 0.9])
    advantages = advantages_of(
        rewards,
        NO_PENALTY,
        num_replies=3,
        batch_size=12,
        minibatch_size=4,
        scale=scale,
        std_floor=floor,
    )
    assert not advantages[1].any()
    assert not advantages[0, :3].any()
    assert not advantages[0, 6:].any()
    assert advantages[0, 3:6].all()


def test_a_larger_floor_takes_the_weight_from_differences_that_are_next_to_none():
    rewards = torch.tensor([[0.99, 0.98, 0.99, 0.98, 0.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5]])
    small, large = (
        advantages_of(rewards, scale="group_std", std_floor=floor)[0].abs() for floor in (0.0, 0.1)
    )
    torch.testing.assert_close(small[0], small[4])
    assert large[0] < 0.2 * large[4]


@examples
@given(seeds)
def test_the_penalty_is_part_of_the_reward_or_an_advantage_of_its_own(seed):
    rewards, penalty = draw_normal(seed, 2, 12), draw_normal(seed + 1, 12)
    inside = advantages_of(rewards, penalty, kl_in="reward", scale="none")
    torch.testing.assert_close(inside, advantages_of(rewards - penalty, scale="none"))
    beside = advantages_of(rewards, penalty, kl_in="advantage", scale="group_std")
    own = advantages_of(-penalty[None], baseline="leave_one_out", scale="none")
    torch.testing.assert_close(beside, advantages_of(rewards, scale="group_std") + own)


def test_groups_without_variance_that_are_left_out_are_as_if_they_were_not_there(make):
    trainer = make(zero_variance="leave_out", minibatch_size=16)
    estimator, rollouts = trainer.learner.estimator, moved_experience(trainer).rollouts
    scores = draw_normal(1, 3, 16).float()
    scores[0, :8], scores[1] = 0.25, 1.0  # half of the first objective's groups, all of the second
    scores[2, 13:] = torch.nan  # a group with one score has no variance either
    left_out = estimator.experience(rollouts, scores, filled(scores, 4))
    assert not left_out.advantages[0, :8].any()
    assert not left_out.advantages[1].any()
    assert not left_out.advantages[2, 12:].any()
    assert left_out.is_judged.any(1).tolist() == [True, False, True]
    assert left_out.is_judged.sum(1).tolist() == [8, 0, 12]
    config = replace(trainer.config, zero_variance="keep", batch_size=8, minibatch_size=8)
    penalty = estimator.kl.coefficient * left_out.kl.sum(1)
    alone = group_advantages(scores[:1, 8:], penalty[8:], config)
    # twice as large, since the mean loss is one over the eight other replies
    torch.testing.assert_close(left_out.advantages[:1, 8:], 2 * alone)
    assert estimator.metrics(left_out)["zero_variance_share"] == [0.5, 1.0, 0.25]
    estimator.config = replace(trainer.config, zero_variance="keep")
    kept = estimator.experience(rollouts, scores, filled(scores, 4))
    assert kept.advantages[1].any()  # the KL penalty
    assert kept.is_judged.sum(1).tolist() == [16, 16, 13]


def test_replies_that_are_left_out_are_not_part_of_their_groups_deviation():
    rewards, missing = torch.tensor([[1.0, 0.0, 0.5, 0.5]]), torch.tensor([[0, 0, 1, 1]]).bool()
    options: dict[str, Any] = {"std_floor": 0.0, "zero_variance": "leave_out"}
    for scale, baseline, expected in (
        ("group_std", "group", 0.5**0.5),
        ("group_std", "leave_one_out", 2 * 0.5**0.5),
        ("batch_std", "leave_one_out", 2 * 0.5**0.5),
        ("none", "leave_one_out", 1.0),
    ):
        config = CriticFreeConfig(num_replies=4, scale=scale, baseline=baseline, **options)
        found = group_advantages(rewards, torch.zeros(4), config, missing)
        expected *= 2  # the mean loss is one over the two other replies
        torch.testing.assert_close(found, torch.tensor([[expected, -expected, 0, 0]]))


def test_an_objective_without_a_score_has_no_part_in_a_shared_scale_or_in_the_share_of_clips(make):
    trainer = make(advantage_scale="shared", kl_in="advantage", scale="group_std")
    estimator, rollouts = trainer.learner.estimator, moved_experience(trainer).rollouts
    scores = draw_normal(1, 3, 16).float()
    alone = estimator.experience(rollouts, scores[:1], scores[:1])
    scores[1:] = torch.nan
    served = estimator.experience(rollouts, scores, scores.nan_to_num(nan=0.0))
    assert torch.equal(served.advantages[:1], alone.advantages)
    logprobs = torch.zeros(16, 2).log_softmax(1)
    config, mask = CriticFreeConfig(ratio="ppo"), torch.ones(16, 2).bool()
    _, held = reply_losses(
        logprobs + 1.0,
        logprobs,
        served.advantages.abs() * torch.tensor([[1.0], [0.0], [0.0]]),
        mask,
        config,
        scored=torch.tensor([0]),
    )
    assert torch.equal(held, torch.ones(16, 2))


OWN = """
def halved(rewards, advantages, num_replies, **others):
    assert {"prompts", "lengths", "penalty"} == set(others)
    assert rewards.shape == advantages.shape == (3, 16) and num_replies == 4
    return advantages / 2

def by_hand(rewards):
    return rewards - rewards.nanmean(1, keepdim=True)

def short(advantages):
    return advantages[0]
"""


def test_advantages_of_ones_own_take_the_place_of_the_configured_ones(make, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    configured = make()
    rollouts = moved_experience(configured).rollouts
    scores = draw_normal(1, 3, 16).float()
    expected = configured.learner.estimator.experience(rollouts, scores, scores).advantages
    for name, wanted in (
        ("halved", expected / 2),
        ("by_hand", scores - scores.mean(1, keepdim=True)),
    ):
        estimator = make(advantages=f"{file}:{name}").learner.estimator
        own = estimator.experience(rollouts, scores, scores).advantages
        torch.testing.assert_close(own, wanted)
    scores[0, 0] = torch.nan
    for name, said in (
        ("short", r"short returned shape \[16\]: return a tensor of shape \[3, 16\]"),
        ("by_hand", "by_hand returned nan for objective 0 and reply 0"),
        ("nothing", "own.py has no function 'nothing'"),
        ("", 'must be "module:function" or "file.py:function"'),
    ):
        with pytest.raises(ValueError, match=said):
            make(advantages=f"{file}:{name}").learner.estimator.experience(
                rollouts, scores, filled(scores, 4)
            )


def test_of_one_reward_the_sum_has_its_advantages_less_its_kl_penalty():
    rewards, penalty = draw_normal(1, 1, 8), draw_normal(2, 8).abs()
    base = CriticFreeConfig(num_replies=4, batch_size=8, minibatch_size=8, scale="group_std")
    for kl_in in ("reward", "advantage"):
        config = replace(base, kl_in=kl_in)
        own = group_advantages(rewards, penalty, config)
        summed = replace(config, aggregation="sum_then_normalize")
        found = RewardSums(rewards, penalty, torch.full((8,), 5), summed).alone()
        torch.testing.assert_close(found, own)
        assert not torch.allclose(own, group_advantages(rewards, torch.zeros(8), config))


# --- Losses ---------------------------------------------------------------------------------------


def surrogate(logprobs, old, advantage, mask, config) -> torch.Tensor:
    """One objective's loss of each reply, as the papers print it: a sum over tokens, [B]."""
    if config.ratio_level == "reply":
        logprobs, old = ((values * mask).sum(1, keepdim=True) for values in (logprobs, old))
        mask = mask.any(1, keepdim=True)
    ratio, advantage = torch.exp(logprobs - old), advantage[:, None]
    if config.ratio_form == "ppo":
        clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
        loss = -torch.min(ratio * advantage, clipped * advantage)
    elif config.ratio_form == "cispo":
        loss = -ratio.clamp(max=config.ratio_cap).detach() * advantage * logprobs
    else:
        loss = -advantage * logprobs
    return (loss * mask).sum(1)


def test_the_ratio_is_clipped_where_replies_are_used_more_than_once():
    assert CriticFreeConfig(num_epochs=1).ratio_form == "cispo"
    assert CriticFreeConfig(num_epochs=2).ratio_form == "ppo"
    assert CriticFreeConfig(ratio="none", num_epochs=2).ratio_form == "none"


@pytest.mark.parametrize("level", ["token", "reply"])
@pytest.mark.parametrize("ratio", ["cispo", "ppo", "none"])
@examples
@given(seed=seeds)
def test_losses_per_reply_make_up_the_surrogate_of_every_objective(ratio, level, seed):
    config = CriticFreeConfig(ratio=ratio, ratio_level=level, ratio_cap=1.3)
    old = -draw_normal(seed, 8, 6).abs()
    logprobs = (old + 0.3 * draw_normal(seed + 1, 8, 6)).requires_grad_()
    advantages, mask = draw_normal(seed + 2, 3, 8), draw_mask(seed, 8, 6)
    terms, _ = reply_losses(logprobs, old, advantages, mask, config)
    for j, advantage in enumerate(advantages):
        expected = surrogate(logprobs, old, advantage, mask, config).sum()
        loss = sum(coefficients[j] @ losses for losses, coefficients in terms)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        gradients = [
            torch.autograd.grad(value, logprobs, retain_graph=True)[0] for value in (loss, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_share_of_held_ratios_counts_the_objectives_for_which_they_are():
    ratio, mask = torch.tensor([[1.5, 0.5, 1.0]]), torch.ones(1, 3, dtype=torch.bool)
    old = torch.zeros(1, 3)
    advantages = torch.tensor([[1.0], [2.0], [-1.0], [0.0]])
    _, held = reply_losses(ratio.log(), old, advantages, mask, CriticFreeConfig(ratio="ppo"))
    torch.testing.assert_close(held, torch.tensor([[0.5, 0.25, 0.0]]))
    config = CriticFreeConfig(ratio="cispo", ratio_cap=1.2)
    _, held = reply_losses(ratio.log(), old, advantages, mask, config)
    torch.testing.assert_close(held, torch.tensor([[1.0, 0.0, 0.0]]))


# --- The Jacobian ---------------------------------------------------------------------------------


@pytest.fixture
def make(make_trainer, letter_count):
    """A trainer of critic-free gradients on three objectives."""

    def make(**changes):
        rewards = {letter: letter_count(letter) for letter in "abc"}
        return make_trainer(rewards=rewards, estimator="critic_free", **changes)

    return make


def moved_experience(trainer):
    """A batch, and a policy that has moved away from the one that sampled it."""
    torch.manual_seed(5)
    count = trainer.config.num_prompts
    query_ids = torch.randint(4, 10, (count, 6))
    prompts = trainer.tokenizer.batch_decode(query_ids)
    experience = experience_of(trainer, rollouts_of(trainer, queries(query_ids, prompts)))
    with torch.no_grad():
        for parameter in trainer.adapter_parameters.values():
            parameter += 0.1 * torch.randn_like(parameter)
    return experience


def looped_rows(trainer, minibatch) -> torch.Tensor:
    """The Jacobian by a loop of backward passes over the printed losses, [M, d]."""
    config, rollouts, policy = trainer.config, minibatch.rollouts, trainer._policy
    set_mode(policy.model, is_training=True)
    logprobs = response_logprobs(policy.model, rollouts, policy.config.temperature)
    mask = rollouts.mask
    logprobs = logprobs.masked_fill(~mask, INVALID_LOGPROB)
    losses = []
    for advantage in minibatch.advantages:
        sums = surrogate(logprobs, rollouts.logprobs, advantage, mask, config)
        lengths = mask.sum(1) if config.ratio_level == "token" else torch.ones_like(mask.sum(1))
        if config.loss_mean == "replies":
            losses.append((sums / lengths).mean())
        elif config.loss_mean == "tokens":
            losses.append(sums.sum() / lengths.sum())
        else:
            losses.append(sums.mean() / trainer.rollout_config.max_new_tokens)
    return jacobian(torch.stack(losses), policy.parameters)


OPTIONS = [
    {"ratio": ratio, "loss_mean": mean, "ratio_level": level}
    for ratio, mean, level in product(
        ("cispo", "ppo", "none"), ("replies", "tokens", "constant"), ("token", "reply")
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("vocabulary", ["small", "large"], indirect=True)
def test_rows_equal_those_of_one_backward_pass_for_each_objective(make, options, vocabulary):
    trainer = make(ratio_cap=1.1, clip_range=0.05, **options)
    assert trainer.prompts_once == (vocabulary == "large")
    minibatch = moved_experience(trainer).rows(np.random.default_rng(0).permutation(16)[:9])
    gradients = trainer.gradients(trainer.learner, minibatch)
    expected = looped_rows(trainer, minibatch)
    assert (expected.norm(dim=1) > 1e-4).all()
    for row, looped in zip(gradients.jacobian, expected, strict=True):
        assert (row - looped).norm() <= 1e-5 * looped.norm()
    assert 0 <= gradients.aux.metrics["clip_fraction"] <= 1
    assert (gradients.aux.metrics["clip_fraction"] > 0) == (options["ratio"] != "none")


def test_rows_of_an_adapted_head_are_the_loop_s_too(make, make_policy):
    trainer = make(policy=make_policy(target_modules=["q_proj", "lm_head"]))
    minibatch = moved_experience(trainer)
    rows, expected = (
        trainer.gradients(trainer.learner, minibatch).jacobian,
        looped_rows(trainer, minibatch),
    )
    assert any("lm_head" in name for name in trainer.adapter_parameters)
    assert (rows - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize(("dropout", "micro_batch_size"), [(0.3, None), (0.0, 4)])
def test_in_float64_rows_equal_the_loop_s_to_ten_digits(
    make, make_model, options, dropout, micro_batch_size
):
    lora = LoraConfig(
        r=4, lora_dropout=dropout, target_modules=["c_attn"], fan_in_fan_out=True,
        init_lora_weights=False,
    )  # fmt: skip
    with without_needless_warnings():
        policy = get_peft_model(make_model("gpt2"), lora).double()  # Llama rounds to float32 within
    trainer = make(
        policy=policy, ratio_cap=1.1, clip_range=0.05, micro_batch_size=micro_batch_size, **options
    )
    minibatch = moved_experience(trainer).rows(np.random.default_rng(0).permutation(16)[:9])
    torch.manual_seed(7)  # of dropout
    gradients = trainer.gradients(trainer.learner, minibatch)
    assert gradients.jacobian.dtype == torch.float64
    torch.manual_seed(7)
    expected = looped_rows(trainer, minibatch)
    for row, looped in zip(gradients.jacobian, expected, strict=True):
        assert (row - looped).norm() <= 1e-10 * looped.norm()


@pytest.mark.parametrize(
    ("vocabulary", "size"),
    [("small", 1), ("small", 4), ("small", 16), ("large", 1), ("large", 5)],
    indirect=["vocabulary"],
)
@pytest.mark.parametrize("options", OPTIONS[::4], ids=lambda options: "-".join(options.values()))
def test_micro_batches_sum_to_the_minibatch(make, options, vocabulary, size):
    whole, parts = (make(minibatch_size=16, micro_batch_size=n, **options) for n in (None, size))
    torch.manual_seed(1)
    expected = whole.gradients(whole.learner, moved_experience(whole))
    torch.manual_seed(1)
    split = parts.gradients(parts.learner, moved_experience(parts))
    torch.testing.assert_close(split.jacobian, expected.jacobian, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(split.losses, expected.losses, rtol=1e-4, atol=1e-6)
    for name, figure in expected.aux.metrics.items():
        torch.testing.assert_close(split.aux.metrics[name], figure, rtol=1e-4, atol=1e-6)


def test_covariances_are_of_each_reward_with_the_weighted_advantage(make):
    for options in ({}, {"aggregation": "normalize_then_sum", "micro_batch_size": 4}):
        trainer = make(minibatch_size=16, **options)
        estimator, rollouts = trainer.learner.estimator, moved_experience(trainer).rollouts
        scores = draw_normal(4, 3, 16).float()
        scores[1] = -scores[0]  # in conflict, and outweighed
        scores[2, 10:] = torch.nan
        experience = estimator.experience(rollouts, scores, filled(scores, 4))
        weights = torch.tensor([0.6, 0.1, 0.3])
        rows = trainer.gradients(trainer.learner, experience)
        solved = rows.aux.metrics["advantage_covariance"] @ weights
        known = trainer.gradients(trainer.learner, experience, weights)
        known = known.aux.metrics["advantage_covariance"]
        for covariances, advantages in (
            (solved, experience.advantages),
            (known, experience.weighted(weights)),
        ):
            signal = (weights @ advantages).numpy()
            for j, count in enumerate([16, 16, 10]):
                own = np.cov(scores[j, :count], signal[:count], bias=True)[0, 1]
                assert covariances[j].item() == pytest.approx(own, rel=1e-4, abs=1e-6)
        assert known[0] > 0 > known[1]


def test_empty_replies_and_flat_groups_add_nothing_and_are_counted(make, letter_count):
    trainer = make(minibatch_size=16)
    experience = moved_experience(trainer)
    num_tokens = experience.rollouts.num_tokens.clone()
    num_tokens[:4] = 0
    rollouts = replace(experience.rollouts, num_tokens=num_tokens)
    rewards = experience.rewards.clone()
    rewards[0, :8] = 1.0
    estimator = trainer.learner.estimator
    experience = estimator.experience(rollouts, experience.scores, rewards)
    shares = estimator.metrics(experience)["zero_variance_share"]
    assert shares[0] >= 0.5
    assert all(0 <= share <= 1 for share in shares)
    gradients = trainer.gradients(trainer.learner, experience)
    assert gradients.jacobian.isfinite().all()
    rest = trainer.gradients(trainer.learner, experience.rows(slice(4, None)))
    torch.testing.assert_close(gradients.jacobian, rest.jacobian, rtol=1e-3, atol=1e-6)


def test_replies_to_one_prompt_stand_together_and_no_critic_is_kept(make):
    trainer = make()
    experience = moved_experience(trainer)
    prompts = experience.rollouts.queries.prompts
    assert len(prompts) == 16
    assert [prompts[i] for i in range(0, 16, 4)] == [prompts[i + 3] for i in range(0, 16, 4)]
    assert trainer.config.new_critic(trainer.policy_model, 3) is None
    assert trainer.learner.estimator.state() == {"kl_coefficient": 0.1}


# --- Peers ----------------------------------------------------------------------------------------


def make_peer(trainer, peer_class, config_class, tmp_path, rewards=None, size=8, **options):
    """A trainer of TRL's with the policy of ours; `rewards` are called with `at`, a row's place."""
    for parameter in trainer._policy.parameters:
        parameter.requires_grad_(True)
    rollout_func = options.pop("rollout_func", None)
    peer = peer_class(
        model=trainer._policy.model,
        args=config_class(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_generations=4,
            max_completion_length=trainer.rollout_config.max_new_tokens,
            temperature=trainer.rollout_config.temperature,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            **options,
        ),
        reward_funcs=rewards or (lambda completions, **_: [0.0] * len(completions)),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * size}),
        processing_class=trainer.tokenizer,
        **({"rollout_func": rollout_func} if rollout_func else {}),
    )
    peer.current_gradient_accumulation_steps = 1
    return peer


def loss_and_gradient(peer, trainer, inputs):
    """Loss and gradient [d] of a trainer of TRL's."""
    trainer._policy.model.train()
    loss = peer._compute_loss(trainer._policy.model, inputs)
    gradient = torch.autograd.grad(loss, trainer._policy.parameters)
    return loss.detach(), torch.cat([part.flatten() for part in gradient])


def peer_loss(trainer, minibatch, peer_class, config_class, tmp_path, **options):
    """Loss and gradient of a trainer of TRL's on the same replies and advantages, M = 1."""
    rollouts = minibatch.rollouts
    peer = make_peer(trainer, peer_class, config_class, tmp_path, **options)
    mask = rollouts.mask
    query_ids = rollouts.queries.token_ids
    inputs = {
        "prompt_ids": query_ids,
        "prompt_mask": rollouts.queries.mask.long(),
        "completion_ids": rollouts.responses,
        "completion_mask": mask.long(),
        "advantages": minibatch.advantages[0],
        "old_per_token_logps": rollouts.logprobs,
        "old_logps": (rollouts.logprobs * mask).sum(1),
        "num_items_in_batch": mask.sum(),
    }
    return loss_and_gradient(peer, trainer, inputs)


PEERS = {
    "grpo": {"ratio": "ppo", "loss_mean": "replies"},
    "dapo": {"ratio": "ppo", "loss_mean": "tokens"},
    "dr_grpo": {"ratio": "ppo", "loss_mean": "constant"},
    "cispo": {"ratio": "cispo", "loss_mean": "tokens"},
}


quietly = pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing. is deprecated")
"""TRL of this version uses names of transformers' that it warns about."""


@quietly
@pytest.mark.parametrize("loss_type", PEERS)
def test_with_one_objective_loss_and_gradient_are_grpos(
    make_trainer, letter_count, tmp_path, loss_type
):
    trainer = make_trainer(
        rewards={"a": letter_count("a")},
        estimator="critic_free",
        **{"clip_range": 0.1, "ratio_cap": 1.2, **PEERS[loss_type]},
    )
    minibatch = moved_experience(trainer).rows(slice(0, 8))
    ours = trainer.gradients(trainer.learner, minibatch)
    high = 1.2 if loss_type == "cispo" else 0.1
    options = {"loss_type": loss_type, "epsilon": 0.1, "epsilon_high": high}
    loss, gradient = peer_loss(trainer, minibatch, GRPOTrainer, GRPOConfig, tmp_path, **options)
    assert ours.aux.metrics["clip_fraction"] > 0
    torch.testing.assert_close(ours.losses[0], loss, rtol=1e-6, atol=1e-6)
    assert (ours.jacobian[0] - gradient).norm() <= 1e-5 * gradient.norm()
    other_mean = "replies" if PEERS[loss_type]["loss_mean"] == "tokens" else "tokens"
    for change in ({"clip_range": 0.3, "ratio_cap": 1.05}, {"loss_mean": other_mean}):
        trainer.learner.estimator.config = replace(trainer.config, **change)
        assert (trainer.gradients(trainer.learner, minibatch).losses[0] - loss).abs() > 1e-5


@quietly
def test_with_one_objective_loss_and_gradient_are_rloos(make_trainer, letter_count, tmp_path):
    trainer = make_trainer(
        rewards={"a": letter_count("a")},
        estimator="critic_free",
        ratio="ppo",
        ratio_level="reply",
        clip_range=0.1,
        baseline="leave_one_out",
        scale="none",
    )
    minibatch = moved_experience(trainer).rows(slice(0, 8))
    ours = trainer.gradients(trainer.learner, minibatch)
    loss, gradient = peer_loss(
        trainer, minibatch, RLOOTrainer, RLOOConfig, tmp_path, epsilon=0.1, epsilon_high=0.1
    )
    assert ours.aux.metrics["clip_fraction"] > 0
    torch.testing.assert_close(ours.losses[0], loss, rtol=1e-6, atol=1e-6)
    assert (ours.jacobian[0] - gradient).norm() <= 1e-5 * gradient.norm()


AGGREGATIONS = [
    ("normalize_then_sum", "batch_std", "ppo"),
    ("normalize_then_sum", "batch_std", "cispo"),
    ("sum_then_normalize", "group_std", "ppo"),
    ("sum_then_normalize", "batch_std", "ppo"),
    ("sum_then_normalize", "none", "cispo"),
]
TRL_SCALES = {"group_std": "group", "batch_std": "batch", "none": "none"}
SHARES = [0.5, 0.2, 0.3]


@quietly
@pytest.mark.parametrize(("aggregation", "scale", "ratio"), AGGREGATIONS)
def test_on_a_weighted_sum_advantages_loss_and_gradient_are_trls(
    make, tmp_path, aggregation, scale, ratio
):
    own = {"ratio": ratio, "loss_mean": "tokens", "clip_range": 0.1, "ratio_cap": 1.2}
    trainer = make(
        aggregation=aggregation,
        scale=scale,
        kl=KLConfig(controller="fixed", coefficient=0.0),
        **own,
    )
    rollouts = moved_experience(trainer).rollouts
    scores = draw_normal(3, 3, 16).float() * torch.tensor([[1.0], [20.0], [0.1]])
    scores[0, :4], scores[0, 9], scores[1, 4:7] = 0.7, torch.nan, torch.nan
    scores[:, 14], scores[2, 8:] = torch.nan, torch.nan  # no reward; none in the second minibatch
    given = trainer.learner.estimator.experience(
        rollouts, scores, filled(scores, trainer.config.num_replies)
    )

    def rollout_func(prompts, peer):
        return {
            "prompt_ids": [
                ids[mask].tolist()
                for ids, mask in zip(rollouts.queries.token_ids, rollouts.queries.mask, strict=True)
            ],
            "completion_ids": [
                ids[mask].tolist()
                for ids, mask in zip(rollouts.responses, rollouts.mask, strict=True)
            ],
            "logprobs": None,
        }

    def reward(row):
        return lambda completions, **_: values_or_none(row)

    peer = make_peer(
        trainer,
        GRPOTrainer,
        GRPOConfig,
        tmp_path,
        rewards=[reward(row) for row in scores],
        size=16,
        rollout_func=rollout_func,
        reward_weights=SHARES,
        multi_objective_aggregation=aggregation,
        scale_rewards=TRL_SCALES[scale],
        loss_type="cispo" if ratio == "cispo" else "dapo",
        epsilon=0.1,
        epsilon_high=1.2 if ratio == "cispo" else 0.1,
    )
    theirs = peer._generate_and_score_completions([{"prompt": "a"}] * 16)
    weights = torch.tensor(SHARES)
    advantages = weights @ given.weighted(weights)
    torch.testing.assert_close(advantages, theirs["advantages"], rtol=1e-5, atol=1e-6)
    assert advantages[14] == 0
    assert advantages.abs().max() > 0.5
    theirs = {name: value for name, value in theirs.items() if isinstance(value, torch.Tensor)}
    for rows in (slice(0, 8), slice(8, 16)):
        minibatch = given.rows(rows)
        inputs = {
            **{name: value[rows] for name, value in theirs.items() if value.ndim},
            "old_per_token_logps": rollouts.logprobs[rows],
            "num_items_in_batch": minibatch.rollouts.mask.sum(),
        }
        loss, gradient = loss_and_gradient(peer, trainer, inputs)
        ours = trainer.gradients(trainer.learner, minibatch, weights)
        assert (weights @ ours.losses - loss).abs() <= 1e-6
        assert (ours.jacobian[0] - gradient).norm() <= 1e-6 * max(1, gradient.norm())
        assert ours.aux.metrics["clip_fraction"] > 0
        assert gradient.norm() > 1e-3


def sum_of(rewards, weights=None, lengths=None, **options):
    """Advantages [B] of the weighted sum of rewards [M, B]."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    weights = torch.as_tensor(weights or [1 / len(rewards)] * len(rewards), dtype=torch.float64)
    tokens = torch.ones(rewards.size(1)) if lengths is None else torch.tensor(lengths)
    config = CriticFreeConfig(**{"aggregation": "normalize_then_sum", "std_floor": 0.0, **options})
    return weights @ sum_advantages(rewards, weights, config, num_tokens=tokens)


def test_whitening_by_token_gives_tokens_zero_mean_and_unit_variance():
    lengths = [1, 9, 2, 8, 3, 7, 4, 6]
    rewards = draw_normal(2, 2, 8)
    by_token = sum_of(rewards, lengths=lengths, whiten_over="tokens")
    tokens = by_token.repeat_interleave(torch.tensor(lengths))
    torch.testing.assert_close(tokens.mean(), torch.tensor(0.0).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(tokens.std(), torch.tensor(1.0).double())
    by_reply = sum_of(rewards, lengths=lengths)
    torch.testing.assert_close(by_reply.std(), torch.tensor(1.0).double())
    assert (by_reply - by_token).abs().max() > 0.05


def test_without_the_reply_itself_it_is_compared_with_mean_and_deviation_of_the_others():
    rewards = torch.tensor([[3.0, 1.0, 2.0, 6.0, 5.0, 5.0, 5.0, 9.0]])
    # 3 of others 1, 2, 6 with mean 3 and variance 7; the others of 9 are equal: not divided
    expected = [0.0, -2.6667 / 2.0817, -1.3333 / 2.5166, 4.0, *[-1.3333 / 2.3094] * 3, 4.0]
    expected = torch.tensor(expected).double()
    own = sum_of(rewards, baseline="leave_one_out")
    torch.testing.assert_close(
        own, (expected - expected.mean()) / expected.std(), rtol=1e-4, atol=1e-4
    )


def test_options_without_an_effect_on_a_sum_are_refused():
    for options, said in (
        ({"aggregation": "normalize_then_sum", "scale": "group_std"}, "scale must be batch_std"),
        ({"aggregation": "sum_then_normalize", "advantage_scale": "shared"}, "must be left out"),
        ({"aggregation": "sum_then_normalize", "whiten_over": "tokens"}, "must be replies"),
        (
            {"aggregation": "normalize_then_sum", "baseline": "leave_one_out", "num_replies": 2},
            "num_replies must be at least 3 with aggregation normalize_then_sum and baseline",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            CriticFreeConfig(**options)
