"""Replies to equal prompts, whose prompt is passed once, are as if each had passed its own."""

from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from firm.alignment import LoraSettings, MultiObjectiveTrainer
from firm.alignment import head as heads
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.estimator_config import ESTIMATORS, CriticFreeConfig
from firm.alignment.estimators.estimator import Policy
from firm.alignment.policy import adapter_parameters, add_adapter, set_mode
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import Prompt
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.rollout_engines import SampleRequest, transformers
from firm.alignment.sequences import (
    Queries,
    Sequences,
    left_padded,
    may_pass_prompts_once,
    takes_attention_masks,
)
from firm.alignment.stacked import model as stacked_model
from firm.alignment.stacked.model import Losses, StackedModel, Weighted
from firm.alignment.stacked.passes import ClientPart
from firm.alignment.stacked.trainer import stacked_trainers
from firm.federation.lockstep import lockstep
from firm.gradients.per_sequence import PerSequenceGradients
from tests.sampling import generate
from tests.zoo.architectures import ARCHITECTURES, cases

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TAKEN = [name for name, each in ARCHITECTURES.items() if "everywhere" not in each.refused]
STACKED = [name for name in TAKEN if "stacked" not in ARCHITECTURES[name].refused]
LENGTHS = [21, 5, 21, 9]  # beyond the sliding windows of 16, and within
pytestmark = pytest.mark.filterwarnings("ignore:.*fast path.*")


@pytest.fixture
def large(monkeypatch) -> None:
    """Counts every vocabulary as large."""
    monkeypatch.setattr(heads, "LARGE_VOCABULARY", 0)
    monkeypatch.setattr(heads, "_formulas", WeakKeyDictionary())


