import contextlib
import copy
from dataclasses import dataclass, field

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from firm.alignment import decoding
from firm.alignment.advantages import kl_penalty
from firm.alignment.decoding import random_numbers, sampled_tokens
from firm.alignment.generation import end_token_ids
from firm.alignment.live_bytes import LiveBytes
from firm.alignment.policy import without_needless_warnings
from firm.alignment.prompts import Prompt, PromptFormat
from firm.alignment.rollout import Sampler, encode_prompts, find_ends, rollout
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.sequences import (
    INVALID_LOGPROB,
    Queries,
    Rollouts,
    forward,
    left_padded,
    response_logits,
    token_logprobs,
)
from firm.federation import RandomStream, Team
from tests.sampling import generate
from tests.tokens import queries

PAD, BOS, EOS = 0, 1, 2
QUERIES = ["abc", "jihgfe", "d", "cafe bad"]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(make_model, request):
    """Relative positions forgive a shift, absolute ones (GPT-2) do not."""
    return make_model(request.param)


@pytest.fixture(scope="module")
def llama(make_model):
    return make_model()


@pytest.fixture(scope="module")
def policy(make_policy):
    return make_policy()


@pytest.fixture(scope="module")
def query_ids(tokenizer) -> torch.Tensor:
    """Four prompts of different lengths, padded on the left, [4, 8]."""
    return tokenizer(QUERIES, padding=True, return_tensors="pt")["input_ids"]


def test_sampling_holds_the_scores_of_one_token_at_a_time(make_model, tokenizer, query_ids):
    model = make_model(vocab_size=2_000, num_hidden_layers=1)
    num_new, config = 40, settings_of(max_new_tokens=40)
    with LiveBytes(model) as live:
        ids, _ = generate(model, queries(query_ids), tokenizer=tokenizer, config=config, end_ids=[])
    assert ids.size(1) == query_ids.size(1) + num_new
    assert live.peak < len(query_ids) * num_new * 2_000 * 4 / 2  # half of all scores


def settings_of(**changes) -> RolloutConfig:
    return RolloutConfig(**{"max_new_tokens": 10, "stop_strings": [], **changes})


def real_tokens(row: torch.Tensor) -> torch.Tensor:
    return row[row != PAD]


@torch.no_grad()
def logprobs_without_padding(model, query, response, temperature) -> torch.Tensor:
    """Tempered log-probabilities of a response by one plain pass over the bare text, [T]."""
    ids = torch.cat([real_tokens(query), response])
    logits = model(input_ids=ids.unsqueeze(0)).logits[0, -len(response) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(response)), response]


