import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from firm.alignment import rendering
from firm.alignment.prompts import apply_template
from firm.alignment.rendering import TemplateBroken, TemplateRejects, render
from tests.smoke import POLICY

HELLO = [{"role": "user", "content": "Hello"}]
ECHO = "{{ messages[0].content }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DEEP = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"


def test_it_writes_what_transformers_writes():
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=1) }}{% endif %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}\n{% endfor %}"
        "{{ tools | tojson }}{{ thinking }}{{ strange }}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    messages = [
        {"role": "user", "content": "a \ud83d\u2028 \u4f60 <|x|>\n", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [{"a": [1, None, 0.1]}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": True}}}]
    options = {"tools": tools, "thinking": 1, "add_generation_prompt": True, "strange": {1, 2}}
    expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert apply_template(tokenizer, messages, **options) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 3000000000 }}", r"it takes more than 512 MiB of memory"),
        ("{% set a = ['a' * 9999999] * 99999 %}{{ a | join }}", r"it takes more than 512 MiB"),
        (DEEP, r"nested too deeply|crashes the process that renders it \(SIGSEGV\)|too many"),
        ("{{ 'a' * 20000001 }}", "it writes more than 20,000,000 characters"),
        ("{% endfor %}", "line 1: Encountered unknown tag 'endfor'"),
        (ENDLESS, r"it takes longer than 0\.5 s"),
    ],
)
def test_a_template_that_takes_too_much_is_broken(monkeypatch, template, reason):
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 0.5 if template == ENDLESS else 60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TemplateBroken, TemplateRejects), match=reason):
        render(template, HELLO, {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert render(ECHO, HELLO, {}) == "Hello"


def test_a_template_that_raises_rejects_the_conversation():
    for template in ("{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages[7].content.x }}"):
        with pytest.raises(TemplateRejects):
            render(template, HELLO, {})


def test_a_template_reads_no_file_and_sees_no_environment():
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{% include '/etc/hostname' %}",
    ):
        with pytest.raises((TemplateRejects, TemplateBroken)):
            render(template, HELLO, {})


def test_threads_and_forked_processes_get_their_own_answers():
    def rendered(n: int) -> str:
        return render(ECHO, [{"role": "user", "content": str(n)}], {})

    assert rendered(-1) == "-1"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rendered, range(200))) == [str(n) for n in range(200)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, rendered(7).encode())
        finally:
            rendering._renderer(os.getpid()).close()
            os._exit(0)
    assert rendered(8) == "8"
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"7"


def test_an_interrupted_request_leaves_no_answer_to_the_next(monkeypatch):
    render(ECHO, HELLO, {})
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 60)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
    # ignored in a process that a shell has started in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            render(ENDLESS, HELLO, {})
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert render(ECHO, [{"role": "user", "content": "next"}], {}) == "next"


def test_a_killed_renderer_is_started_again():
    render(ECHO, HELLO, {})
    process = rendering._renderer(os.getpid())._process
    assert process
    process.kill()
    process.wait()
    with pytest.raises(TemplateBroken, match="SIGKILL"):
        render(ECHO, HELLO, {})
    assert render(ECHO, HELLO, {}) == "Hello"