def prompts(vocabulary: int, order, *, seed: int = 0) -> Queries:
    """Prompts of four texts in some order."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    ids, lengths = left_padded([texts[at] for at in order], fill=0)
    return Queries([Prompt("")] * len(order), ids, lengths)


def test_rows_are_distinct_by_tokens_padding_and_preferences():
    ids, lengths = (
        torch.tensor([[0, 5], [0, 5], [6, 5], [0, 5], [0, 5]]),
        torch.tensor([2, 1, 2, 1, 1]),
    )
    preferences = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.1, 0.9]])
    plain = Queries([Prompt("")] * 5, ids, lengths)
    first, index = plain.distinct()
    assert (first.tolist(), index.tolist()) == ([0, 1, 2], [0, 1, 2, 1, 1])
    first, index = Queries([Prompt("")] * 5, ids, lengths, preferences).distinct()
    assert (first.tolist(), index.tolist()) == ([0, 1, 2, 4], [0, 1, 2, 1, 3])


@pytest.mark.parametrize("name", cases(TAKEN))
def test_every_architecture_samples_as_with_a_prompt_in_each_row(
    name, tokenizer, large, monkeypatch
):
    model = ARCHITECTURES[name].model(SPECIAL).requires_grad_(False)
    asked = prompts(model.config.get_text_config().vocab_size, [0, 0, 1, 0, 2, 3, 1, 1])
    config = RolloutConfig(max_new_tokens=8, temperature=1.0, stop_strings=[])
    heads.head_of(model)  # compares its formula, in a pass of its own
    takes_attention_masks(model)  # as well
    results, rows = [], []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, options: rows.append(len(options["input_ids"])), with_kwargs=True
    )
    for is_shared in (True, False):
        if not is_shared:
            monkeypatch.setattr(transformers, "shares_prompts", lambda _: False)
        torch.manual_seed(0)
        results.append(generate(model, asked, tokenizer=tokenizer, config=config, end_ids=[2]))
    handle.remove()
    has_cache = "stacked" not in ARCHITECTURES[name].refused
    assert rows[0] == (4 if has_cache else 8)  # the distinct prompts, or all
    (ids, logprobs), (plain_ids, plain_logprobs) = results
    assert torch.equal(ids, plain_ids)
    real = plain_ids[:, asked.token_ids.size(1) :] != 0
    torch.testing.assert_close(logprobs[real], plain_logprobs[real], rtol=1e-4, atol=1e-5)


def test_a_large_head_multiplies_adjacent_states_of_the_last_position(tokenizer, large):
    # torch copies the head's matrix once per row for a view of some positions
    model = ARCHITECTURES["llama"].model(SPECIAL).requires_grad_(False)
    heads.head_of(model)
    takes_attention_masks(model)
    states = []
    model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, _output: states.append(
            (inputs[0].size(1), inputs[0].is_contiguous())
        )
    )
    asked = prompts(model.config.vocab_size, [0, 0, 1, 2])
    config = RolloutConfig(max_new_tokens=3, stop_strings=[])
    generate(model, asked, tokenizer=tokenizer, config=config, end_ids=[2])
    assert set(states) == {(1, True)}


@pytest.mark.parametrize("name", cases(STACKED))
def test_every_architecture_samples_in_joint_passes_as_with_a_prompt_in_each_row(
    name, large, monkeypatch
):
    model = ARCHITECTURES[name].model(SPECIAL)
    vocabulary = model.config.get_text_config().vocab_size
    policy = add_adapter(model, PolicyConfig("it", lora=LoraSettings(target_modules=None)))
    stack = StackedModel(policy)
    adapters = [stack.new_adapter() for _ in range(3)]
    for at, adapter in enumerate(adapters):
        generator = torch.Generator().manual_seed(at)
        for parameter in adapter.values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    config = RolloutConfig(max_new_tokens=8, temperature=1.0, stop_strings=[])
    orders = [[0, 0, 0, 1], [1, 2, 1, 2, 2], [3]]

    def sample():
        requests = [
            SampleRequest(
                prompts(vocabulary, order),
                config,
                [2],
                adapter=adapter,
                generator=torch.Generator().manual_seed(at),
            )
            for at, (order, adapter) in enumerate(zip(orders, adapters, strict=True))
        ]
        return [(samples.token_ids, samples.logprobs) for samples in stack.sample(requests)]

    shared = sample()
    monkeypatch.setattr(stacked_model, "shares_prompts", lambda _: False)
    for (ids, logprobs), (plain_ids, plain_logprobs) in zip(shared, sample(), strict=True):
        assert torch.equal(ids, plain_ids)
        real = plain_ids[:, -logprobs.size(1) :] >= 0
        torch.testing.assert_close(logprobs[real], plain_logprobs[real], rtol=1e-4, atol=1e-5)


def test_finished_rows_leave_the_batch_and_change_no_token(
    make_model, tokenizer, large, monkeypatch
):
    model = make_model().requires_grad_(False)
    takes_attention_masks(model)
    asked = prompts(15, [0, 1, 2, 3] * 4)
    config = RolloutConfig(max_new_tokens=12, temperature=1.0, stop_strings=[])
    sizes = []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, options: sizes.append(len(options["input_ids"])), with_kwargs=True
    )
    results = []
    for is_own in (True, False):
        if not is_own:
            handle.remove()
            monkeypatch.setattr(transformers, "shares_prompts", lambda _: False)
        torch.manual_seed(0)
        ids, _ = generate(
            model, asked, tokenizer=tokenizer, config=config, end_ids=list(range(2, 7))
        )
        results.append((ids, torch.get_rng_state()))
    assert sizes[1] == 4  # the distinct prompts, after the comparison of the head
    assert 16 >= max(sizes[2:]) > sizes[-1]
    for own, plain in zip(*results, strict=True):
        assert torch.equal(own, plain)


# --- Passes over whole rows -----------------------------------------------------------------------

ORDER = [0, 1, 0, 2, 0, 1, 3]
REPLIES = [6, 3, 1, 4, 6, 2, 5]
PAIRS = [0, 2, 1, 5], [4, 0]
"""Two clients' pairs of replies, each to one prompt."""
ROUNDING = {"gemma4_text": 3e-5}
"""Of the largest entry, where sums of float32 in another order differ by more than 1e-5: by 1.2e-5
on a processor without AMX."""


