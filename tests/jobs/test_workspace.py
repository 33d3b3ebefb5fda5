"""The workspace that W&B is asked to save, as a server on this machine receives it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from firm.base.extras import install_command
from firm.cli.main import COMMANDS
from firm.run import Run, Tracker, TrackingConfig
from tests.report.conftest import FakeRun, write_run
from tests.wandb_files import items, merged, on_a_terminal, records_of

cli = COMMANDS["workspace"].run

OBJECTIVES = ("helpful", "harmless")
SAVE = """
import sys
from firm.cli.main import main
for arguments in sys.argv[1:]:
    main(["workspace", *arguments.split()])
"""

REFUSED = """
import os, sys
import firm.jobs.workspace, wandb_workspaces.workspaces  # once for both
from firm.cli.main import main
for key in ({}, {"WANDB_API_KEY": "k" * 40}):
    if not os.fork():
        os.environ |= key
        main(["workspace", "--run", sys.argv[1]])
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 2
"""


@contextmanager
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address of a W&B server that takes every key, and what it is asked to save."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/graphql":
                self.send_error(404)
                return
            request = json.loads(body)
            answer: dict[str, Any] = {"viewer": {"id": "1", "entity": "me", "flags": "{}"}}
            if "upsertView" in request["query"]:
                asked.append(request["variables"])
                answer = {"upsertView": {"view": {"id": "1", "name": "nw-mine-v"}}}
            content = json.dumps({"data": answer}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}", asked
        finally:
            served.shutdown()
            thread.join()


def environment(home: Path, **more: str) -> dict[str, str]:
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE")
    own = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**own, "HOME": str(home), "NETRC": str(home / "netrc"), **more}


@pytest.fixture(scope="module")
def run_path(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", FakeRun(OBJECTIVES, num_clients=2))


@pytest.fixture(scope="module")
def study_path(tmp_path_factory) -> Path:
    """A study of three runs, of which one has not begun."""
    path = tmp_path_factory.mktemp("studies") / "study"
    for name in ("firm-seed_0", "firm-seed_1"):
        write_run(path / "points" / name, FakeRun(OBJECTIVES, num_clients=2, has_samples=False))
    points = {f"firm-seed_{seed}": {"setting": "FIRM", "seed": seed} for seed in range(3)}
    (path / "sweep.json").write_text(json.dumps({"id": "1", "config": {}, "points": points}))
    return path


@pytest.fixture(scope="module")
def asked(run_path, study_path, tmp_path_factory) -> list[dict[str, Any]]:
    """What W&B is asked to save for the run, for the study, and for one on pairs."""
    on_pairs = write_run(tmp_path_factory.mktemp("runs") / "pairs", FakeRun(OBJECTIVES))
    with (on_pairs / "config.yaml").open("a") as file:
        file.write("pairs:\n  helpful:\n    source: helpful.jsonl\n")
    pytest.importorskip("wandb_workspaces")
    with server() as (address, asked):
        done = subprocess.run(
            [
                *(sys.executable, "-c", SAVE, f"--run {run_path}"),
                f"--run {study_path} --entity team --project mine --name Seeds",
                f"--run {on_pairs}",
            ],
            env=environment(
                tmp_path_factory.mktemp("home"), WANDB_BASE_URL=address, WANDB_API_KEY="k" * 40
            ),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"workspace {address}/me/firm?nw=mine",
        f"workspace {address}/team/mine?nw=mine",
        f"workspace {address}/me/firm?nw=mine",
    ]
    return asked


def sections(view: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Title of a section -> configurations of its panels."""
    bank = json.loads(view["spec"])["section"]["panelBankConfig"]
    return {
        part["name"]: [panel["config"] for panel in part["panels"]] for part in bank["sections"]
    }


def figures(view: dict[str, Any]) -> dict[str, list[str]]:
    """Title of a figure over the rounds -> names of its series."""
    panels = [panel for part in sections(view).values() for panel in part if "metrics" in panel]
    assert {panel["xAxis"] for panel in panels} == {"round"}
    return {panel["chartTitle"]: panel["metrics"] for panel in panels}


@pytest.mark.slow
def test_the_workspace_draws_what_the_page_of_the_run_draws(asked):
    drawn = figures(asked[0])
    clients = ("client_0", "client_1")
    assert drawn["λ of helpful"] == [
        "train/weight/helpful",
        *(f"weights/helpful/{client}" for client in clients),
    ]
    assert drawn["KL from the base model"] == [
        "train/kl", "evaluation/validation/kl", "kl/client_0", "kl/client_1",
    ]  # fmt: skip
    assert drawn["Spread of the scores"] == [f"train/scores_std/{name}" for name in OBJECTIVES]
    assert drawn["Bytes sent so far"] == ["round/bytes_up_so_far", "round/bytes_down_so_far"]
    (rewards, _) = sections(asked[0])["Rewards by round"]
    assert rewards["metrics"][:2] == [
        "train/reward/helpful", "evaluation/validation/rewards/helpful/mean",
    ]  # fmt: skip
    assert len(sections(asked[0])["Results and samples"]) == 2
    assert "Further quantities" not in sections(asked[0])  # the run has none


