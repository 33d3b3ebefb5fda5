import pytest

from firm.run import UserError, exit_on_user_error


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


def test_an_interrupted_program_says_so(capsys) -> None:
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