@settings(max_examples=20, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_token_logprobs_are_log_softmax_and_gather(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(3, 4, 15, generator=generator)).to(dtype)
    token_ids = torch.randint(0, 15, (3, 4), generator=generator)
    logprobs = token_logprobs(logits, token_ids)
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = torch.log_softmax(logits.double(), -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)


def test_token_logprobs_have_the_gradient_of_log_softmax():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    token_ids = torch.tensor([[0, 1, 2], [3, 4, 0]])
    (gradient,) = torch.autograd.grad(token_logprobs(logits, token_ids).sum(), logits)
    expected = torch.nn.functional.one_hot(token_ids, 5) - logits.softmax(-1)
    torch.testing.assert_close(gradient, expected)


def test_padding_does_not_move_a_text(model, query_ids):
    response = torch.tensor([[5, 6, PAD, PAD], [7, 8, 9, 10], [4, 4, 4, PAD], [14, 9, PAD, PAD]])
    ids = torch.cat([query_ids, response], dim=1)
    padded = forward(model, ids, ids != PAD)
    for i, (query, tail) in enumerate(zip(query_ids, response, strict=True)):
        text = torch.cat([real_tokens(query), real_tokens(tail)])
        alone = model(input_ids=text.unsqueeze(0), output_hidden_states=True)
        end = query_ids.size(1) + len(real_tokens(tail))
        place = slice(end - len(text), end)
        logprobs = padded.logits[i, place].log_softmax(-1)
        torch.testing.assert_close(logprobs, alone.logits[0].log_softmax(-1), rtol=1e-5, atol=1e-5)
        hidden, own = padded.hidden_states[-1][i, place], alone.hidden_states[-1][0]
        torch.testing.assert_close(hidden, own, rtol=1e-4, atol=1e-4)


def test_response_logits_are_those_before_each_response_token():
    logits = torch.arange(10.0).view(1, 5, 2)  # Q = 3, T = 2: positions 2 and 3 predict it
    tempered = response_logits(logits, 3, 0.5)
    torch.testing.assert_close(tempered, torch.tensor([[[8.0, 10.0], [12.0, 14.0]]]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(
    model, query_ids, tokenizer, temperature
):
    config = settings_of(temperature=temperature)
    query_ids = query_ids.repeat(4, 1)
    torch.manual_seed(0)
    ids, logprobs = generate(
        model, queries(query_ids), tokenizer=tokenizer, config=config, end_ids=[EOS]
    )
    assert torch.equal(ids[:, : query_ids.size(1)], query_ids)
    responses = ids[:, query_ids.size(1) :]
    assert logprobs.shape == responses.shape
    ends, _, _ = find_ends(responses, tokenizer=tokenizer, end_ids=[EOS], stop_strings=[])
    assert (ends > 4).sum() > 3  # there is something to compare
    for query, response, ours, end in zip(query_ids, responses, logprobs, ends, strict=True):
        expected = logprobs_without_padding(model, query, response[:end], temperature)
        torch.testing.assert_close(ours[:end], expected, rtol=0, atol=1e-4)


def test_a_static_cache_samples_the_same_tokens(model, query_ids, tokenizer):
    samples, kinds = [], []
    for kind in ("dynamic", "static"):

        def note(module, args, kwargs):
            kinds.append(type(kwargs["past_key_values"]).__name__)

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        torch.manual_seed(0)
        samples.append(
            generate(
                model,
                queries(query_ids),
                tokenizer=tokenizer,
                config=settings_of(cache=kind),
                end_ids=[EOS],
            )
        )
        handle.remove()
    (ids, logprobs), (static_ids, static_logprobs) = samples
    assert torch.equal(ids, static_ids)
    torch.testing.assert_close(logprobs, static_logprobs)
    assert set(kinds) == {"DynamicCache", "StaticCache"}


@pytest.fixture(params=["exponential", "uniform"])
def numbers(request, monkeypatch) -> str:
    """The random numbers that tokens are sampled by: those of a small or a large vocabulary."""
    if request.param == "uniform":
        monkeypatch.setattr(decoding, "LARGE_VOCABULARY", 0)
    return request.param


@pytest.mark.parametrize("temperature", [0.4, 2.0])
def test_tokens_are_sampled_from_the_whole_tempered_distribution(
    llama, tokenizer, temperature, numbers
):
    query = torch.tensor([[4, 9, 7]])
    with torch.no_grad():
        logits = llama(input_ids=query).logits[0, -1]
    config = settings_of(max_new_tokens=1, temperature=temperature)
    torch.manual_seed(0)
    ids, _ = generate(
        llama, queries(query.expand(20_000, 3)), tokenizer=tokenizer, config=config, end_ids=[EOS]
    )
    shares = torch.bincount(ids[:, -1], minlength=15) / len(ids)

    def distance(probabilities):  # total variation
        return (shares - probabilities).abs().sum().item() / 2

    # 20,000 draws from 15 tokens: expected distance below sqrt(15 / 20,000) / 2 = 0.014
    assert distance((logits / temperature).softmax(0)) < 0.02
    assert distance(logits.softmax(0)) > 0.1


@settings(max_examples=50, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1 - 2**-53, None]))
def test_a_uniform_number_chooses_the_token_at_which_the_probabilities_sum_to_it(seed, number):
    """Rows of a large vocabulary in which most tokens have probability 0, or nearly so."""
    generator = torch.Generator().manual_seed(seed)
    scores = 10 * torch.randn(4, 9_000, generator=generator)
    scores[:2, 3:] = -torch.inf
    scores[1, :2] = -torch.inf
    numbers = random_numbers(4, 9_000, device=scores.device, generator=generator)
    assert numbers.shape == (4,)
    numbers = numbers if number is None else torch.full_like(numbers, number)
    tokens, logprobs = sampled_tokens(scores, numbers)
    exact = scores.double().log_softmax(-1)
    own = exact.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), own, rtol=1e-5, atol=1e-6)
    assert tokens[1] == 2
    for row, token, own in zip(exact.exp(), tokens.tolist(), numbers.tolist(), strict=True):
        assert row[:token].sum() <= own + 1e-6
        assert own - 1e-6 <= row[: token + 1].sum()