def replies(vocabulary: int, *, preferences=None) -> Sequences:
    """Replies of several lengths, up to three to a prompt."""
    asked = replace(prompts(vocabulary, ORDER), preferences=preferences)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (len(ORDER), max(REPLIES)), generator=generator)
    return Sequences(asked, torch.cat([asked.token_ids, ids], 1), torch.tensor(REPLIES))


def with_adapter(model, *, dropout=0.0, **options):
    torch.manual_seed(0)
    lora = LoraSettings(r=2, alpha=4, target_modules=None, dropout=dropout)
    policy = add_adapter(model, PolicyConfig("it", lora=lora, **options), num_objectives=2)
    for parameter in adapter_parameters(policy).values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    heads.head_of(policy)
    return policy


def scored_rows(policy, rows, num_objectives, *, once):
    """Log-probabilities, and the gradients of their sums for several objectives."""
    coefficients = torch.randn(
        num_objectives, rows.num_rows, generator=torch.Generator().manual_seed(2)
    )
    parameters = list(adapter_parameters(policy).values())
    shared = Policy(policy, parameters, RolloutConfig(temperature=0.7), prompts_once=once)
    with PerSequenceGradients(policy, parameters) as gradients:
        output = shared.forward(rows, expand=gradients.expand)
        logprobs = shared.token_scores(output, rows).logprobs.masked_fill(~rows.mask, 0)
        jacobian = gradients.jacobian(logprobs.sum(1), coefficients)
    return logprobs.detach(), jacobian


@pytest.mark.parametrize("name", cases(TAKEN))
def test_every_architecture_has_the_log_probabilities_and_gradients_of_whole_rows(name, large):
    policy = with_adapter(ARCHITECTURES[name].model(SPECIAL))
    rows = replies(policy.config.get_text_config().vocab_size)
    if not may_pass_prompts_once(policy):
        pytest.skip("has layers without keys and values")
    for num_objectives in (2, 5):  # three replies share a prompt
        logprobs, jacobian = scored_rows(policy, rows, num_objectives, once=True)
        plain_logprobs, plain = scored_rows(policy, rows, num_objectives, once=False)
        assert (logprobs - plain_logprobs).abs().max() <= 1e-5 * plain_logprobs.abs().max()
        assert (jacobian - plain).abs().max() <= ROUNDING.get(name, 1e-5) * plain.abs().max()


def test_a_conditioned_policy_shares_prompts_at_equal_preferences(large):
    conditioning = ConditioningConfig(kind="preference")
    policy = with_adapter(ARCHITECTURES["llama"].model(SPECIAL), conditioning=conditioning)
    shares = torch.tensor([0.1, 0.5, 0.1, 0.5, 0.9, 0.5, 0.2])  # two for the first prompt
    rows = replies(policy.config.vocab_size, preferences=torch.stack([shares, 1 - shares], 1))
    assert len(rows.queries.distinct()[0]) == 5
    logprobs, jacobian = scored_rows(policy, rows, 2, once=True)
    plain_logprobs, plain = scored_rows(policy, rows, 2, once=False)
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-5, atol=1e-5)
    assert (jacobian - plain).abs().max() <= 1e-5 * plain.abs().max()
    equal = replace(rows.queries, preferences=torch.full((7, 2), 0.5))
    _, elsewhere = scored_rows(policy, replace(rows, queries=equal), 2, once=True)
    assert (jacobian - elsewhere).abs().max() > 1e-3 * plain.abs().max()


def test_common_architectures_pass_prompts_once(large):
    for name in ("llama", "qwen3", "phi3"):
        policy = with_adapter(ARCHITECTURES[name].model(SPECIAL))
        assert may_pass_prompts_once(policy), name


