"""Given replies have the tokens that the chat template writes for them, as in TRL."""

import pytest
from tokenizers import AddedToken

from firm.alignment.pair_tokens import encode_pairs
from firm.alignment.pairs import Pair
from firm.alignment.prompts import Prompt, PromptFormat
from firm.alignment.reply_tokens import encode_replies
from tests.tokens import byte_tokenizer

PLAIN = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' }}{{ m.content }}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
SPACED = PLAIN.replace("{{ m.content }}", "{{ ' ' + m.content }}")
THINKS = PLAIN.replace("'<s>assistant\n'", "'<s>assistant\n<think>\n'")
EMPTY_BLOCK = PLAIN.replace(
    "{{ m.content }}",
    "{% if loop.last and m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + "
    "'\n</think>\n\n' }}{% endif %}{{ m.content }}",
)
CALLS = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls or '' }}")
SYSTEM = "{{- raise_exception('no system') if messages[0].role != 'system' -}}" + PLAIN
OPEN_ENDED = PLAIN.replace("</s>\n", "")
QUESTION = ({"role": "user", "content": "Is it cold?"},)


@pytest.fixture
def make_tokenizer():
    def make(template: str):
        tokenizer = byte_tokenizer(pad_token="<pad>")
        tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
        tokenizer.chat_template = template
        return tokenizer

    return make


def encoded(tokenizer, pair, **options):
    notes: list[str] = []
    limits = {"max_prompt_tokens": 200, "max_reply_tokens": 60, **options}
    pairs = encode_pairs(
        [pair], [""], tokenizer, prompt_format=PromptFormat(), end_ids=[2], on_note=notes.append,
        **limits,
    )  # fmt: skip
    return pairs, notes


@pytest.mark.parametrize(
    ("template", "prompt_end", "reply"),
    [
        (PLAIN, "<s>assistant\n", "Yes.</s>"),
        (SPACED, "<s>assistant\n", " Yes.</s>"),
        (EMPTY_BLOCK, "<s>assistant\n", "<think>\n\n</think>\n\nYes.</s>"),
        (THINKS, "<s>assistant\n", "Yes.</s>"),  # without the block that a sampled reply begins in
        (OPEN_ENDED, "<s>assistant\n", "Yes.</s>"),
    ],
)
def test_a_reply_is_what_the_template_writes_after_the_prompt(
    make_tokenizer, template, prompt_end, reply
):
    tokenizer = make_tokenizer(template)
    pair = Pair(Prompt(messages=QUESTION), "Yes.", "No.")
    (own,), notes = encoded(tokenizer, pair)
    assert tokenizer.decode(own.prompt_ids).endswith(prompt_end)
    assert tokenizer.decode(own.reply_ids[0]) == reply
    whole = tokenizer.apply_chat_template([*QUESTION, pair.messages[0]], tokenize=False)
    said = tokenizer.decode(own.prompt_ids + own.reply_ids[0])
    assert whole.removesuffix("\n").removesuffix("</s>") == said.removesuffix("</s>")
    assert bool(notes) == (template == THINKS)
    if notes:
        assert "ends a prompt with '<think>\\n'" in notes[0]
        assert "1 of 1 pairs" in notes[0]


