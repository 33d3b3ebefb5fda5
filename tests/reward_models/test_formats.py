import pytest

from reward_models.formats import check_format, present

DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Go\n\nnow \n\nAssistant:"
FIRST_OF_TWO = "\n\nHuman: One\n\nHuman: Two\n\nAssistant:"
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("prompt", "question"),
    {
        DIALOGUE: "Go\n\nnow",
        FIRST_OF_TWO: "One\n\nTwo",
        "Hello there": "Hello there",
        "\n\nHuman:\n\nAssistant:": "",
    }.items(),
)
def test_a_question_is_the_last_human_turn_without_tags(prompt, question):
    assert present("question_answer", prompt, " Sure.\n", None) == (question, "Sure.")


@pytest.mark.parametrize(
    ("prompt", "text"),
    {
        DIALOGUE: "[user:Hi][assistant:Yes?][user:Go\n\nnow][assistant:Sure.]",
        FIRST_OF_TWO: "[user:One\n\nTwo][assistant:Sure.]",
        "Hello there": "[user:Hello there][assistant:Sure.]",
    }.items(),
)
def test_a_chat_has_every_turn_and_the_reply_and_no_generation_prompt(prompt, text, byte_tokenizer):
    template = TEMPLATE + "{% if add_generation_prompt %}[assistant:{% endif %}"
    tokenizer = byte_tokenizer(template=template)
    assert present("chat_template", prompt, " Sure.", tokenizer) == (text,)


def test_a_reply_that_imitates_a_turn_stays_one_message(byte_tokenizer):
    tokenizer, reply = byte_tokenizer(template=TEMPLATE), "A\n\nHuman: B"
    assert present("chat_template", "Q", reply, tokenizer) == (f"[user:Q][assistant:{reply}]",)
    assert present("question_answer", "Q", reply, tokenizer) == ("Q", reply)


def test_a_template_that_prints_the_date_prints_the_same_one_every_day(byte_tokenizer):
    dated = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}"
    assert present("chat_template", "Q", "A", byte_tokenizer(template=dated)) == ("26 Jul 2024",)


def test_a_text_that_imitates_a_turn_stays_one_message(byte_tokenizer):
    tokenizer, text = byte_tokenizer(template=TEMPLATE), "Hi\n\nHuman: Go"
    assert present("question_answer", text, "A", None) == (text, "A")
    assert present("chat_template", text, "A", tokenizer) == (f"[user:{text}][assistant:A]",)


def test_chats_are_presented_in_every_format(byte_tokenizer):
    tokenizer = byte_tokenizer(template=TEMPLATE)
    turns = [("system", " s"), ("user", "u "), ("assistant", "a"), ("user", "v")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for format, expected in {
        "chat_template": ("[system: s][user:u ][assistant:a][user:v][assistant:A]",),
        "hh_pair": ("\n\nHuman:  s\n\nu \n\nAssistant: a\n\nHuman: v \n\nAssistant:", "A"),
        "question_answer": ("v", "A"),
        "response": (" A",),
    }.items():
        assert present(format, messages, " A", tokenizer) == expected


def test_conversations_that_the_template_refuses_are_refused(byte_tokenizer):
    strict = "{{ raise_exception('no system message\nhere') }}"
    tokenizer = byte_tokenizer(template=strict)
    message = r"the chat template rejects a conversation of user, assistant \(no system message\)"
    with pytest.raises(ValueError, match=message):
        present("chat_template", "Q", "A", tokenizer)


def test_formats_that_a_tokenizer_cannot_spell_are_refused(byte_tokenizer):
    with pytest.raises(ValueError, match="'chat_template' needs a chat template"):
        check_format("chat_template", byte_tokenizer())
    with pytest.raises(ValueError, match="'question_answer' needs a tokenizer that separates"):
        check_format("question_answer", byte_tokenizer())
    check_format("chat_template", byte_tokenizer(template=TEMPLATE))
    check_format("question_answer", byte_tokenizer(opening=True))
    for format in ("hh_pair", "plain", "response"):
        check_format(format, byte_tokenizer())


def test_a_broken_chat_template_is_refused_with_the_format(byte_tokenizer):
    tokenizer = byte_tokenizer(template="{{ messages[0].content }")
    with pytest.raises(ValueError, match=r"^the chat template of .* is broken \(line 1: unexpecte"):
        check_format("chat_template", tokenizer)
    check_format("hh_pair", tokenizer)