@pytest.mark.slow
def test_most_architectures_pass_prompts_once(large):
    policies = [with_adapter(ARCHITECTURES[name].model(SPECIAL)) for name in TAKEN]
    assert sum(map(may_pass_prompts_once, policies)) >= 10


COUNTS = (2, 2, 2), (5, 5, 5), (1, 3, 2)
"""Three clients' numbers of objectives."""


@pytest.mark.parametrize("name", cases(STACKED))
def test_every_architecture_has_the_gradients_of_whole_rows_in_joint_passes(name, large):
    policy = with_adapter(ARCHITECTURES[name].model(SPECIAL))
    if not may_pass_prompts_once(policy):
        pytest.skip("has layers without keys and values")
    vocabulary = policy.config.get_text_config().vocab_size
    batches = [replies(vocabulary).rows(torch.tensor(at)) for at in ([0, 2, 4], [6, 1, 5], [3])]

    def found(once):
        """Sums by sequence and the gradients of all; for each of the counts, those of rows."""
        stack = StackedModel(policy, prompts_once=once)
        torch.manual_seed(3)
        adapters = [stack.new_adapter() for _ in batches]
        for adapter in adapters:
            for parameter in adapter.values():
                parameter.data += 0.1 * torch.randn(parameter.shape)
        parts = [
            ClientPart(rows, adapter, has_gradient=True, is_tapped=True)
            for rows, adapter in zip(batches, adapters, strict=True)
        ]
        sums, jacobians = {}, {}
        for counts in COUNTS:
            generator = torch.Generator().manual_seed(2)
            outputs = stack.forward(parts)
            losses = [
                output.token_scores(0.7).logprobs.masked_fill(~rows.mask, 0).sum(1)
                for output, rows in zip(outputs, batches, strict=True)
            ]
            wanted = [
                Weighted(
                    output.place,
                    each,
                    torch.randn(count, rows.num_rows, generator=generator),
                    retain_graph=False,
                )
                for output, each, rows, count in zip(outputs, losses, batches, counts, strict=True)
            ]
            sums[counts] = torch.cat(losses).detach()
            jacobians[counts] = stack.per_sequence_jacobian(wanted)
        # untapped, the graph goes through the prompts
        outputs = stack.forward([replace(part, is_tapped=False) for part in parts])
        totals = [
            output.token_scores(0.7).logprobs.masked_fill(~rows.mask, 0).sum()[None]
            for output, rows in zip(outputs, batches, strict=True)
        ]
        jacobians["untapped"] = stack.jacobian(
            [Losses(o.place, own) for o, own in zip(outputs, totals, strict=True)]
        )
        return sums, jacobians

    (sums, jacobians), (plain_sums, plain_jacobians) = found(True), found(False)
    for counts, expected in plain_sums.items():
        assert sums[counts].shape == expected.shape, counts
        assert torch.allclose(sums[counts], expected, rtol=1e-5, atol=1e-5), counts
    for counts, expected in plain_jacobians.items():
        for own, plain in zip(jacobians[counts], expected, strict=True):
            assert own.shape == plain.shape, counts
            assert (own - plain).abs().max() <= 1e-5 * plain.abs().max(), counts


