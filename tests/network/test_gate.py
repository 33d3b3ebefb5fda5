"""The gate for an administrator's commands, which says what a job cannot answer."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from nvflare.fuel.hci.proto import MetaStatusValue
from nvflare.fuel.hci.server.constants import ConnProps

from firm.network.gate import CommandGate
from firm.network.wire import LISTENING

JOB = "6cb5759a-e8fd-4a1f-999f-20e534e5a35c"


class Conn:
    """An administrator's connection with a server whose kit is a folder."""

    def __init__(self, kit, command):
        self.app_ctx = SimpleNamespace(args=SimpleNamespace(workspace=str(kit)))
        self.props = {ConnProps.CMD_ENTRY: SimpleNamespace(name=command)}
        self.errors: list[dict[str, Any]] = []

    def get_prop(self, name):
        return self.props[name]

    def append_error(self, text, meta):
        self.errors.append(meta)


@pytest.fixture
def ask(tmp_path):
    """Returns the status with which the gate refuses a command; None if it passes."""
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()

    def ask(command, *arguments):
        conn = Conn(tmp_path, command)
        is_passed = CommandGate().pre_command(conn, [command, *arguments])  # type: ignore[arg-type]
        assert is_passed == (not conn.errors)
        return None if is_passed else conn.errors[0]["status"]

    return ask


def test_a_job_is_asked_only_while_it_listens(ask, tmp_path):
    (tmp_path / JOB).mkdir()
    assert ask("app_command", JOB, "firm.said") == MetaStatusValue.JOB_NOT_RUNNING
    (tmp_path / JOB / LISTENING).touch()
    assert ask("app_command", JOB, "firm.said") is None


@pytest.mark.parametrize("arguments", [[], [""], ["../kit"], ["/tmp"], ["x\0"]])
def test_no_other_place_is_a_job(ask, tmp_path, arguments):
    (tmp_path / LISTENING).touch()
    assert ask("app_command", *arguments) == MetaStatusValue.JOB_NOT_RUNNING


def test_commands_that_no_run_needs_are_refused(ask):
    assert ask("shell", "server", "ls") == MetaStatusValue.NOT_AUTHORIZED
    assert ask("list_jobs") is None