def test_logits_that_are_not_finite_are_an_error_when_sampled(make_model, tokenizer, numbers):
    model, query = make_model(), torch.tensor([[4, 9, 7]])
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(RuntimeError, match="sampling the replies: the policy's logits are not"):
        generate(model, queries(query), tokenizer=tokenizer, config=settings_of(), end_ids=[])


def test_a_temperature_near_zero_gives_the_greedy_reply(llama, tokenizer, numbers):
    query = torch.tensor([[4, 9, 7]])
    config = settings_of(max_new_tokens=6, temperature=1e-3)
    ids, logprobs = generate(llama, queries(query), tokenizer=tokenizer, config=config, end_ids=[])
    with torch.no_grad():
        greedy = llama(input_ids=ids).logits[0, 2:-1].argmax(-1)
    assert torch.equal(ids[0, 3:], greedy)
    assert logprobs.abs().max() < 1e-3


def test_the_checkpoint_s_own_sampling_defaults_do_not_count(llama, tokenizer, query_ids):
    def sample(model):
        torch.manual_seed(0)
        return generate(
            model, queries(query_ids), tokenizer=tokenizer, config=settings_of(), end_ids=[EOS]
        )

    opinionated = copy.deepcopy(llama)
    defaults = opinionated.generation_config
    defaults.do_sample, defaults.temperature, defaults.repetition_penalty = True, 0.1, 1.5
    defaults.top_k, defaults.top_p, defaults.max_length = 1, 0.1, 9
    for ours, expected in zip(sample(opinionated), sample(llama), strict=True):
        assert torch.equal(ours, expected)
    kept = defaults.to_dict()
    with without_needless_warnings():
        adapted = peft.get_peft_model(opinionated, peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    for model in (opinionated, adapted):
        generate(
            model,
            queries(query_ids),
            tokenizer=tokenizer,
            config=settings_of(cache="static"),  # by transformers' own loop
            end_ids=[EOS],
        )
        assert opinionated.generation_config.to_dict() == kept


def test_equal_seeds_give_equal_responses_and_others_do_not(llama, tokenizer, query_ids):
    def sample(seed, noise):
        torch.manual_seed(noise)  # the stream does not look at the global generator
        with RandomStream(seed, "rollout"):
            return generate(
                llama, queries(query_ids), tokenizer=tokenizer, config=settings_of(), end_ids=[EOS]
            )

    first, again, other = sample(0, 1), sample(0, 2), sample(1, 1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])


def test_rows_are_padded_after_any_end_token(llama, tokenizer, query_ids):
    end_ids = [EOS, 4, 9]
    torch.manual_seed(0)
    ids, _ = generate(
        llama,
        queries(query_ids.repeat(8, 1)),
        tokenizer=tokenizer,
        config=settings_of(),
        end_ids=end_ids,
    )
    responses = ids[:, query_ids.size(1) :]
    for end_id in (4, 9):
        assert (responses == end_id).any()
    after = sum((responses == i).long() for i in end_ids).cumsum(1).roll(1, 1)
    after[:, 0] = 0
    assert (responses[after > 0] == PAD).all()


