"""Hostile texts in prompts, replies, errors and paths: no file, page or terminal obeys them."""

import contextlib
import csv
import html.parser
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plotly.offline
import pytest

from firm.base.sanitize import legible, printable
from firm.cli.main import COMMANDS
from tests.plugins import plugins_forgotten
from tests.smoke import FRONT, POLICY, ROOT, SMOKE
from tests.wandb_files import items, records_of

OBEYED = "\x1b[2J\u202e\u2066"
"""What a terminal, an editor or a browser acts on."""
TAG = "<script>alert`1`<|script>"
"""Markup in letters that a path may have."""
HOSTILE = f"a{OBEYED}\u2028{TAG}|b"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
REWARDS = """
from reward_models import reward_model


@reward_model("brief")
def brief(completions, **columns):
    return [1 / (1 + len(text)) for text in completions]


@reward_model("failing")
def failing(completions, **columns):
    if len(completions) < 16:  # not in the calibration
        raise RuntimeError({text!r})
    return brief(completions)
"""
TEXT_FILES = {".csv", ".html", ".json", ".jsonl", ".md", ".txt", ".yaml"}


class Outputs:
    """What a user of hostile texts gets to see: a folder of runs, and what the commands print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, {}

    def call(self, name: str, command: str, *arguments: object) -> None:
        """Runs a command and keeps what it prints."""
        streams = io.StringIO()
        with (
            contextlib.chdir(ROOT),
            contextlib.redirect_stdout(streams),
            contextlib.redirect_stderr(streams),
            contextlib.suppress(SystemExit),
        ):
            COMMANDS[command].run([*map(str, arguments)])
        self.printed[name] = streams.getvalue()

    def files(self, pattern: str = "*") -> Iterator[Path]:
        """Yields text files; tokenizers are data, which holds what the user's own held."""
        for file in sorted(self.folder.rglob(pattern)):
            is_own = "wandb" not in file.parts and not file.name.startswith("tokenizer")
            if file.suffix in TEXT_FILES and is_own:
                yield file


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Outputs:
    """An alignment, a failed one, and an evaluation, a chat and merged models of the first."""
    folder = tmp_path_factory.mktemp("hostile") / HOSTILE
    policy = Path(shutil.copytree(POLICY, folder / f"policy {HOSTILE}"))
    tokenizer = json.loads((policy / "tokenizer.json").read_text())
    replies = {"type": "Replace", "pattern": {"String": "e"}, "content": HOSTILE}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], replies]}
    (policy / "tokenizer.json").write_text(json.dumps(tokenizer))
    rewards = folder / f"rewards {HOSTILE}.py"
    rewards.write_text(REWARDS.format(text=HOSTILE))
    data = folder / f"prompts {HOSTILE}.json"
    prompts = [f"\n\nHuman: Say {number} {HOSTILE}\n\nAssistant:" for number in range(48)]
    data.write_text(json.dumps([{"prompt": text, "kind": HOSTILE} for text in prompts]))
    splits = {"train": "[:24]", "validation": "[24:36]", "test": "[36:]"}
    settings = {
        "policy": {"path": str(policy)},
        "rewards": {
            "brevity": {"name": "brevity"},
            "brief": {"name": "brief", "file": str(rewards)},
        },
        "data": {name: {"source": str(data), "split": split} for name, split in splits.items()},
        "rounds": 1,
    }
    file = folder / "hostile.yaml"
    file.write_text(json.dumps(settings))

    found, out = Outputs(folder / "out"), folder / "out" / f"run {HOSTILE}"
    command = ["--config", SMOKE, "--config", file]
    with plugins_forgotten():
        found.call("plan", "align", *command, *FRONT, "--plan")
        offline = ("--tracking.mode", "offline")
        found.call("align", "align", *command, *FRONT, *offline, "--out", out)
        failing = ("--rewards.brief.name", "failing")
        found.call("failed", "align", *command, *failing, "--out", folder / "out/failed")
        code = ("--allow_code", "true")
        found.call(
            "evaluate", "evaluate", "--runs", json.dumps([str(out)]), *code,
            "--num_prompts", 8, "--out", folder / "out/evaluation",
        )  # fmt: skip
        found.call(
            "pick", "pick", "--front", out / "front.json", "--target", "brevity=0.4,brief=0.6",
            "--merge", "--out", folder / f"out/merged {HOSTILE}",
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(f"Say {HOSTILE}\n/{HOSTILE}\n"))
            found.call("chat", "chat", "--run", out, *code)
    return found


def around(text: str) -> list[str]:
    """Returns the places of characters that are obeyed."""
    return [text[max(m.start() - 60, 0) : m.start() + 30] for m in RAW.finditer(text)]


@pytest.mark.parametrize("command", ["plan", "align", "failed", "evaluate", "pick", "chat"])
def test_a_terminal_gets_escapes_that_can_be_read(outputs, command):
    printed = outputs.printed[command]
    assert around(printed) == []
    assert printable(OBEYED) in printed  # so that the check sees it


def test_files_hold_nothing_that_an_editor_obeys(outputs):
    library = plotly.offline.get_plotlyjs()  # has control characters in texts of its code
    found = {
        file.name: around(file.read_text(encoding="utf-8").replace(library, ""))
        for file in outputs.files()
    }
    assert {name: places[:2] for name, places in found.items() if places} == {}
    assert found.keys() >= {
        *("README.md", "config.yaml", "error.txt", "evaluation.html", "figures.csv"),
        *("front.json", "metrics.jsonl", "report.html", "run.json", "samples.csv"),
    }
    (error,) = outputs.files("error.txt")
    assert printable(OBEYED) in error.read_text()
    (samples,) = outputs.files("samples.csv")
    with samples.open(newline="") as lines:
        assert all(legible(OBEYED) in row["prompt"] for row in csv.DictReader(lines))


class Elements(html.parser.HTMLParser):
    """Collects a page's elements with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_pages_run_their_own_scripts_alone(outputs):
    pages = list(outputs.files("*.html"))
    assert len(pages) == 2
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "&lt;script&gt;alert" in text, page
        scripts = [attrs for tag, attrs in Elements(text).found if tag == "script"]
        assert all("nonce" in own or own.get("id") == "figures" for own in scripts), page
        figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text)
        for name in texts_in(json.loads(figures[1]) if figures else {}):
            assert around(name) == [], page


def test_cards_show_names_as_text(outputs):
    cards = list(outputs.files("README.md"))
    assert len(cards) > 2
    for card in cards:
        text = card.read_text(encoding="utf-8")
        body = text.split("---\n", 2)[2]
        assert re.search(r"(?<!\\)<script", body) is None, card
        assert str(outputs.folder.parent.parent) not in body, card
        for line in body.splitlines():  # a bar of a name would be one of the table
            if line.startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 6), line


def test_what_goes_to_wandb_is_escaped(outputs):
    (run,) = outputs.folder.glob("run *")
    records = records_of(run)
    sent = [*items(records, "config"), *items(records, "history"), *items(records, "summary")]
    tables = [json.loads(file.read_text()) for file in run.glob("wandb/offline*/**/*.table.json")]
    texts = list(texts_in([sent, tables]))
    assert [place for text in texts for place in around(text)][:2] == []
    assert any(legible(OBEYED) in text for text in texts_in(tables))


def texts_in(value: Any) -> Iterator[str]:
    """Yields every text of plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_in(entry)