def test_joint_passes_take_the_prompts_of_pairs_once_for_all_objectives(large):
    policy = with_adapter(ARCHITECTURES["llama"].model(SPECIAL))
    batches = [replies(policy.config.vocab_size).rows(torch.tensor(at)) for at in PAIRS]
    groups = [torch.arange(len(at)) // 2 for at in PAIRS]
    generator = torch.Generator().manual_seed(2)
    factors = [torch.randn(4, len(at) // 2, generator=generator) for at in PAIRS]
    stack = StackedModel(policy, prompts_once=True)
    adapters = [stack.new_adapter() for _ in batches]
    layer = policy.get_base_model().model.layers[0].self_attn.q_proj

    def found(coefficients, groups):
        parts = [
            ClientPart(rows, adapter, has_gradient=True, is_tapped=True)
            for rows, adapter in zip(batches, adapters, strict=True)
        ]
        passes: list[int] = []

        def watch(_, __, output):
            if output.requires_grad:
                output.register_hook(lambda gradient: passes.append(len(gradient)))

        handle = layer.register_forward_hook(watch)
        outputs = stack.forward(parts)
        handle.remove()
        wanted = [
            Weighted(
                output.place,
                output.token_scores(0.7).logprobs.masked_fill(~rows.mask, 0).sum(1),
                own,
                retain_graph=False,
                groups=group,
            )
            for output, rows, own, group in zip(outputs, batches, coefficients, groups, strict=True)
        ]
        return stack.per_sequence_jacobian(wanted), passes

    jacobians, passes = found(factors, groups)
    by_reply = [own[:, group] for own, group in zip(factors, groups, strict=True)]
    plain, plain_passes = found(by_reply, [None, None])
    assert passes == [6, 3]  # replies, and their prompts
    assert plain_passes == [6, 3, 3]
    for own, expected in zip(jacobians, plain, strict=True):
        assert (own - expected).abs().max() <= 1e-5 * expected.abs().max()


# --- Dropout of the adapter -----------------------------------------------------------------------


@pytest.mark.slow
def test_replies_to_a_prompt_share_its_dropout_masks_and_have_their_own(large):
    policy = with_adapter(ARCHITECTURES["llama"].model(SPECIAL), dropout=0.5)
    set_mode(policy, is_training=True)
    rows = replies(policy.config.vocab_size).rows(torch.tensor([0, 0, 3]))
    whole = rows.rows(torch.tensor([1]))
    torch.manual_seed(0)
    logprobs, jacobian = scored_rows(policy, rows, 2, once=True)
    assert logprobs[0, 0] == logprobs[1, 0]  # predicted by the prompt alone
    assert (logprobs[0, 1:6] != logprobs[1, 1:6]).all()
    _, again = scored_rows(policy, rows, 2, once=True)
    assert not torch.allclose(jacobian, again)
    # log-probabilities have the same distribution as with a prompt in each row
    draws = []
    for once in (True, False):
        torch.manual_seed(once)
        found = [scored_rows(policy, whole, 1, once=once)[0][0] for _ in range(300)]
        draws.append(torch.stack(found))
    error = torch.stack([each.var(0) / 300 for each in draws]).sum(0).sqrt()
    assert (error < 0.25).all()
    assert ((draws[0].mean(0) - draws[1].mean(0)).abs() < 4 * error).all()


@pytest.mark.parametrize("lengths", [REPLIES, [1] * 7])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_joint_passes_draw_the_dropout_masks_that_each_part_draws_alone(name, lengths, large):
    policy = with_adapter(ARCHITECTURES[name].model(SPECIAL), dropout=0.5)
    rows = replies(policy.config.get_text_config().vocab_size)
    rows = replace(rows, num_tokens=torch.tensor(lengths))
    batches = [rows.rows(torch.tensor(at)) for at in ([0, 2, 4], [6, 1, 5], [3])]
    short = replace(batches[2], query_responses=batches[2].query_responses[:, :-4])
    batches[2] = replace(short, num_tokens=short.num_tokens.clamp(max=2))
    set_mode(policy, is_training=True)
    expected, states = [], []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        expected.append(scored_rows(policy, batch, 2, once=True))
        states.append(torch.get_rng_state())
    stack = StackedModel(policy, prompts_once=True)
    parts = [
        ClientPart(
            batch, stack.new_adapter(), has_gradient=True, is_tapped=True, is_training=True,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed, batch in enumerate(batches)
    ]  # fmt: skip
    outputs = stack.forward(parts)
    scores = [output.token_scores(0.7).logprobs for output in outputs]
    coefficients = [
        torch.randn(2, batch.num_rows, generator=torch.Generator().manual_seed(2))
        for batch in batches
    ]
    wanted = [
        Weighted(output.place, each.masked_fill(~batch.mask, 0).sum(1), own, retain_graph=False)
        for output, each, batch, own in zip(outputs, scores, batches, coefficients, strict=True)
    ]
    jacobians = stack.per_sequence_jacobian(wanted)
    for (logprobs, jacobian), each, own, batch in zip(
        expected, scores, jacobians, batches, strict=True
    ):
        torch.testing.assert_close(logprobs, each.masked_fill(~batch.mask, 0), rtol=1e-5, atol=1e-5)
        assert (jacobian - own).abs().max() <= 1e-5 * jacobian.abs().max()
    assert [part.generator.get_state().tolist() for part in parts] == [s.tolist() for s in states]


# --- A local step ---------------------------------------------------------------------------------

ASKED = [Prompt(text) for text in ("abc", "de fgh", "a", "jihg fed")]


def step(trainer, rows):
    """Rows of each pass of a local step on whole batches, and its gradients."""
    handle = trainer.policy_model.get_base_model().register_forward_pre_hook(
        lambda _module, _args, options: rows.append(tuple(options["input_ids"].shape)),
        with_kwargs=True,
    )
    sampled = trainer.sample(trainer.encode(ASKED))
    rollouts = trainer.with_logprobs(sampled)
    scores = trainer.score(rollouts)
    experience = trainer.learner.estimator.experience(rollouts, scores.scores, scores.rewards)
    rows.clear()
    trainer.with_logprobs(sampled)
    (indices,) = trainer.minibatch_indices()
    gradients = trainer.gradients(trainer.learner, experience.rows(indices))
    handle.remove()
    return indices, gradients, rollouts.responses.size(1)


def test_all_passes_of_a_step_take_prompts_once_and_agree_in_bfloat16(
    make_trainer, make_policy, letter_count, large
):
    policy = make_policy().to(torch.bfloat16)
    rewards = {letter: letter_count(letter) for letter in "ab"}
    options = {"batch_size": 16, "minibatch_size": 16, "num_epochs": 1}
    trainer = make_trainer(rewards=rewards, estimator="critic_free", policy=policy, **options)
    torch.manual_seed(0)
    rows: list[tuple[int, int]] = []
    indices, gradients, num_tokens = step(trainer, rows)
    width = trainer.encode(ASKED).token_ids.size(1)
    assert rows == [(4, width), (16, num_tokens - 1)] * 3  # policy, reference, update
    assert indices.tolist() == list(range(16))
    # the policy has not moved: any other way would round differently
    assert gradients.aux.metrics["log_ratio_mean_square"] == 0


def test_parts_of_a_minibatch_have_whole_groups_by_length_and_no_needless_padding(
    make_trainer, letter_count, large
):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    trainer = make_trainer(rewards=rewards, estimator="critic_free")
    torch.manual_seed(0)
    rollouts = trainer.with_logprobs(trainer.sample(trainer.encode(ASKED)))
    scores = trainer.score(rollouts)
    experience = trainer.learner.estimator.experience(rollouts, scores.scores, scores.rewards)
    assert experience.parts(None) == experience.parts(16) == [experience]
    parts = experience.parts(4)
    rows = [part.rollouts for part in parts]
    assert all(len({prompt.text for prompt in each.queries.prompts}) == 1 for each in rows)
    longest = [int((each.queries.lengths + each.num_tokens).max()) for each in rows]
    assert [set(part.lengths.tolist()) for part in parts] == [{own} for own in sorted(longest)]
    for part, each in zip(parts, rows, strict=True):
        width = each.queries.token_ids.size(1)
        assert each.queries.lengths.tolist() == [width] * 4
        assert torch.equal(each.query_responses[:, :width], each.queries.token_ids)
        assert each.responses.size(1) == part.kl.size(1) == rollouts.responses.size(1)


def test_replies_to_a_prompt_are_adjacent_in_minibatches_only_where_passes_share_it(
    make_trainer, letter_count, monkeypatch
):
    rewards, found = {"a": letter_count("a")}, []
    for limit in (10**9, 0):
        monkeypatch.setattr(heads, "LARGE_VOCABULARY", limit)
        monkeypatch.setattr(heads, "_formulas", WeakKeyDictionary())
        trainer = make_trainer(rewards=rewards, estimator="critic_free")
        np.random.seed(0)
        found.append([rows.tolist() for rows in trainer.minibatch_indices()])
    plain, adjacent = found
    assert adjacent == [sorted(rows) for rows in plain] != plain


@pytest.mark.parametrize(
    ("estimator", "options", "policy_options", "expected"),
    [
        ("critic_free", {}, {}, True),
        ("critic_free", {}, {"dropout": 0.1}, True),
        ("critic_free", {}, {"gradient_checkpointing": True}, False),
        ("ppo", {}, {}, False),
        ("dpo", {}, {}, True),
    ],
)
def test_prompts_are_passed_once_where_batches_repeat_them_and_passes_allow_it(
    make_trainer, make_model, letter_count, large, estimator, options, policy_options, expected
):
    policy = with_adapter(make_model(), **policy_options)
    config = ESTIMATORS[estimator](**options)
    trainer = MultiObjectiveTrainer(
        config, rollout_config=RolloutConfig(stop_strings=[]), policy=policy, tokenizer=None,
        reward_fns={"a": letter_count("a")}, num_rounds=1,
    )  # fmt: skip
    assert trainer.prompts_once == expected
    assert trainer._policy.prompts_once == trainer._sampler.prompts_once == expected
    assert stacked_trainers(trainer)().prompts_once == expected


@pytest.mark.parametrize("is_stacked", [False, True])
def test_the_gradient_of_a_weighted_sum_goes_through_shared_prompts(
    make_trainer, letter_count, large, is_stacked
):
    rewards = {letter: letter_count(letter) for letter in "ab"}
    alone = make_trainer(rewards=rewards, estimator="critic_free")
    torch.manual_seed(0)
    rollouts = alone.with_logprobs(alone.sample(alone.encode(ASKED)))
    scores = alone.score(rollouts)
    experience = alone.learner.estimator.experience(rollouts, scores.scores, scores.rewards)
    trainer = stacked_trainers(alone)() if is_stacked else alone
    for parameter in trainer.adapter_parameters.values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    learner, weights = trainer.new_learner(), torch.tensor([0.3, 0.7])
    rows, mixed = (
        lockstep([partial(trainer.gradients, learner, experience, each)], max_size=64)[0]
        for each in (None, weights)
    )
    assert trainer.prompts_once
    expected = weights @ rows.jacobian
    assert (mixed.jacobian[0] - expected).norm() <= 1e-5 * expected.norm()


def test_other_estimators_pass_whole_rows(make_trainer, letter_count, large):
    class Plain(CriticFreeConfig):
        shares_prompts = False

    trainer = make_trainer(rewards={"a": letter_count("a")}, estimator="critic_free")
    settings = {**trainer.settings(), "config": Plain()}
    assert trainer.prompts_once
    assert not MultiObjectiveTrainer(**settings).prompts_once
    assert not CriticFreeConfig.__mro__[1].shares_prompts


def test_replies_of_one_token_need_no_pass_of_their_own(large):
    policy = with_adapter(ARCHITECTURES["llama"].model(SPECIAL))
    rows = replies(policy.config.vocab_size)
    short = replace(
        rows, query_responses=rows.query_responses[:, :-5], num_tokens=torch.ones(7).long()
    )
    logprobs, jacobian = scored_rows(policy, short, 2, once=True)
    plain_logprobs, plain = scored_rows(policy, short, 2, once=False)
    assert logprobs.shape == (7, 1)
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=1e-5, atol=1e-6)
    assert (jacobian - plain).abs().max() <= 1e-5 * plain.abs().max()
