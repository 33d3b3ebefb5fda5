import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from firm.run import Run, UserError, exit_on_user_error, parse


@dataclass(frozen=True)
class Nothing:
    """A configuration without keys."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("beta is -1;\n  use 0."), "error: beta is -1; use 0.\n"),
        (ValueError("NaN reward."), "error: NaN reward. (FIRM_TRACEBACK=1 shows where)\n"),
        (ValueError(), "error: ValueError (FIRM_TRACEBACK=1 shows where)\n"),
        (
            FileNotFoundError(2, "No such file", "a.jsonl"),
            "error: [Errno 2] No such file: 'a.jsonl' (FIRM_TRACEBACK=1 shows where)\n",
        ),
        (UserError("no \x1b[2J\u202ename\ud800"), "error: no \\x1b[2J\\u202ename\\ud800\n"),
        (UserError("x" * 9_999), f"error: {'x' * 3_999}…\n"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(error, line, capsys) -> None:
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise error
    assert end.value.code == 2
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [RuntimeError("state"), TypeError("defect"), KeyError("defect")])
def test_defects_keep_their_traceback(error) -> None:
    with pytest.raises(type(error)), exit_on_user_error():
        raise error


def test_the_traceback_is_there_when_asked_for(monkeypatch) -> None:
    monkeypatch.setenv("FIRM_TRACEBACK", "1")
    with pytest.raises(UserError), exit_on_user_error():
        raise UserError("beta is -1.")


def test_code_of_a_user_that_exits_is_named(capsys, monkeypatch) -> None:
    def plugin() -> None:
        sys.exit(0)

    with pytest.raises(SystemExit) as end, exit_on_user_error():
        plugin()
    assert end.value.code == 2
    assert re.fullmatch(
        r"error: SystemExit: 0 \(tests/run/test_errors\.py:\d+\) ended the program; .*\n",
        capsys.readouterr().err,
    )
    monkeypatch.setenv("FIRM_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="SystemExit: 0"), exit_on_user_error():
        plugin()
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        parse(Nothing, ["--help"])
    assert end.value.code == 0


def test_an_interrupted_program_says_so(capsys) -> None:
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_a_terminated_run_notes_how_it_ended(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end, exit_on_user_error(), Run.create(tmp_path / "a", {}):
        terminate()
    assert end.value.code == 143
    assert capsys.readouterr().err == "terminated\n"
    assert Run(tmp_path / "a").record()["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_request_to_end_does_not_cut_the_first_one_short() -> None:
    done = []

    def end_and_tidy_up() -> None:
        try:
            terminate()
        finally:
            terminate()
            done.append("tidied up")

    with pytest.raises(SystemExit) as end, exit_on_user_error():
        end_and_tidy_up()
    assert end.value.code == 143
    assert done


def test_whoever_has_a_handler_of_their_own_keeps_it() -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with exit_on_user_error():
            terminate()
        assert heard == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with exit_on_user_error():  # the engine of several processes installs its own inside
            signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
            terminate()
        terminate()
        assert len(heard) == 3
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_child_ends_by_the_signal_as_it_would_have() -> None:
    with exit_on_user_error():
        if (child := os.fork()) == 0:
            try:
                terminate()
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM


def test_a_thread_hears_of_no_signal_and_asks_for_none() -> None:
    handlers = []

    def work() -> None:
        with exit_on_user_error():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]