def ends(tokenizer, texts, *, end_ids=(EOS,), stop_strings=()):
    """`find_ends` of texts of one length, in which "$" stands for EOS and "_" for the pad token."""
    names = {"$": EOS, "_": PAD, "^": BOS}
    rows = [
        [names[t] if t in names else tokenizer.convert_tokens_to_ids(t) for t in text]
        for text in texts
    ]
    lengths, ended, completions = find_ends(
        torch.tensor(rows), tokenizer=tokenizer, end_ids=end_ids, stop_strings=stop_strings
    )
    return lengths.tolist(), ended.tolist(), completions


def test_a_response_ends_at_its_first_eos_which_belongs_to_it_but_not_to_the_text(tokenizer):
    assert ends(tokenizer, ["ab$__", "a$bc$", "$____", "abcd$"]) == (
        [3, 2, 1, 5],
        [True, True, True, True],
        ["ab", "a", "", "abcd"],
    )


def test_a_response_that_nothing_ends_is_whole_and_did_not_end(tokenizer):
    assert ends(tokenizer, ["abcde"], stop_strings=["aa"]) == ([5], [False], ["abcde"])


def test_an_end_token_that_is_not_special_ends_a_response_and_stays_in_its_text(tokenizer):
    newline = tokenizer.convert_tokens_to_ids("j")
    assert ends(tokenizer, ["abjcd", "ab$jc", "abcde"], end_ids=(EOS, newline)) == (
        [3, 3, 5],
        [True, True, False],
        ["abj", "ab", "abcde"],
    )


def test_a_response_ends_where_a_stop_string_is_complete_and_its_text_before_it(tokenizer):
    assert ends(tokenizer, ["abcde", "cabab", "aaaab", "ab$__"], stop_strings=["ab"]) == (
        [2, 3, 5, 2],
        [True, True, True, True],
        ["", "c", "aaa", ""],
    )


def test_the_first_of_several_stop_strings_counts(tokenizer):
    stop_strings = ["fg", "cd", "a"]
    assert ends(tokenizer, ["bcdfg", "bfgcd", "bbbba"], stop_strings=stop_strings) == (
        [3, 3, 5],
        [True, True, True],
        ["b", "b", "bbbb"],
    )


def test_a_stop_string_after_the_end_does_not_count(tokenizer):
    assert ends(tokenizer, ["c$ab_"], stop_strings=["ab"]) == ([2], [True], ["c"])


def test_a_stop_string_may_be_complete_inside_a_token(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["bcd"])
    rows = torch.tensor([tokenizer.convert_tokens_to_ids(["e", "a", "bcd", "e"])])
    lengths, ended, texts = find_ends(rows, tokenizer=tokenizer, end_ids=[EOS], stop_strings=["ab"])
    assert (lengths.tolist(), ended.tolist(), texts) == ([3], [True], ["e"])


NEXT_TURN = "a\n\nHuman:b"
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "template", "stop_strings", "text"),
    [
        ("auto", None, None, "a"),
        ("hh", CHAT, None, "a"),
        ("auto", CHAT, None, NEXT_TURN),
        ("plain", None, None, NEXT_TURN),
        ("auto", None, [], NEXT_TURN),
        ("auto", CHAT, ["b"], NEXT_TURN[:-1]),
    ],
)
def test_the_next_human_turn_ends_a_response_where_prompts_have_human_turns(
    make_tokenizer, make_policy, name, template, stop_strings, text
):
    tokenizer, policy = make_tokenizer(), make_policy()
    tokenizer.add_tokens(["\n\n", "Human", ":"])
    tokenizer.chat_template = template
    config = settings_of(stop_strings=stop_strings)
    format = PromptFormat(name=name)
    sampler = Sampler(policy, tokenizer, config, policy.disable_adapter, format)
    rows = torch.tensor([tokenizer.convert_tokens_to_ids(["a", "\n\n", "Human", ":", "b"])])
    _, ended, texts = find_ends(
        rows, tokenizer=tokenizer, end_ids=[EOS], stop_strings=sampler.stop_strings
    )
    assert (ended.tolist(), texts) == ([text != NEXT_TURN], [text])


