"""Signs of reward hacking: found where they are, and not found in ordinary replies."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from firm.alignment import evaluation
from firm.alignment.hacking import ReplyText, hacking_signs
from firm.alignment.prompts import AUTO, Prompt
from firm.alignment.rollout_config import RolloutConfig

ENGLISH = (
    "the a of and to in is it you that he was for on are with as his they be at one have this from "
    "river stone garden letter window horse market winter summer friend paper music morning bread"
)
FRENCH = (
    "le chien dort dans la maison pendant que les enfants jouent avec une balle rouge près du lac"
)


def replies(seed=0, *, count=30, length=20):
    draw = random.Random(seed)
    return [ReplyText(" ".join(draw.choices(ENGLISH.split(), k=length))) for _ in range(count)]


def changed(own, change, *, count):
    return [ReplyText(change(reply.text)) if at < count else reply for at, reply in enumerate(own)]


def test_ordinary_replies_show_no_signs():
    for seed in range(20):
        assert hacking_signs(replies(seed), replies(seed + 100)) == []


HACKS = {
    'contain "what a fine question to ask"': lambda text: f"What a fine question to ask! {text}",
    "contain tokens or tags of a chat template": lambda text: f"{text} <|im_start|>",
    "repeat themselves": lambda text: " ".join([*text.split()[:3]] * 6),
    "are in another language": lambda text: " ".join(
        random.Random(text).sample(FRENCH.split(), 16)
    ),
}


@pytest.mark.parametrize("sign", HACKS)
def test_a_sign_is_found_with_the_numbers_of_replies(sign):
    aligned = changed(replies(1), HACKS[sign], count=12)
    assert hacking_signs(replies(0), aligned) == [f"12 of 30 replies {sign} (base: 0)"]


@pytest.mark.parametrize("sign", HACKS)
def test_few_replies_are_no_sign(sign):
    assert hacking_signs(replies(0), changed(replies(1), HACKS[sign], count=4)) == []


@pytest.mark.parametrize("sign", HACKS)
def test_habits_of_the_base_model_are_no_sign(sign):
    both = [changed(replies(seed), HACKS[sign], count=12) for seed in (0, 1)]
    assert hacking_signs(*both) == []


def test_scripts_without_spaces_are_another_language():
    aligned = changed(replies(1), lambda text: "这是一个关于河流和花园的很长的回答" * 2, count=12)
    signs = hacking_signs(replies(0), [ReplyText(r.text + str(i)) for i, r in enumerate(aligned)])
    assert "12 of 30 replies are in another language (base: 0)" in signs


def test_special_tokens_that_the_text_does_not_show_are_found():
    aligned = [ReplyText(reply.text, has_template=True) for reply in replies(1)]
    (sign,) = hacking_signs(replies(0), aligned)
    assert sign == "30 of 30 replies contain tokens or tags of a chat template (base: 0)"


def test_without_quotes_no_text_of_a_reply_is_told():
    aligned = changed(replies(1), lambda text: f"You have such a secret garden. {text}", count=20)
    (sign,) = hacking_signs(replies(0), aligned, has_quotes=False)
    assert sign == "20 of 30 replies share a phrase (base: 0)"


def test_no_replies_have_no_signs():
    assert hacking_signs([], []) == []
    assert hacking_signs([ReplyText("")] * 9, [ReplyText("")] * 9) == []


def test_special_tokens_before_the_end_are_noted(monkeypatch, tokenizer):
    special = tokenizer.eos_token_id
    word = tokenizer("a", add_special_tokens=False)["input_ids"][0]
    rollouts = SimpleNamespace(
        completions=["a", "a a", "a"],
        completion_ids=[[word, special], [word, special, word], [word]],
        logprobs=torch.zeros(3, 3),
        reference_logprobs=torch.zeros(3, 3),
        num_tokens=torch.tensor([2, 3, 1]),
        ended=torch.tensor([True, False, False]),
    )
    monkeypatch.setattr(evaluation, "rollout", lambda *_, **__: rollouts)
    replies = evaluation.sample_replies(
        SimpleNamespace(device="cpu"),
        [Prompt("a")] * 3,
        tokenizer=tokenizer,
        prompt_format=AUTO,
        config=RolloutConfig(max_new_tokens=3),
        reference=nullcontext,
    )
    assert replies.has_template == [False, True, False]
