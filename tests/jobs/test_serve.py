"""OpenAI's own client asks an endpoint with llama.cpp, as `firm serve` starts it."""

import json
import re
import shutil
import socket
from contextlib import contextmanager
from threading import Thread

import openai
import pytest
from transformers import AutoTokenizer

from firm.cli.main import COMMANDS
from firm.jobs.export import export
from firm.jobs.serve import endpoint
from firm.run import UserError
from firm.serving.llama import LlamaEngine
from tests import smoke

MESSAGES = [{"role": "user", "content": "Where is my ladder?"}]
CONTEXT = 256


@pytest.fixture(scope="module")
def folder(strong, tmp_path_factory):
    out = tmp_path_factory.mktemp("served") / "gguf"
    return export(
        COMMANDS["export"].parse(["--run", str(strong), "--out", str(out), "--to", "gguf"])
    ).folder


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as place:
        return place.getsockname()[1]


@contextmanager
def asking(folder, *more, context=CONTEXT):
    """Yields a function that asks an endpoint through OpenAI's client."""
    options = ["--export", str(folder), "--name", "tiny", "--port", str(free_port())]
    options += ["--num_slots", "3", "--context", str(context), "--num_threads", "1", *more]
    with endpoint(COMMANDS["serve"].parse(options)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            with openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
            ) as client:

                def ask(**fields):
                    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, **fields}
                    return client.chat.completions.create(**given)

                ask.client = client
                yield ask
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def ask(folder):
    with asking(folder) as ask:
        yield ask


def text_of(reply):
    return reply.choices[0].message.content


def extra(**fields):
    return {"extra_body": fields}