def test_a_sampled_pad_token_is_a_token_as_any_other(tokenizer):
    assert ends(tokenizer, ["ab_cd", "_abcd", "ab_c$"]) == (
        [5, 5, 5],
        [False, False, True],
        ["abcd", "abcd", "abc"],
    )


def test_other_special_tokens_are_kept_as_tokens_but_not_as_text(tokenizer):
    assert ends(tokenizer, ["a^b$_"]) == ([4], [True], ["ab"])


def test_end_tokens_are_eos_and_the_configured_ones_in_order(tokenizer, make_tokenizer):
    config = settings_of(end_tokens=["j", "a"])
    j, a = tokenizer.convert_tokens_to_ids(["j", "a"])
    assert end_token_ids(tokenizer, config) == [EOS, j, a]
    assert end_token_ids(make_tokenizer(eos_token=None), config) == [j, a]


@pytest.mark.parametrize(
    ("own", "expected"), [(None, [EOS]), (7, [EOS, 7]), ([7, EOS, 8], [EOS, 7, 8]), ([], [EOS])]
)
def test_the_ends_of_the_model_s_generation_configuration_count(tokenizer, own, expected):
    generation_config = GenerationConfig(eos_token_id=own)
    assert end_token_ids(tokenizer, settings_of(), generation_config) == expected


def test_an_end_token_that_the_tokenizer_does_not_know_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"rollout.end_tokens: 'x' is not a token"):
        end_token_ids(tokenizer, settings_of(end_tokens=["j", "x"]))


def roll(policy, tokenizer, query_ids, *, seed=0, **changes) -> Rollouts:
    torch.manual_seed(seed)
    sampler = Sampler(policy, tokenizer, settings_of(**changes), policy.disable_adapter)
    return rollout(sampler, queries(query_ids))


def test_both_policies_logprobs_are_those_of_plain_forward_passes(policy, tokenizer, query_ids):
    rollouts = roll(policy, tokenizer, query_ids, temperature=0.8)
    assert (rollouts.logprobs - rollouts.reference_logprobs).abs().max() > 0.1
    for i, end in enumerate(rollouts.num_tokens):
        text = query_ids[i], rollouts.responses[i, :end]
        expected = logprobs_without_padding(policy, *text, 0.8)
        torch.testing.assert_close(rollouts.logprobs[i, :end], expected, rtol=0, atol=1e-4)
        with policy.disable_adapter():
            expected = logprobs_without_padding(policy, *text, 0.8)
        ours = rollouts.reference_logprobs[i, :end]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("forward_batch_size", [1, 3, 5, 64])
def test_chunks_of_any_size_give_one_batch(policy, tokenizer, query_ids, forward_batch_size):
    rollouts = roll(
        policy,
        tokenizer,
        query_ids.repeat(2, 1),
        end_tokens=["a", "c", "e", "g"],
        forward_batch_size=forward_batch_size,
    )
    num_tokens = rollouts.num_tokens
    assert num_tokens.min() < num_tokens.max() <= rollouts.logprobs.size(1) <= 10
    shape = (8, rollouts.logprobs.size(1))
    assert rollouts.logprobs.shape == rollouts.reference_logprobs.shape == shape
    assert rollouts.responses.shape == rollouts.mask.shape == shape
    assert rollouts.context_length == query_ids.size(1)
    assert torch.equal(rollouts.query_responses[:, : query_ids.size(1)], query_ids.repeat(2, 1))
    assert len(rollouts.completions) == len(rollouts.ended) == 8
    for i, end in enumerate(num_tokens):
        expected = logprobs_without_padding(
            policy, query_ids[i % 4], rollouts.responses[i, :end], 0.7
        )
        torch.testing.assert_close(rollouts.logprobs[i, :end], expected, rtol=0, atol=1e-4)


