"""Links in a run that came from someone else: nothing outside its folder is changed or read."""

import os
import shutil
from pathlib import Path

import pytest

from firm.base.inside import give
from firm.cli.main import main
from firm.run import Run
from tests import smoke


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was interrupted in its second round; no test changes it."""
    folder = tmp_path_factory.mktemp("links") / "run"
    smoke.run_stopped_in_round_2("--out", folder, "--checkpoints.keep_last", 1)
    return folder


@pytest.fixture
def outside(tmp_path) -> Path:
    """A folder with what a link may lead to."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").write_text("own" * 1000)
    (folder / "inner/file").write_text("own")
    return folder


def content(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


NAMES = [
    *(".lock", "config.yaml", "run.json", "metrics.jsonl", "samples.jsonl", "error.txt"),
    *("checkpoints", "checkpoints/round_0001", "checkpoints/round_0001/state.json"),
    *("checkpoints/.round_0002.draft", "checkpoints/round_0002"),
    *("report.html", "plotly.min.js", "test_scores.safetensors", "front.json", "front"),
    *("adapter", "adapter/adapter_config.json", ".adapter.draft", "wandb", "tensorboard"),
]
"""Files and folders that FIRM and its libraries read or write in a run."""


def put_link(path: Path, target: str, outside: Path) -> None:
    """Puts a link to `target` in the place of a file or folder.

    The target "moved" gets the content of that place, so that the run works by the link.
    """
    if path.exists() and target == "moved":
        path.rename(outside / "moved")
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(outside / target)


@pytest.mark.parametrize("target", ["moved", "file", "inner", "nowhere"])
def test_a_run_with_a_link_is_not_resumed(stopped, outside, tmp_path, refusal, target):
    for name in NAMES:
        theirs = Path(shutil.copytree(stopped, tmp_path / "theirs"))
        put_link(theirs / name, target, outside)
        before = content(outside), content(theirs)
        line = refusal(main, ["resume", theirs])
        known = ("there is no run", "not a finished run", "needs the folder of a run")
        is_unread = name == "config.yaml" and target in ("inner", "nowhere")
        assert f"{theirs / name} is a link" in line or (is_unread and any(k in line for k in known))
        assert (content(outside), content(theirs)) == before, name
        shutil.rmtree(theirs)
        shutil.rmtree(outside / "moved", ignore_errors=True)
        (outside / "moved").unlink(missing_ok=True) if (outside / "moved").is_file() else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [(name, ("moved", "inner", "nowhere")[at % 3]) for at, name in enumerate(NAMES)],
)
def test_a_link_that_comes_after_the_check_leads_nowhere(
    stopped, outside, tmp_path, monkeypatch, undrawn, name, target
):
    theirs = Path(shutil.copytree(stopped, tmp_path / "theirs"))
    put_link(theirs / name, target, outside)
    before = content(outside)
    monkeypatch.setattr("firm.run.files.check_links", give)
    code = 0
    try:
        main(["resume", str(theirs)])
    except SystemExit as end:
        code = end.code
    assert code == 2 or Run(theirs).record()["status"] == "finished"
    assert all("is a link" in note for note in undrawn)
    assert content(outside) == before


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "samples.jsonl"])
def test_a_file_with_a_second_name_outside_is_not_appended_to(
    stopped, outside, tmp_path, refusal, name
):
    theirs = Path(shutil.copytree(stopped, tmp_path / "theirs"))
    os.link(theirs / name, outside / "second")
    before = content(outside)
    line = refusal(main, ["resume", theirs])
    assert f"{theirs / name} is a file with a second name (a hard link)" in line
    assert "replace it with a copy of itself" in line
    assert content(outside) == before


def test_the_run_itself_may_be_a_link(stopped, outside, tmp_path):
    shutil.copytree(stopped, tmp_path / "disk/theirs")
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "run").symlink_to("runs/theirs")
    main(["resume", str(tmp_path / "run")])
    assert Run(tmp_path / "disk/theirs").record()["status"] == "finished"


@pytest.mark.parametrize("command", ["chat", "export", "evaluate"])
def test_no_file_outside_is_read_for_a_strangers_run(
    run, outside, tmp_path, refusal, monkeypatch, command
):
    theirs = Path(shutil.copytree(run, tmp_path / "theirs"))
    put_link(theirs / "adapter/tokenizer_config.json", "moved", outside)
    before = content(outside), content(theirs)
    monkeypatch.chdir(tmp_path)
    line = refusal(main, [command, theirs])
    assert f"{theirs}/adapter/tokenizer_config.json is a link" in line
    assert (content(outside), content(theirs)) == before