def formatted(**schema):
    own = {"name": "own", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": own}}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ERRORS = {
    "a prompt beyond the context": (
        {"messages": [{"role": "user", "content": "Where? " * CONTEXT}]},
        r"the prompt has \d+ tokens, and the context is 256: .*, or serve with a larger --con",
    ),
    "a million replies": ({"n": 10**6}, "n must be at most 3, got 1000000"),
    "a temperature in words": ({"temperature": "hot"}, "temperature must be a finite number"),
    "a bad grammar": (extra(grammar="root ::= ("), "there is no field 'grammar'"),
    "a message without role": ({"messages": [{"content": "Hi"}]}, "messages.0.role is missing"),
    "an odd role": ({"messages": [{"role": 5, "content": "Hi"}]}, "messages.0.role must be"),
    "an unknown role": ({"messages": [{"role": "me", "content": "Hi"}]}, "messages.0.role must be"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images, audio and files"),
    "no messages": ({"messages": []}, "messages must be non-empty"),
    "all the tokens": ({"max_tokens": 10**30}, "max_tokens must be at most"),
    "more than the context": ({"max_tokens": CONTEXT + 1}, "max_tokens must be at most 256"),
    "a long seed": ({"seed": 10**3999}, "seed must be at most"),
    "odd tools": ({"tools": [3]}, "tools.0 must be a mapping"),
    "a tool without a type": ({"tools": [{"function": {}}]}, "tools.0.type is missing"),
    "likely tokens": ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs must be at most 20"),
    "likely tokens alone": ({"top_logprobs": 3}, "top_logprobs must come with logprobs: true"),
    "a large number for the template": (
        extra(chat_template_kwargs={"year": 2**70}),
        "llama.cpp refuses the request: ",
    ),
    "a schema that refers to nothing": (formatted(**{"$ref": "#/a"}), "llama.cpp refuses the req"),
    "a pattern": (formatted(type="string", pattern="((a?){100}){20}"), "without patterns"),
    "an unknown objective": ({"model": "tiny@wit=1"}, "unknown objective 'wit'"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_requests_are_bad_requests(ask, name, capfd):
    fields, words = ERRORS[name]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            ask(**fields, stream=stream)
        error = refusal.value.body
        assert re.search(words, error["message"])
        assert (error["type"], set(error)) == (
            "invalid_request_error",
            {"message", "type", "param", "code"},
        )
    assert text_of(ask())
    assert "Traceback" not in capfd.readouterr().err


def test_a_prompt_beyond_the_context_has_openai_s_code(ask):
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(messages=[{"role": "user", "content": "Where? " * CONTEXT}])
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError) as refusal:
        ask(model="large")
    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")


def test_a_context_is_no_longer_than_the_model_s_own(folder, capsys):
    with asking(folder, context=4096) as ask:
        line = "note: the context is 512 tokens, since the model has no longer one (--context 4096)"
        assert line in capsys.readouterr().err.splitlines()
        with pytest.raises(openai.BadRequestError, match="at most 512, got 513; the model has no"):
            ask(max_tokens=513)
        with pytest.raises(openai.BadRequestError, match="is 512: shorten the messages; the mod"):
            ask(messages=[{"role": "user", "content": "Where? " * 512}])


def test_a_stream_says_as_much_as_a_reply(ask):
    given = {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    reply = ask(**given)
    *parts, last = ask(**given, stream=True, stream_options={"include_usage": True})
    choices = [part.choices[0] for part in parts]
    assert "".join(choice.delta.content or "" for choice in choices) == text_of(reply)
    assert [c.finish_reason for c in choices if c.finish_reason] == [reply.choices[0].finish_reason]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert tokens == reply.choices[0].logprobs.content
    assert (last.choices, last.usage.completion_tokens) == ([], reply.usage.completion_tokens)
    assert {part.model for part in parts} == {reply.model}
    assert not any(part.usage for part in ask(stream=True))
    alone = ask(**{**given, "top_logprobs": 0}).choices[0].logprobs.content
    assert [entry.logprob for entry in alone] == [entry.logprob for entry in tokens]
    assert not any(entry.top_logprobs for entry in alone)


def test_usage_counts_the_tokens_of_all_replies(ask):
    given = {"max_tokens": 5, "n": 3, **extra(ignore_eos=True)}
    reply = ask(**given)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage.completion_tokens == 15
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 15
    *_, last = ask(**given, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == 15


def test_equal_seeds_give_equal_replies(ask):
    first, same, *others = (text_of(ask(seed=seed)) for seed in (-1, -1, 1, 2, 3))
    assert first == same
    assert len({first, *others}) > 1


def test_null_takes_the_run_s_own_sampling(ask):
    nothing = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "stop", "preference"))
    for seed in range(3):
        assert text_of(ask(seed=seed, **extra(**nothing))) == text_of(ask(seed=seed))


def test_a_stop_of_the_request_leaves_the_front_s_own(folder, tmp_path):
    whole = shutil.copytree(folder, tmp_path / "gguf")
    record = json.loads((whole / "front.json").read_text())
    record["request"] |= {"stop": ["e"], "temperature": 0}
    (whole / "front.json").write_text(json.dumps(record))
    with asking(whole) as ask:
        text = text_of(ask(extra_body={"stop": None}, max_tokens=20))
        assert "e" not in text
        assert text_of(ask(stop=["zebra"], max_tokens=20)) == text
        earlier = text_of(ask(stop=text[1], max_tokens=20))
        assert earlier == text[: text.index(text[1])]


def test_logprobs_are_those_of_the_tokens(ask):
    reply = ask(temperature=0, logprobs=True, top_logprobs=3)
    tokens = reply.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode().lstrip() == text_of(reply)
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob < 0


def test_tools_are_taken_and_results_refused_where_prompts_have_no_place_for_them(ask):
    assert ask(tools=[TOOL], tool_choice="auto").choices[0].finish_reason
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    conversation = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    with pytest.raises(openai.BadRequestError, match="the form of HH-RLHF"):
        ask(messages=conversation, tools=[TOOL])


def test_a_developer_s_message_is_the_system_s(ask):
    def tokens(role):
        messages = [{"role": role, "content": "Be brief."}, *MESSAGES]
        return ask(messages=messages, temperature=0).usage.prompt_tokens

    assert tokens("developer") == tokens("system") != tokens("user")


def test_a_schema_is_followed(ask):
    own = formatted(enum=["yes", "no"])
    for seed in range(3):
        assert json.loads(text_of(ask(seed=seed, max_tokens=40, **own))) in ("yes", "no")


def test_the_preference_selects_the_model(ask):
    replies = [
        ask(model="tiny@brevity=0.25", temperature=0),
        ask(temperature=0, **extra(preference={"brevity": 0.25, "positivity": 0.75})),
    ]
    assert all(text_of(reply) == text_of(reply).lstrip() != "" for reply in replies)
    assert {reply.model for reply in replies} == {"tiny@brevity=0.25,positivity=0.75"}
    assert text_of(replies[0]) == text_of(replies[1])
    assert ask(model=replies[0].model).model == replies[0].model
    names = [model.id for model in ask.client.models.list()]
    assert names[:2] == ["tiny", "tiny@base"]
    others = {text_of(ask(model=name, temperature=0)) for name in names}
    assert len(others) > 1


def test_a_character_of_several_tokens_has_the_logprob_of_its_last_one(folder):
    engine = LlamaEngine(folder, num_slots=1, context=CONTEXT, num_threads=1)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 5, "logprobs": True}
    body |= {"top_logprobs": 1, "grammar": 'root ::= "漢é"'}
    reply = engine.reply(body, engine.served.scales())
    han, accented = reply["choices"][0]["logprobs"]["content"]
    assert reply["usage"]["completion_tokens"] == 5
    *_, last = AutoTokenizer.from_pretrained(smoke.POLICY)("漢").input_ids
    assert (han["token"], han["id"], bytes(han["bytes"]).decode()) == ("漢", last, "漢")
    assert accented["token"] == "é"


@pytest.mark.every_case
@pytest.mark.parametrize("content", ["Where is my ladder?", "Where? " * 80])
def test_llama_cpp_stops_at_the_next_part(folder, content):
    engine = LlamaEngine(folder, num_slots=1, context=CONTEXT, num_threads=1)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 200}
    body |= {"stream": True, "return_progress": True, "ignore_eos": True}
    for last in (1, 4):
        parts = []

        def on_chunk(part, parts=parts, last=last):
            parts.append(part)
            return len(parts) >= last

        engine.reply(body, engine.served.scales(), on_chunk)
        assert len(parts) == last
    assert "prompt_progress" in parts[0]


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["a@b", " ", "a b", "a\tb", "a\x1b"])
def test_a_name_that_cannot_be_asked_for_is_refused_at_the_start(folder, name):
    options = ["--export", str(folder), "--name", name, "--port", str(free_port())]
    with (
        pytest.raises(UserError, match="name must have no blanks and no @"),
        endpoint(COMMANDS["serve"].parse(options)),
    ):
        pass
