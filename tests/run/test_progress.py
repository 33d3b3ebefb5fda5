import io
import re

import pytest
from rich.console import Console

from firm.run import Progress, print_table

CLIENTS = ["client_0", "client_1"]
OBJECTIVES = ["helpful", "harmless"]
METRICS = {
    "weights": [[0.25, 0.75], [0.75, 0.25], [0.8, 0.2]],
    "rewards": {"helpful": 0.512, "harmless": 0.634},
    "kl": 0.031,
}


def console(*, is_terminal: bool) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=120,
        highlight=False,
        color_system=None,
    )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def train(progress: Progress, round: int, clients: list[str] = CLIENTS) -> None:
    for client in clients:
        progress.event("client_started", round=round, client=client)
        for step in (1, 2):
            for stage in ("rollout", "reward", "update"):
                progress.event("stage", stage=stage, step=step, num_steps=2)
        progress.event("client_finished", metrics=METRICS)


def test_in_a_pipe_there_is_one_plain_line_per_round() -> None:
    pipe = console(is_terminal=False)
    with Progress(2, CLIENTS, OBJECTIVES, console=pipe) as progress:
        progress.event("round_finished", row={"round": 0}, scores={"helpful": 0.5})
        train(progress, 1)
        progress.event("round_finished", row={"round": 1, "seconds": 2.0}, scores={"helpful": 0.6})
        train(progress, 2, clients=["client_1"])
        failures = [{"client": "client_0", "reason": "NaN"}]
        row = {"round": 2, "seconds": 1.0, "failures": failures, "alarms": ["beta is inert"]}
        progress.event("round_finished", row=row)
    base, first, second, note = text_of(pipe).splitlines()
    assert base == "round 0/2  helpful 0.500"
    assert re.fullmatch(
        r"round 1/2  helpful 0\.600  weights 0\.60 0\.40  2\.0 s  ETA 0:00:\d\d", first
    )
    assert second == "round 2/2  weights 0.60 0.40  failed: client_0 (NaN)  1.0 s"
    assert note == "note: beta is inert"


def test_what_the_configuration_warns_of_is_told_at_the_start() -> None:
    pipe = console(is_terminal=False)
    with Progress(3, CLIENTS, OBJECTIVES, console=pipe) as progress:
        progress.event("started", alarms=["KL\nround 1/3", "β"])
    assert text_of(pipe).splitlines() == [r"note: KL\nround 1/3", "note: β"]


def test_a_round_with_privacy_tells_its_epsilon() -> None:
    pipe = console(is_terminal=False)
    with Progress(3, CLIENTS, OBJECTIVES, console=pipe) as progress:
        for round, epsilon in enumerate((1.2345, 123.4, None), start=1):
            train(progress, round)
            row = {"round": round, "privacy": {"epsilon": epsilon, "delta": 1e-5}}
            progress.event("round_finished", row=row)
    told = [re.search(r"ε (\S+)", line) for line in text_of(pipe).splitlines()]
    assert [found and found[1] for found in told] == ["1.23", "123", "∞"]


def test_on_a_terminal_clients_stages_weights_and_rewards_are_shown() -> None:
    terminal = console(is_terminal=True)
    with Progress(4, CLIENTS, OBJECTIVES, console=terminal) as progress:
        train(progress, 1, clients=["client_0"])
        progress.event("client_started", round=1, client="client_1")
        progress.event("stage", stage="rollout", step=2, num_steps=4)
        terminal.print(progress._render())
    lines = [" ".join(line.split()) for line in text_of(terminal).splitlines()]
    assert "client_0 done 0.600 0.400 0.512 0.634 0.031" in lines
    assert "client_1 rollout 2/4" in lines
    assert "client stage λ helpful λ harmless reward helpful reward harmless KL" in lines


def test_the_share_done_rises_from_0_to_1_also_after_a_resume() -> None:
    progress = Progress(4, CLIENTS, OBJECTIVES, console=console(is_terminal=False))
    progress.event("resumed", round=2)
    shares = [progress._share_done()]
    for round in (3, 4):
        for client in CLIENTS:
            progress.event("client_started", round=round, client=client)
            for step in (1, 2):
                progress.event("stage", stage="rollout", step=step, num_steps=2)
                shares.append(progress._share_done())
            progress.event("client_finished", metrics=METRICS)
            shares.append(progress._share_done())
        progress.event("round_finished", row={"round": round})
    quarters = [0.0, 0.125, 0.25, 0.25, 0.375, 0.5]
    assert shares == [0.0, *quarters, *(0.5 + share for share in quarters)]


def test_clients_that_train_at_a_time_are_told_apart_by_name() -> None:
    progress = Progress(1, CLIENTS, OBJECTIVES, console=console(is_terminal=False))
    for client in CLIENTS:
        progress.event("client_started", round=1, client=client)
    progress.event("stage", client="client_0", stage="reward", step=1, num_steps=2)
    progress.event("client_finished", client="client_0", metrics=METRICS)
    assert [view.stage for view in progress._views.values()] == ["done", "starting"]


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match="event must be loading"):
        Progress(1, CLIENTS, OBJECTIVES).event("client_lost")


def test_a_table_in_a_pipe_is_aligned_and_never_folded() -> None:
    pipe = console(is_terminal=False)
    title = "Scores [raw] " * 20
    rows = [["helpful " * 20, "0.5 ± 0.1", 0.61234, None], ["kl", 1, "", "[x]"]]
    print_table(title, ["score", "base", "aligned", "change"], rows, console=pipe)
    lines = text_of(pipe).splitlines()
    assert lines[0] == title
    [helpful] = [line for line in lines if "helpful" in line]
    assert helpful.split()[-5:] == ["0.5", "±", "0.1", "0.612", "-"]
    [kl] = [line for line in lines if "kl" in line]
    assert kl.split() == ["kl", "1", "[x]"]
    assert len(kl.rstrip()) == len(helpful.rstrip())


