import random

import pytest
import torch

from recipes.miniature.encoder import EncoderTraining, replace_tokens, train_encoder
from recipes.miniature.preferences import Preference
from recipes.miniature.training import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    RewardTraining,
    reward_margins,
    reward_tokenizer,
    save_checkpoint,
    train_reward_model,
    train_tokenizer,
)

TINY = EncoderTraining(
    vocab_size=290,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    batch_size=8,
    num_steps=200,
    initializer_range=0.1,
    learning_rate=3e-3,
)
SCORER = RewardTraining(max_length=32, num_epochs=2, batch_size=8, learning_rate=3e-3)

THINGS = ("boat", "drum", "kite", "lamp")


def texts(num: int, seed: int) -> list[str]:
    """Replies that take up the thing asked for."""
    things = random.Random(seed).choices(THINGS, k=num)
    return [f"my {thing}? see the {thing}." for thing in things]


@pytest.fixture(scope="module")
def tokenizer():
    return reward_tokenizer(train_tokenizer(texts(40, 0), vocab_size=TINY.vocab_size), SCORER)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return train_encoder(texts(200, 0), tokenizer, TINY, seed=0)


def parameters(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# Replacements


def padded(num: int) -> torch.Tensor:
    """Texts of 10 tokens between BOS and EOS, then padding."""
    inner = torch.randint(3, 50, (num, 10), generator=torch.Generator().manual_seed(0))
    frame = [torch.full((num, n), i) for n, i in ((1, BOS_ID), (1, EOS_ID), (4, PAD_ID))]
    return torch.cat([frame[0], inner, *frame[1:]], dim=1)  # [num, 16]


def test_replacements_come_from_the_batch_and_spare_special_tokens():
    ids = padded(1000)
    before = ids.clone()
    replaced = replace_tokens(ids, share=0.3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ids, before)
    special = ids < 3
    assert torch.equal(replaced[special], ids[special])
    assert set(replaced[~special].tolist()) <= set(ids[~special].tolist())
    share = (replaced != ids)[~special].float().mean().item()
    assert share == pytest.approx(0.3 * 46 / 47, abs=0.02)  # 1 in 47 is drawn in its own place


def test_equal_generators_replace_equal_tokens():
    one, again, other = (
        replace_tokens(padded(20), share=0.3, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_batch_without_an_ordinary_token_stays_as_it_is():
    ids = torch.tensor([[BOS_ID, EOS_ID, PAD_ID]])
    assert torch.equal(replace_tokens(ids, share=0.9, generator=torch.Generator()), ids)


# Training


@pytest.mark.parametrize("learning_rate", [1e-2, 1e-9], ids=["training", "initial parameters"])
def test_equal_seeds_train_equal_encoders_and_others_do_not(tokenizer, learning_rate):
    short = EncoderTraining(**{**TINY.__dict__, "num_steps": 3, "learning_rate": learning_rate})
    one, again, other = (
        parameters(train_encoder(texts(40, 0), tokenizer, short, seed=seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)


def test_an_encoder_finds_a_word_out_of_place(encoder, tokenizer):
    def alarm(text: str) -> float:
        """Greatest logit of "replaced" over the tokens of a text."""
        with torch.inference_mode():
            return encoder(**tokenizer(text, return_tensors="pt")).logits.max().item()

    for thing in THINGS:
        assert alarm(f"my {thing}? see the {thing}.") < 0
        assert alarm(f"my {thing}? see my {thing}.") > 0
        assert alarm(f"the {thing}? see the {thing}.") > 0


def test_a_reward_model_on_an_encoder_finds_the_telltale_word(encoder, tokenizer, tmp_path):
    def pairs(num: int, seed: int) -> list[Preference]:
        things = random.Random(seed).choices(THINGS, k=num)
        sides = [(f"my {t}?", f" see the {t}.", f" see my {t}.") for t in things]
        return [Preference(*texts, "k") for texts in sides]

    save_checkpoint(encoder, tokenizer, tmp_path, dtype=torch.float32)
    scorer = train_reward_model(tmp_path, tokenizer, pairs(80, 0), SCORER, seed=0)
    margins = reward_margins(scorer, tokenizer, pairs(40, 1), SCORER)
    assert (margins > 0).float().mean() > 0.95


def test_training_leaves_no_file(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = EncoderTraining(**{**TINY.__dict__, "num_steps": 1})
    train_encoder(texts(20, 0), tokenizer, short, seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"hidden_size": 33}, "hidden_size must be a multiple of num_heads"),
        ({"replaced_share": 1.0}, "replaced_share must be greater than 0 and less than 1, got 1.0"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EncoderTraining(**{**TINY.__dict__, **change})