def test_padding_has_the_invalid_logprob_in_both_policies_and_so_no_kl(
    policy, tokenizer, query_ids
):
    rollouts = roll(policy, tokenizer, query_ids, stop_strings=["a", "c", "e"], end_tokens=["g"])
    padding = ~rollouts.mask
    assert padding.any()
    assert (rollouts.logprobs[padding] == INVALID_LOGPROB).all()
    assert (rollouts.reference_logprobs[padding] == INVALID_LOGPROB).all()
    assert (rollouts.logprobs[rollouts.mask] <= 0).all()
    for form in ("k1", "k3"):
        kl = kl_penalty(rollouts.logprobs, rollouts.reference_logprobs, form=form)
        assert torch.equal(kl[padding], torch.zeros_like(kl[padding]))


def test_an_adapter_that_changes_nothing_has_no_kl(make_policy, tokenizer, query_ids):
    rollouts = roll(make_policy(fresh=True), tokenizer, query_ids)
    kl = kl_penalty(rollouts.logprobs, rollouts.reference_logprobs)
    # the policy's come from cached steps, the reference's from one pass: float32 rounding remains
    assert kl.abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_below_float32_an_adapter_that_changes_nothing_has_no_kl_at_all(
    make_policy, tokenizer, query_ids, dtype
):
    policy = make_policy(dtype=dtype, fresh=True)
    for seed in range(3):
        rollouts = roll(policy, tokenizer, query_ids, seed=seed, forward_batch_size=3)
        assert torch.equal(rollouts.logprobs, rollouts.reference_logprobs)


def test_logits_below_float32_lose_no_digit_before_their_softmax():
    logits = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0)).bfloat16() * 20
    token_ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = token_logprobs(response_logits(logits, 3, 0.7), token_ids)
    expected = torch.log_softmax(logits[:, 2:-1].double() / (0.7 + 1e-7), dim=-1)
    expected = expected.gather(-1, token_ids[..., None]).squeeze(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)


def test_the_reference_is_asked_inside_its_context_only(policy, tokenizer, query_ids):
    inside, seen = [False], []

    @contextlib.contextmanager
    def reference():
        inside[0] = True
        yield
        inside[0] = False

    handle = policy.register_forward_pre_hook(lambda *_: seen.append(inside[0]))
    try:
        torch.manual_seed(0)
        sampler = Sampler(policy, tokenizer, settings_of(forward_batch_size=2), reference)
        rollouts = rollout(sampler, queries(query_ids))
    finally:
        handle.remove()
    assert seen.count(True) == 2  # one pass per chunk
    kl = kl_penalty(rollouts.logprobs, rollouts.reference_logprobs)
    assert kl.abs().max() < 1e-5  # this reference leaves the adapter on


def test_texts_are_the_decoded_responses_up_to_their_end(policy, tokenizer, query_ids):
    rollouts = roll(policy, tokenizer, query_ids)
    for text, response, end in zip(
        rollouts.completions, rollouts.responses, rollouts.num_tokens, strict=True
    ):
        assert text == tokenizer.decode(response[:end], skip_special_tokens=True)


def test_a_rollout_tells_at_each_token_how_many_replies_it_has(policy, tokenizer, query_ids):
    told, settings = [], settings_of(forward_batch_size=2, max_new_tokens=4)
    sampler = Sampler(policy, tokenizer, settings, policy.disable_adapter)
    rollout(sampler, queries(query_ids), on_progress=told.append)
    assert told == sorted(told)
    assert told[:2] == [0, 0.5]  # two replies of four tokens
    assert {2, 2.5} <= set(told)
    assert told[-1] < len(query_ids)


def test_rollouts_carry_no_graph(policy, tokenizer, query_ids):
    # the adapter stays on, and it asks for gradients
    sampler = Sampler(policy, tokenizer, settings_of(), contextlib.nullcontext)
    rollouts = rollout(sampler, queries(query_ids))
    assert not rollouts.logprobs.requires_grad
    assert not rollouts.reference_logprobs.requires_grad


