import json
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from recipes.miniature.preferences import Preference
from recipes.miniature.training import (
    PolicyTraining,
    RewardTraining,
    bits_per_byte,
    fit_pairs,
    quiet,
    reward_margins,
    reward_tokenizer,
    save_checkpoint,
    train_policy,
    train_reward_model,
    train_tokenizer,
)

TINY = PolicyTraining(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    context_length=48,
    batch_size=4,
    num_steps=120,
    learning_rate=1e-2,
)
SCORER = RewardTraining(max_length=48, num_epochs=3, batch_size=8, learning_rate=1e-2)

PHRASES = ("the red boat sails", "a tin drum beats", "old hats burn", "no kite flies low")


def texts(num: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [f"\n\nHuman: {rng.choice(PHRASES)}?\n\nAssistant: so it is." for _ in range(num)]


def telltale_pairs(num: int, seed: int) -> list[Preference]:
    """Pairs of which the chosen reply says `good` where the rejected one says `bad`."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(num):
        before, after = rng.choice(PHRASES), rng.choice(PHRASES)
        sides = (f" {before} {word} {after}" for word in ("good", "bad"))
        pairs.append(Preference("\n\nHuman: why?\n\nAssistant:", *sides, "helpful"))
    return pairs


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        [*texts(50, 0), *(pair.chosen + pair.rejected for pair in telltale_pairs(50, 0))],
        vocab_size=TINY.vocab_size,
    )


@pytest.fixture(scope="module")
def policy(tokenizer):
    return train_policy(texts(200, 0), tokenizer, TINY, seed=0)


@pytest.fixture(scope="module")
def policy_folder(policy, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    save_checkpoint(policy, tokenizer, folder, dtype=torch.float16)
    return folder


@pytest.fixture(scope="module")
def scorer_tokenizer(tokenizer):
    return reward_tokenizer(tokenizer, SCORER)


@pytest.fixture(scope="module")
def fit(tokenizer):
    def num_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    def fit(pairs, cfg):
        return fit_pairs(pairs, cfg, shorten=lambda prompt: prompt[-12:], num_tokens=num_tokens)

    return fit


@pytest.fixture(scope="module")
def scorer(policy_folder, scorer_tokenizer, fit):
    pairs = fit(telltale_pairs(160, 0), SCORER)
    return train_reward_model(policy_folder, scorer_tokenizer, pairs, SCORER, seed=0)


def parameters(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# Tokenizers


@given(text=st.text().filter(lambda text: "<" not in text))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]
    decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert decoded == text


def test_special_tokens_differ_and_a_turn_marker_is_plain_text(tokenizer):
    special = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert special == {0, 1, 2}
    ids = tokenizer("\n\nHuman:", add_special_tokens=False).input_ids
    assert ids
    assert not special & set(ids)


def test_a_policy_pads_on_the_left_and_a_reward_model_on_the_right(tokenizer, scorer_tokenizer):
    assert tokenizer(["a", "a a a"], padding=True).attention_mask[0][0] == 0
    assert scorer_tokenizer(["a", "a a a"], padding=True).attention_mask[0][-1] == 0


@pytest.mark.parametrize("call_format", ["plain", "response"])
def test_a_reward_model_reads_bos_the_text_and_eos_cut_at_the_right_side(tokenizer, call_format):
    framed = reward_tokenizer(tokenizer, RewardTraining(call_format=call_format, max_length=10))
    whole = tokenizer("abcdefghijklmnop", add_special_tokens=False).input_ids
    assert len(whole) > 8
    cut = whole[:8] if call_format == "response" else whole[-8:]
    ids = framed("abcdefghijklmnop", truncation=True).input_ids
    assert ids == [tokenizer.bos_token_id, *cut, tokenizer.eos_token_id]
    assert tokenizer("a").input_ids[-1] != tokenizer.eos_token_id  # the policy's own is untouched


def test_equal_texts_give_equal_vocabularies(tokenizer):
    again, other = (train_tokenizer(texts(50, seed), vocab_size=280) for seed in (0, 0))
    assert again.get_vocab() == other.get_vocab()


def test_a_vocabulary_without_room_for_every_byte_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least 259, got 258"):
        train_tokenizer(["a"], vocab_size=258)


# Policy


def test_equal_seeds_train_equal_policies_and_others_do_not(policy, tokenizer):
    again = train_policy(texts(200, 0), tokenizer, TINY, seed=0)
    assert torch.equal(parameters(again), parameters(policy))
    other = train_policy(texts(200, 0), tokenizer, TINY, seed=1)
    assert not torch.allclose(parameters(other), parameters(policy))


def test_a_policy_learns_its_texts_and_to_end_them(policy, tokenizer):
    assert bits_per_byte(policy, tokenizer, texts(40, 1), context_length=48) < 1.0
    prompt = tokenizer(texts(1, 2)[0], return_tensors="pt")
    with torch.inference_mode():
        probabilities = policy(**prompt).logits[0, -1].softmax(0)
    assert probabilities[tokenizer.eos_token_id] > 0.5


def test_training_leaves_no_file_and_a_cache_for_generation(
    policy, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    short = PolicyTraining(**{**TINY.__dict__, "num_steps": 1})
    model = train_policy(texts(20, 0), tokenizer, short, seed=0)
    assert list(tmp_path.iterdir()) == []
    assert model.config.use_cache


def test_a_uniform_model_needs_log_v_bits_per_token(tokenizer):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    model.lm_head.weight.data.zero_()
    held_out = ["é", "a longer text of several windows", ""]
    num_tokens = sum(len(tokenizer(text).input_ids) + 1 for text in held_out)  # with BOS and EOS
    num_bytes = 2 + 32
    expected = (num_tokens - 1) * math.log2(len(tokenizer)) / num_bytes  # the first is given
    for context_length in (3, 4, 5, 100):
        bits = bits_per_byte(model, tokenizer, held_out, context_length=context_length)
        assert bits == pytest.approx(expected)


def test_context_makes_held_out_text_cheaper(policy, tokenizer):
    bits = [bits_per_byte(policy, tokenizer, texts(40, 1), context_length=n) for n in (2, 48)]
    assert bits[1] < 0.8 * bits[0]


# Reward models


def test_a_reward_model_finds_the_telltale_word(scorer, scorer_tokenizer, fit):
    pairs = fit(telltale_pairs(100, 1), SCORER)
    margins = reward_margins(scorer, scorer_tokenizer, pairs, SCORER)
    assert (margins > 0).float().mean() > 0.9
    swapped = [Preference(p.prompt, p.rejected, p.chosen, p.kind) for p in pairs]
    assert torch.equal(reward_margins(scorer, scorer_tokenizer, swapped, SCORER), -margins)


def test_margins_do_not_depend_on_the_other_pairs(scorer, scorer_tokenizer, fit):
    pairs = fit(telltale_pairs(70, 1), SCORER)
    together = reward_margins(scorer, scorer_tokenizer, pairs, SCORER)
    alone = [reward_margins(scorer, scorer_tokenizer, [pair], SCORER) for pair in pairs]
    torch.testing.assert_close(together, torch.cat(alone))


def test_equal_seeds_train_equal_reward_models(scorer, policy_folder, scorer_tokenizer, fit):
    pairs = fit(telltale_pairs(160, 0), SCORER)
    again = train_reward_model(policy_folder, scorer_tokenizer, pairs, SCORER, seed=0)
    assert torch.equal(parameters(again), parameters(scorer))


@pytest.mark.parametrize("call_format", ["plain", "response"])
def test_fitted_pairs_keep_the_replies_beginning_and_no_text_is_cut_again(
    tokenizer, fit, call_format
):
    cfg = RewardTraining(call_format=call_format, max_length=40)
    long = [
        Preference("\n\nHuman: why?\n\nAssistant:", f" {i} good" * i, f" {i} bad" * 30, "k")
        for i in range(1, 20)
    ]
    fitted = fit(long, cfg)
    framed = reward_tokenizer(tokenizer, cfg)
    for pair, cut in zip(long, fitted, strict=True):
        for side in ("chosen", "rejected"):
            reply = getattr(cut, side)
            assert getattr(pair, side).startswith(reply)
            text = cut.prompt + reply if call_format == "plain" else reply
            assert len(framed(text).input_ids) <= 40
            if reply != getattr(pair, side):
                assert len(framed(text).input_ids) >= 38
    assert {cut.prompt for cut in fitted} == {"\n\nAssistant:"}


def test_no_pair_is_dropped_for_its_length(policy_folder, tokenizer, fit, monkeypatch):
    cfg = RewardTraining(max_length=20, num_epochs=1, batch_size=4)
    long = [Preference("\n\nHuman: why?\n\nAssistant:", " x" * 99, " y" * 99, "k")] * 8
    framed = reward_tokenizer(tokenizer, cfg)
    seen = []
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(
        torch.nn.Embedding, "forward", lambda self, ids: (seen.append(ids), forward(self, ids))[1]
    )
    train_reward_model(policy_folder, framed, fit(long, cfg), cfg, seed=0)
    assert sum(len(ids) for ids in seen) == 2 * len(long)


# Checkpoints


def test_checkpoints_are_half_precision_on_disk_and_load_by_the_auto_classes(
    scorer, scorer_tokenizer, policy, policy_folder, tokenizer, tmp_path
):
    save_checkpoint(scorer, scorer_tokenizer, tmp_path, dtype=torch.float16)
    for folder, auto, model in (
        (policy_folder, AutoModelForCausalLM, policy),
        (tmp_path, AutoModelForSequenceClassification, scorer),
    ):
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
        loaded = auto.from_pretrained(folder, dtype=torch.float32)
        assert loaded.dtype == torch.float32
        torch.testing.assert_close(parameters(loaded), parameters(model), atol=1e-3, rtol=1e-3)
        assert model.dtype == torch.float32
    assert loaded.config.num_labels == 1
    assert loaded.config.call_format == "plain"
    for folder, original in ((policy_folder, tokenizer), (tmp_path, scorer_tokenizer)):
        loaded = AutoTokenizer.from_pretrained(folder)
        assert loaded(["a", "héllo  there"], padding=True, truncation=True) == original(
            ["a", "héllo  there"], padding=True, truncation=True
        )
        assert loaded.padding_side == original.padding_side
        assert loaded.model_max_length == original.model_max_length


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
        ({"hidden_size": 18}, "hidden_size must be a multiple of twice num_heads"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PolicyTraining(**{**TINY.__dict__, **change})


def test_quiet_hides_progress_bars_and_brings_them_back():
    import datasets
    from transformers.utils import logging

    before = datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    with quiet():
        assert datasets.are_progress_bars_disabled()
        assert not logging.is_progress_bar_enabled()
    assert before == (datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled())