def test_a_notebook_gets_plain_lines_and_tables(monkeypatch, capsys) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    with Progress(1, CLIENTS, OBJECTIVES) as progress:
        progress.event("started", alarms=["long " * 40])
        train(progress, 1)
        progress.event("round_finished", row={"round": 1, "seconds": 2.0})
    print_table("Scores", ["score", "base"], [["helpful", 0.5]])
    note, line, title, *table = capsys.readouterr().out.splitlines()
    assert note == f"note: {'long ' * 40}"
    assert line == "round 1/1  weights 0.60 0.40  2.0 s"
    assert (title, [row.split() for row in table if row.strip(" ─")]) == (
        "Scores",
        [["score", "base"], ["helpful", "0.500"]],
    )


FORGED = "lost\x1b[2J\nround 2/2  helpful 0.999"
SHOWN = r"lost\x1b[2J\nround 2/2  helpful 0.999"


def test_nothing_from_outside_writes_a_line_of_its_own_or_moves_the_cursor() -> None:
    pipe = console(is_terminal=False)
    failures = [{"client": "site\r", "reason": FORGED}]
    row = {"round": 1, "failures": failures, "alarms": [FORGED]}
    Progress(1, CLIENTS, OBJECTIVES, console=pipe).event(
        "round_finished", row=row, scores={FORGED: 0.5}
    )
    assert text_of(pipe).splitlines() == [
        rf"round 1/1  {SHOWN} 0.500  failed: site\r ({SHOWN})",
        f"note: {SHOWN}",
    ]


def test_a_long_reason_leaves_room_for_the_others() -> None:
    pipe = console(is_terminal=False)
    failures = [{"client": "a", "reason": "x" * 9_999}, {"client": "b", "reason": "NaN"}]
    progress = Progress(1, CLIENTS, OBJECTIVES, console=pipe)
    progress.event("round_finished", row={"round": 1, "failures": failures, "seconds": 1.0})
    assert text_of(pipe).endswith("x…); b (NaN)  1.0 s\n")


def test_names_in_the_live_table_are_shown_in_one_line() -> None:
    terminal = console(is_terminal=True)
    progress = Progress(1, CLIENTS, ["helpful\x1b[1m"], console=terminal)
    progress.event("client_started", round=1, client="client\n0")
    progress.event("stage", stage="roll\x07out [b]", step=1, num_steps=2)
    terminal.print(progress._render())
    text = text_of(terminal)
    assert r"client\n0" in text
    assert r"roll\x07out [b] 1/2" in text
    assert r"λ helpful\x1b[1m" in text


def test_titles_headings_and_cells_of_a_table_are_shown_in_one_line() -> None:
    pipe = console(is_terminal=False)
    print_table(f"\n{FORGED}", ["", FORGED], [[FORGED, "1"]], console=pipe)
    lines = text_of(pipe).splitlines()
    assert lines[:2] == ["", SHOWN]
    assert [line.count(SHOWN) for line in lines[2:] if "lost" in line] == [1, 1]
    assert "\x1b" not in text_of(pipe)


CALIBRATION = {"what": "calibration", "total": 256, "num_tokens": 128}
WORK = "calibration: 256 replies of up to 128 tokens"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_sampled_is_said_at_once_and_how_far_it_is_ever_more_rarely(
    is_terminal, monkeypatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("firm.run.progress.time.monotonic", lambda: now[0])
    shown = console(is_terminal=is_terminal)
    progress = Progress(2, CLIENTS, OBJECTIVES, console=shown)
    progress.event("measured", done=0, **CALIBRATION)
    assert text_of(shown).splitlines() == [WORK]
    for done in range(1, 257):
        now[0] += 1
        progress.event("measured", done=done, **CALIBRATION)
    lines = text_of(shown).splitlines()[1:]
    assert lines[:3] == [f"{WORK}, {percent}%" for percent in (6, 12, 19)]
    assert len(lines) == 8
    assert "100%" not in lines[-1]


def test_work_that_comes_again_is_announced_once(monkeypatch) -> None:
    pipe = console(is_terminal=False)
    with Progress(2, CLIENTS, OBJECTIVES, console=pipe) as progress:
        for done in (0, 64, 256) * 2:
            progress.event("measured", done=done, **CALIBRATION)
    assert text_of(pipe).splitlines() == [WORK]


def test_a_terminal_shows_what_is_being_sampled() -> None:
    terminal = console(is_terminal=True)
    with Progress(2, CLIENTS, OBJECTIVES, console=terminal) as progress:
        progress.event("measured", done=64, **CALIBRATION)
        progress._live.refresh()
    assert f"{WORK}, 25%" in text_of(terminal)


def test_loading_is_said_before_it_takes_long() -> None:
    pipe = console(is_terminal=False)
    Progress(2, CLIENTS, OBJECTIVES, console=pipe).event("loading")
    assert text_of(pipe) == "loading the models\n"


def test_what_takes_long_is_said_on_standard_error_and_rounds_on_standard_output(capsys) -> None:
    with Progress(1, CLIENTS, OBJECTIVES) as progress:
        progress.event("loading")
        progress.event("measured", done=0, **CALIBRATION)
        progress.event("round_finished", row={"round": 1})
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["loading the models", WORK]
    assert printed.out.startswith("round 1/1")