def test_the_model_never_sees_more_responses_at_once_than_allowed(policy, tokenizer, query_ids):
    batch_sizes = []
    handle = policy.get_base_model().register_forward_pre_hook(
        lambda _module, _args, kwargs: batch_sizes.append(len(kwargs["input_ids"])),
        with_kwargs=True,
    )
    try:
        roll(policy, tokenizer, query_ids.repeat(2, 1), forward_batch_size=3)
    finally:
        handle.remove()
    assert set(batch_sizes) == {3, 2}  # 8 = 3 + 3 + 2


def test_masks_and_score_places_by_hand():
    rollouts = Rollouts(
        completions=["", "", ""],
        queries=queries(torch.tensor([[7], [7], [7]])),
        query_responses=torch.tensor([[7, 1, 2, 3], [7, 4, 5, 6], [7, 0, 8, 9]]),
        logprobs=torch.zeros(3, 3),
        reference_logprobs=torch.zeros(3, 3),
        num_tokens=torch.tensor([2, 3, 0]),
        ended=torch.tensor([True, False, False]),
    )
    assert rollouts.responses.tolist() == [[1, 2, 3], [4, 5, 6], [0, 8, 9]]
    assert rollouts.mask.long().tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert rollouts.value_mask.long().tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert rollouts.reward_index.tolist() == [2, 2, 0]
    assert rollouts.num_tokens.tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "^max_new_tokens must be at least 1, got 0"),
        ({"max_prompt_tokens": 0}, "^max_prompt_tokens must be at least 1, got 0"),
        ({"forward_batch_size": -1}, "^forward_batch_size must be at least 1, got -1"),
        ({"temperature": 0.0}, "^temperature must be positive, got 0.0"),
    ],
)
def test_a_rollout_config_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**changes)


DEFAULTS = [
    ("min_p", 0.5),
    ("typical_p", 0.3),
    ("epsilon_cutoff", 0.2),
    ("eta_cutoff", 0.3),
    ("no_repeat_ngram_size", 1),
    ("suppress_tokens", [4, 5, 6, 7]),
    ("min_new_tokens", 10),
    ("bad_words_ids", [[4], [5]]),
    ("guidance_scale", 1.5),
    ("exponential_decay_length_penalty", (1, 9.0)),
    ("max_time", 1e-9),
    ("num_return_sequences", 2),
    ("num_beams", 2),
    ("stop_strings", ["a"]),
    ("sequence_bias", [[[4], -9.0]]),
    ("forced_eos_token_id", 2),
]


