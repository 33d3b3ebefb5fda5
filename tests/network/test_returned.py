"""A site that is connected again is seen by the server before its next task, over real FLARE."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from benchmarks.loopback import federation
from firm.network import console, jobs
from firm.network.controller import FlareChannel, SitesController
from firm.network.daemons import search_path
from firm.network.sites import Lost
from firm.run.errors import UserError
from firm.run.lock import check_not_held

ROOT = Path(__file__).parents[2]
CONTROLLER = "tests.network.test_returned.Rounds"
ECHO = "import sys; from firm.network import link; link.serve(sys.argv[1], lambda message: message)"
PATIENCE = 400.0


class Rounds(SitesController):
    """Asks the site for nothing, round after round, until it has been away and is back.

    Args:
        name: Of a run.
        out: File of the rounds so far: whether the site is back, and why its answer is missing.
    """

    def __init__(self, name: str, out: str) -> None:
        super().__init__()
        self._out = Path(out)

    def work(self, channel: FlareChannel) -> None:
        rounds: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            channel.transcript.since(0)  # as an administrator who follows does
            if back := channel.returned():
                rounds.append({"back": back})
            else:
                answer = channel.ask({"bank": b"nothing"}, timeout=60)["bank"]
                rounds.append({"lost": answer.reason if isinstance(answer, Lost) else None})
            self._out.with_suffix(".draft").write_text(json.dumps(rounds), encoding="utf-8")
            self._out.with_suffix(".draft").rename(self._out)
            if back:
                return
            time.sleep(0.5)


def _rounds(out: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        return json.loads(out.read_text(encoding="utf-8"))
    return []


def _is_free(kit: Path) -> bool:
    with suppress(UserError):
        check_not_held(kit)
        return True
    return False


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
def test_a_site_that_is_back_is_seen_before_its_next_task(tmp_path):
    out = tmp_path / "rounds.json"
    with federation(
        tmp_path / "kits",
        name="returned",
        controller=CONTROLLER,
        arguments={"name": jobs.NAME, "out": str(out)},
        sites=["bank"],
        site_command=lambda site, profile: [sys.executable, "-c", ECHO, str(profile)],
        environment=search_path(ROOT),
    ) as running:
        with console.session(running.kits["admin"]) as opened:
            console.submit(
                opened,
                name="run",
                sites=["bank"],
                controller=CONTROLLER,
                arguments={"name": "run", "out": str(out)},
                heartbeat_interval=1.0,
                heartbeat_timeout=8.0,
            )
        _until(lambda: _rounds(out)[-1:] == [{"lost": None}])
        bank = running.daemons[1]
        bank.__exit__(None, None, None)
        _until(lambda: _rounds(out)[-1:] == [{"lost": "it is not connected"}])
        _until(lambda: _is_free(running.kits["bank"]))  # its job's process ends last
        bank.__enter__()  # the federation ends it
        _until(lambda: "back" in _rounds(out)[-1])
    before, last = _rounds(out)[:-1], _rounds(out)[-1]
    assert last == {"back": ["bank"]}
    # in one round at most, the site was connected again when its answer was found missing
    assert [row for row in before[:-1] if "is connected" in (row["lost"] or "")] == []