def test_every_series_and_table_of_the_workspace_is_one_that_the_run_sends(
    asked, run_path, tmp_path
):
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(config, tmp_path, {}, objectives=OBJECTIVES) as tracker:
        for row in Run(run_path).rows():
            tracker.log(row)
        tracker.log_samples(Run(run_path).samples())
    records = records_of(tmp_path)
    history = merged(items(records, "history"))
    assert {name for names in figures(asked[0]).values() for name in names} <= history.keys()
    plane, ends = sections(asked[0])["The trade-off"]
    assert {ends[axis].removeprefix("summary:") for axis in ("xAxis", "yAxis")} <= history.keys()
    *_, logged = (
        change["_wandb"]["visualize"]["trade-off/helpful-harmless"]["panel_config"]
        for change in items(records, "config")
        if "trade-off/helpful-harmless" in change.get("_wandb", {}).get("visualize", {})
    )
    assert {key: plane[key] for key in logged if key != "userQuery"} == {
        key: value for key, value in logged.items() if key != "userQuery"
    }
    (query,), (own,) = (each["userQuery"]["queryFields"] for each in (plane, logged))
    assert sorted(query["fields"], key=str) == sorted(own["fields"], key=str)
    assert "trade-off/helpful-harmless_table" in history
    tables = [json.dumps(panel) for panel in sections(asked[0])["Results and samples"]]
    for name, panel in zip(("test", "samples"), tables, strict=True):
        assert f'"{name}"' in panel
        assert name in history


def test_of_a_study_it_draws_means_over_the_seeds_and_their_errors(asked):
    one, several = (json.loads(view["spec"])["section"]["runSets"][0] for view in asked[:2])
    assert one["grouping"] == []
    assert [key["name"] for key in several["grouping"]] == ["group", "jobType"]
    assert asked[1]["displayName"] == "Seeds"
    assert (asked[1]["entityName"], asked[1]["projectName"]) == ("team", "mine")
    assert figures(asked[1])["λ of helpful"] == ["train/weight/helpful"]
    assert len(sections(asked[1])["Results and samples"]) == 1  # no texts were shown
    for panel in sections(asked[1])["Rewards by round"]:
        assert (panel["groupAgg"], panel["groupArea"]) == ("mean", "stderr")
    assert "groupAgg" not in sections(asked[0])["Rewards by round"][0]


def test_rewards_have_their_unit_and_accuracies_on_pairs_theirs(asked):
    units = {"Rewards by round": "mean reward in [0, 1]"}
    units |= {"Accuracies by round": "share of pairs ranked as by people"}
    for view, (title, unit) in zip((asked[0], asked[2]), units.items(), strict=True):
        assert {panel["yAxisTitle"] for panel in sections(view)[title]} == {unit}
    *_, ends = sections(asked[2])["The trade-off"]
    assert ends["chartTitle"] == "Accuracy on the test pairs: harmless against helpful"


@pytest.mark.slow
def test_without_key_or_network_it_ends_in_one_line(run_path, tmp_path):
    pytest.importorskip("wandb_workspaces")
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_HTTP_TIMEOUT": "2"}
    command = [sys.executable, "-c", REFUSED, f"{run_path}"]
    status, output = on_a_terminal(command, environment(tmp_path, **nobody))
    assert status == 0, output
    without, with_a_key = output.splitlines()
    assert without.startswith("error: W&B could not save the workspace: No API key")
    assert with_a_key.startswith("error: W&B could not save the workspace: Failed to verify")


def test_what_cannot_be_drawn_is_refused(run_path, refusal, tmp_path, monkeypatch):
    begun = write_run(tmp_path / "begun", FakeRun(OBJECTIVES, num_done=0, is_over=False))
    assert "has no completed round to draw" in refusal(cli, ["--run", begun])
    assert "there is no run at" in refusal(cli, ["--run", tmp_path])
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert install_command("wandb") in refusal(cli, ["--run", run_path])


LAYOUT = """
import logging, sys
from pathlib import Path
logging.basicConfig(format="%(message)s")
from firm.jobs import workspace
workspace.LAYOUT_SECONDS = float(sys.argv[2])
workspace.show_layout(Path(sys.argv[1]))
"""


def layout(path: Path, home: Path, *, seconds: float = 60, **more: str) -> list[str]:
    """Lines that `show_layout` logs."""
    done = subprocess.run(
        [sys.executable, "-c", LAYOUT, str(path), str(seconds)],
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.slow
def test_a_run_that_w_and_b_receives_gets_its_layout_by_itself(tmp_path):
    pytest.importorskip("wandb_workspaces")
    run = write_run(tmp_path / "run", FakeRun(OBJECTIVES, num_clients=2))
    (run / "wandb/offline-run-1").mkdir(parents=True)
    assert layout(run, tmp_path) == []
    (run / "wandb/run-1").mkdir()
    with server() as (address, asked):
        lines = layout(run, tmp_path, WANDB_BASE_URL=address, WANDB_API_KEY="k" * 40)
    assert lines == [f"W&B: the figures of the page are at {address}/me/firm?nw=mine"]
    assert [view["displayName"] for view in asked] == ["FIRM: run"]
    assert "Rewards by round" in sections(asked[0])


@pytest.mark.slow
def test_a_layout_that_cannot_be_saved_is_one_line(tmp_path):
    pytest.importorskip("wandb_workspaces")
    run = write_run(tmp_path / "run", FakeRun(OBJECTIVES, num_clients=2))
    (run / "wandb/run-1").mkdir(parents=True)
    (line,) = layout(run, tmp_path)
    assert line.startswith("W&B draws its default layout (W&B could not save the workspace: ")
    assert line.endswith(f"; repeat with: firm workspace {run}")


@pytest.mark.slow
def test_a_run_does_not_wait_for_a_server_that_is_silent(tmp_path):
    pytest.importorskip("wandb_workspaces")
    run = write_run(tmp_path / "run", FakeRun(OBJECTIVES, num_clients=2))
    (run / "wandb/run-1").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        own = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "k" * 40, "WANDB_HTTP_TIMEOUT": "300"}
        (line,) = layout(run, tmp_path, seconds=1, **own)
    assert line == (
        "W&B draws its default layout (W&B has not answered within 1 s); "
        f"repeat with: firm workspace {run}"
    )