@pytest.mark.parametrize("template", [PLAIN, THINKS])
def test_pairs_are_encoded_together_as_alone(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    asked = [({"role": "user", "content": text},) for text in ("Cold?", "Is it warm?", "Why?")]
    pairs = [Pair(Prompt(messages=own), f"Yes {own}.", "No.") for own in asked]
    found = [
        encode_replies(own, tokenizer, prompt_format=PromptFormat(), end_ids=[2])
        for own in (pairs, *([pair] for pair in pairs))
    ]
    together, *alone = found
    assert together == [own for (own,) in alone]


def test_a_prompt_that_is_cut_loses_its_opening_of_reasoning_too(make_tokenizer):
    tokenizer = make_tokenizer(THINKS)
    pair = Pair(Prompt("cold " * 40), "Yes.", "No.")
    (own,), _ = encoded(tokenizer, pair, max_prompt_tokens=40)
    assert own.is_cut[0]
    assert tokenizer.decode(own.prompt_ids).endswith(" cold </s>\n<s>assistant\n")
    with pytest.raises(ValueError, match=r"max_prompt_tokens must be above 2.* got 2"):
        encoded(tokenizer, pair, max_prompt_tokens=2)


def test_a_template_that_needs_a_system_turn_takes_pairs_that_have_one(make_tokenizer):
    system = {"role": "system", "content": "Be brief."}
    pair = Pair(Prompt(messages=(system, *QUESTION)), "Yes.", "No.")
    (own,), _ = encoded(make_tokenizer(SYSTEM), pair)
    assert own.reply_ids[0][-1] == 2
    with pytest.raises(ValueError, match="no system"):
        encoded(make_tokenizer(SYSTEM), Pair(Prompt("Is it cold?"), "Yes.", "No."))


CALL = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
OTHER = {"tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {"a": 1}}}]}


def test_calls_and_reasoning_are_passed_to_the_template(make_tokenizer):
    tokenizer = make_tokenizer(CALLS)
    pair = Pair(Prompt("a"), "", "", fields=(CALL, OTHER))
    (own,), _ = encoded(tokenizer, pair, max_reply_tokens=200)
    first, second = map(tokenizer.decode, own.reply_ids)
    assert "'f'" in first
    assert "'g'" in second
    assert own.reply_ids[0][-1] == 2
    tokenizer = make_tokenizer(EMPTY_BLOCK)
    thought = {"reasoning_content": "So."}
    (own,), _ = encoded(tokenizer, Pair(Prompt("a"), "Yes.", "No.", fields=(thought, {})))
    assert tokenizer.decode(own.reply_ids[0]) == "<think>\nSo.\n</think>\n\nYes.</s>"


@pytest.mark.parametrize("fields", [CALL, {"reasoning_content": "So."}])
def test_a_field_that_no_template_writes_is_refused_by_name_and_line(make_tokenizer, fields):
    prompt = Prompt("a", place="pairs.jsonl, line 3")
    pair = Pair(prompt, "Yes.", "No.", fields=(fields, {}))
    (name,) = fields
    line = f"pairs.jsonl, line 3: a reply has `{name}`, which the policy's chat template does not"
    with pytest.raises(ValueError, match=line):
        encoded(make_tokenizer(PLAIN), pair)
    with pytest.raises(ValueError, match="a prompt format without a chat template does not write"):
        encoded(make_tokenizer(None), pair)


def test_a_template_that_rewrites_the_prompt_before_a_reply_is_refused(make_tokenizer):
    template = PLAIN.replace("+ m.role +", "+ m.role ~ (messages | length) +")
    with pytest.raises(ValueError, match=r"writes the prompt otherwise .* from character 8 on"):
        encoded(make_tokenizer(template), Pair(Prompt("a"), "Yes.", "No."))


def test_pairs_that_are_equal_after_truncation_are_dropped_with_a_note(make_tokenizer):
    pair = Pair(Prompt("a"), "The same words, then yes.", "The same words, then no.")
    pairs, notes = encoded(make_tokenizer(PLAIN), pair, max_reply_tokens=20)
    assert not pairs
    assert notes == [
        "1 of 1 pairs are dropped, since their replies are equal after truncation to 20 tokens."
    ]
    pairs, notes = encoded(make_tokenizer(PLAIN), pair, max_reply_tokens=24)
    assert len(pairs) == 1
    assert not notes


def test_a_text_that_the_template_changes_is_noted(make_tokenizer):
    template = PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}")
    _, notes = encoded(make_tokenizer(template), Pair(Prompt("A"), "Yes.", "NO."))
    assert notes[0].startswith("the chat template changes the text of 1 of 2 replies")


def test_without_a_template_replies_are_texts_after_the_prompt(make_tokenizer):
    tokenizer = make_tokenizer(None)
    pairs = [Pair(Prompt("a"), "Yes. ", "No.")]
    for name, reply in {"hh": " Yes.</s>", "plain": "Yes. </s>"}.items():
        (own,) = encode_replies(pairs, tokenizer, prompt_format=PromptFormat(name), end_ids=[2])
        assert tokenizer.decode(own.reply_ids[0]) == reply
