"""Commands end well on a console whose encoding lacks what they print or read."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from firm.base.console import accept_any_text
from firm.cli import main as firm
from firm.cli.main import COMMANDS
from firm.run import print_table, run_cli
from tests import smoke

ENCODING = "cp1252"  # of consoles on Windows
FILE = """
from reward_models import reward_model

@reward_model("größe")
def size(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def console(monkeypatch) -> Callable[..., Callable[[], str]]:
    """Puts a console of an encoding in place of the standard streams; returns what it shows."""

    def use(encoding: str, said: bytes = b"") -> Callable[[], str]:
        streams = {name: io.BytesIO() for name in ("stdout", "stderr")}
        for name, stream in [*streams.items(), ("stdin", io.BytesIO(said))]:
            monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding))

        def shown() -> str:
            sys.stdout.flush()
            return streams["stdout"].getvalue().decode(encoding)

        return shown

    return use


def test_help_is_printed(console):
    shown = console("ascii")
    with pytest.raises(SystemExit) as ended:
        firm.main(["align", "--help", "all"])
    assert ended.value.code == 0
    assert COMMANDS["align"].text in shown()


def test_a_run_an_evaluation_and_a_chat_end(console, tmp_path, new_plugins):
    file, run = tmp_path / "größen.py", tmp_path / "läufe 运行"
    file.write_text(FILE, encoding="utf-8")
    shown = console(ENCODING)
    rewards = f"{{size: {{name: größe, file: {file}}}, brief: {{name: brevity}}}}"
    options = ["--rounds", "1", "--out", str(run), "--rewards", rewards]
    firm.main(["align", "--config", str(smoke.SMOKE), *options])
    assert "mean " in shown()
    allowed = ["--allow_code", "true"]
    firm.main(["evaluate", "--runs", f"[{run}]", *allowed, "--out", str(tmp_path / "größer")])
    console(ENCODING, "Grüße 你好\n".encode() + b"\xff\xfe\n")
    firm.main(["chat", "--run", str(run), *allowed])


def test_a_table_keeps_its_frame_and_shows_escapes(console):
    shown = console(ENCODING)
    print_table("λ ± ε", ["", "λ"], [["helpful", "0.5 \N{INFINITY}"]])
    title, *lines = shown().splitlines()
    assert title == r"\u03bb ± \u03b5"
    assert r"0.5 \u221e" in "\n".join(lines)
    assert r"\u2500" not in "\n".join(lines)  # the frame is one of ASCII


def test_the_command_line_of_a_recipe_prints_any_text(console):
    @dataclass(frozen=True)
    class Config:
        seed: int = 0

    shown = console(ENCODING)
    run_cli(lambda cfg: sys.stdout.write("λ\n"), Config, [])
    assert shown() == r"\u03bb" + "\n"


def test_a_console_that_knows_all_characters_shows_them(console):
    shown = console("utf-8")
    accept_any_text()
    sys.stdout.write("λ ± 你好")
    assert shown() == "λ ± 你好"


def test_an_input_that_has_been_read_from_stays_as_it_is(console):
    console("ascii", b"first\nsecond\n")
    assert sys.stdin.readline() == "first\n"
    accept_any_text()
    assert sys.stdin.readline() == "second\n"
    assert sys.stdout.errors == "backslashreplace"