@pytest.mark.parametrize(("field", "value"), DEFAULTS)
def test_every_sampling_default_of_a_checkpoint_is_overridden(make_model, tokenizer, field, value):
    query_ids = torch.tensor([[4, 9, 7], [6, 6, 8]]).repeat(4, 1)

    def sample(model):
        torch.manual_seed(0)
        return generate(
            model, queries(query_ids), tokenizer=tokenizer, config=settings_of(), end_ids=[2]
        )

    model = make_model()
    expected = sample(model)
    setattr(model.generation_config, field, value)
    for ours, theirs in zip(sample(model), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_without_end_ids_nothing_ends_generation(make_model, tokenizer):
    torch.manual_seed(0)
    query_ids = torch.tensor([[4, 9, 7]]).repeat(64, 1)
    ids, _ = generate(
        make_model(), queries(query_ids), tokenizer=tokenizer, config=settings_of(), end_ids=[]
    )
    tail = ids[:, 3:]
    has_eos = (tail[:, :5] == 2).any(1)
    assert has_eos.any()
    assert not (tail[has_eos][:, -4:] == 0).all(1).all()


def test_the_text_is_cut_at_the_stop_string_that_is_complete_first(tokenizer):
    rows = torch.tensor([tokenizer("abcd")["input_ids"]])
    lengths, _, texts = find_ends(rows, tokenizer=tokenizer, end_ids=[2], stop_strings=["abc", "b"])
    assert (lengths.tolist(), texts) == ([2], ["a"])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop_strings"):
        RolloutConfig(stop_strings=[""])


def test_prompts_become_left_padded_ids_in_the_policy_s_format(tokenizer):
    prompts = [Prompt("abc"), Prompt("ignored", messages=({"role": "user", "content": "fg"},))]
    encoded = encode_prompts(
        prompts,
        tokenizer,
        prompt_format=PromptFormat("plain", template="a{prompt}"),
        max_prompt_tokens=8,
    )
    ids = encoded.token_ids
    assert encoded.prompts == prompts
    assert tokenizer.batch_decode(ids.tolist()) == ["aabc", "<pad>afg"]
    assert encoded.lengths.tolist() == [4, 3]
    assert encoded.mask.long().tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert encoded.is_cut == [False, False]


def test_a_prompt_that_is_too_long_is_cut_and_said_to_be(tokenizer):
    prompts = [Prompt("abcd"), Prompt("abcdefg")]
    encoded = encode_prompts(
        prompts, tokenizer, prompt_format=PromptFormat("plain"), max_prompt_tokens=5
    )
    assert tokenizer.batch_decode(encoded.token_ids.tolist()) == ["<pad>abcd", "cdefg"]
    assert encoded.is_cut == [False, True]


@pytest.mark.parametrize("pad", [PAD, BOS, EOS, 9])
def test_masks_do_not_depend_on_the_token_that_pads(policy, make_tokenizer, pad):
    """Tokens of the prompt and the reply that equal the padding stay in both."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token_id = pad
    rows = [[BOS, 4, 9, 5], [9, PAD, EOS, 6, 7, 8]]
    token_ids, lengths = left_padded(rows, fill=pad)
    asked = Queries([Prompt("")] * 2, token_ids, lengths)
    torch.manual_seed(3)
    sampler = Sampler(policy, tokenizer, settings_of(), policy.disable_adapter)
    rollouts = rollout(sampler, asked)
    for row, ids in enumerate(rows):
        response = torch.tensor(rollouts.completion_ids[row])
        whole = torch.tensor([*ids, *response.tolist()]).unsqueeze(0)
        with torch.no_grad():
            logits = policy(input_ids=whole).logits[0, len(ids) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1)[torch.arange(len(response)), response]
        own = rollouts.logprobs[row, : len(response)]
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Seat(Team):
    """One seat of a team whose members are played one after the other."""

    given: list = field(default_factory=list)

    def unanimous(self):
        return contextlib.nullcontext()

    def gather(self, content):
        if len(self.given) < self.size:
            self.given.append(content)
        return list(self.given)


@pytest.mark.parametrize("num_members", [2, 3, 7])  # of 7, two have no row
def test_a_team_samples_what_one_process_samples_and_leaves_its_generator_alike(
    make_model, tokenizer, num_members, numbers
):
    model, config = make_model(), RolloutConfig(max_new_tokens=10, stop_strings=[])
    query_ids = torch.randint(4, 10, (5, 6), generator=torch.Generator().manual_seed(0))
    options = {"tokenizer": tokenizer, "config": config, "end_ids": [tokenizer.eos_token_id]}

    torch.manual_seed(1)
    ids, logprobs = generate(model, queries(query_ids), **options)
    after = torch.get_rng_state()

    given: list = []
    for rank in [*range(num_members)] * 2:  # in its second turn each member sees what all gave
        torch.manual_seed(1)
        is_second_turn = len(given) == num_members
        seat = Seat(rank, num_members, given=given)
        team_ids, team_logprobs = generate(model, queries(query_ids), **options, team=seat)
        if is_second_turn:
            assert torch.equal(team_ids, ids)
            assert torch.equal(torch.get_rng_state(), after)
    ended = (ids[:, 6:] == tokenizer.eos_token_id).cumsum(1) > 0
    first_end = ended & (ended.cumsum(1) == 1)
    real = ~ended | first_end
    torch.testing.assert_close(team_logprobs[real], logprobs[real], rtol=1e-5, atol=1e-6)
    assert ended.any(), "some reply must end early for this to test much"
