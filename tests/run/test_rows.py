"""Whatever stands in a log, its rows are valid when they are read, and what was not is told."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import firm.alignment.client
import firm.fmoo.client  # noqa: F401  (both packages register quantities)
from firm.base.schema import LARGEST
from firm.run import Run
from firm.run.rows import entries, valid_row, valid_rows

CLIENT = {
    "kind": "client",
    "round": 2,
    "client": "a",
    "weights": [[0.25, 0.75]],
    "gradient_norms": [[1.0, 0.0]],
    "cosines": [[None]],
    "beta_effect": [0.5],
    "rewards": {"helpful": 0.5, "harmless": None},
    "kl": None,
    "seconds": {"rollout": 1},
    "own": {"figures": [1.0, "text", True, None]},
}
EVALUATION = {
    "kind": "evaluation",
    "round": 0,
    "split": "test",
    "scores": {"helpful": {"mean": 0.5, "se": 0.1}},
    "losses": {"left": 0.5},
}
PRIVACY = {"epsilon": None, "delta": 1e-5}


def test_valid_rows_stay_as_they_are() -> None:
    rows = [
        {"kind": "run", "objectives": ["helpful", "harmless"], "rounds": 3},
        EVALUATION,
        CLIENT,
        {"kind": "round", "round": 2, "privacy": PRIVACY, "failures": []},
        {"kind": "of another program", "any": [[1, 2], [3]]},
    ]
    assert valid_rows(rows) == (rows, [])


NOT_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, 2 * LARGEST, 10**400, "x", [], {}, True]


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: str(value)[:9])
def test_what_is_no_number_is_left_out_alone_and_told(value: Any) -> None:
    row, told = valid_row({**CLIENT, "kl": value}, num_objectives=2)
    assert row == {key: entry for key, entry in CLIENT.items() if key != "kl"}
    assert len(told) == 1
    assert told[0].startswith("kl of a in round 2: ")
    reward = {"helpful": 0.5, "harmless": value}
    row, told = valid_row({**CLIENT, "rewards": reward}, num_objectives=2)
    assert row == CLIENT
    assert told[0].startswith("rewards.harmless of a in round 2: ")


@pytest.mark.slow
def test_a_gradient_of_length_zero_has_no_cosine() -> None:
    row = {"kind": "client", "round": 1, "client": "a", "cosines": [[0.0, 0.5, 0.0]]}
    row["gradient_norms"] = [[1.0, 0.0, 2.0]]  # it does not train the second objective
    found = dict(entries({**row, "cosines": [[0.0, 0.5, 0.0]]}, ["a", "b", "c"]))
    assert {path[1]: own for path, own in found.items() if path[0] == "cosines"} == {"a-c": 0.5}
    row = {"kind": "client", "round": 1, "client": "a", "step_share": {"a": 1.0, "b": None}}
    assert dict(entries(row, ["a", "b"]))["step_share", "b"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", [[0.5, 0.25, 0.25]]),
        ("weights", [[0.5, None]]),
        ("weights", [0.5, 0.5]),
        ("weights", [[2.0, -1.0]]),
        ("gradient_norms", [[-1.0, 1.0]]),
        ("cosines", [[0.5, 0.5]]),
        ("cosines", [[1.5]]),
        ("beta_effect", 5),
        ("beta_effect", "x"),
        ("beta_effect", [math.nan]),
        ("gram", [[1.0, 0.5]]),
        ("by_objective", 5),
        ("score_length_correlation", "a"),
        ("end_share", -1),
        ("bytes_up", 10**400),
        ("bytes_up", 1.5),
        ("own", [[[[[[1]]]]]]),
        ("own", {"deep": math.inf}),
    ],
)
def test_a_field_of_another_shape_or_range_is_left_out(field: str, value: Any) -> None:
    row, told = valid_row({**CLIENT, field: value}, num_objectives=2)
    assert row == {key: entry for key, entry in CLIENT.items() if key != field}
    assert len(told) == 1


def test_lists_are_as_long_as_there_are_objectives_where_these_are_known() -> None:
    rows = [{"kind": "run", "objectives": ["helpful"], "rounds": 3}, CLIENT]
    (_, found), told = valid_rows(rows)
    assert not {"weights", "gradient_norms", "cosines"} & found.keys()
    assert len(told) == 3
    assert valid_rows([CLIENT]) == ([CLIENT], [])


def test_nothing_is_left_of_a_measure_without_its_mean_or_a_guarantee_without_a_bound() -> None:
    scores = {"helpful": {"mean": math.nan, "se": 0.1}, "harmless": {"mean": 0.5, "se": -1}}
    row, told = valid_row({**EVALUATION, "scores": scores})
    assert row == {**EVALUATION, "scores": {"harmless": {"mean": 0.5}}}
    assert [text.partition(":")[0] for text in told] == [
        "scores.helpful of the test evaluation of round 0",
        "scores.harmless.se of the test evaluation of round 0",
    ]
    round_row = {"kind": "round", "round": 1}
    for epsilon in (math.nan, -1, "x"):  # None would say that there is no bound
        row, _ = valid_row({**round_row, "privacy": {**PRIVACY, "epsilon": epsilon}})
        assert row == round_row


def test_entries_of_a_list_of_events_are_left_out_one_by_one() -> None:
    failure = {"client": "a", "reason": "late"}
    row = {"kind": "round", "round": 1, "failures": [failure, {"client": 5}], "alarms": ["β", 3]}
    found, told = valid_row(row)
    assert found == {"kind": "round", "round": 1, "failures": [failure], "alarms": ["β"]}
    assert len(told) == 2


@pytest.mark.parametrize("place", ["round", "client", "kind"])
@pytest.mark.parametrize("value", [math.nan, [None], {}, 10**400, -1], ids=str)
def test_a_row_that_does_not_tell_what_it_is_about_is_left_out(place: str, value: Any) -> None:
    rows, told = valid_rows([EVALUATION, {**CLIENT, place: value}])
    assert rows == [EVALUATION]
    assert len(told) == 1
    assert told[0].startswith("row 2: ")


def test_a_run_has_one_row_of_its_own_and_no_round_beyond_its_last() -> None:
    header = {"kind": "run", "objectives": ["helpful", "harmless"], "rounds": 3}
    rows = [header, {**header, "objectives": ["evil"]}, {**CLIENT, "round": 4}, CLIENT, 5, None]
    found, told = valid_rows(rows)
    assert found == [header, CLIENT]
    assert len(told) == 4


def test_a_run_that_was_given_other_rounds_has_the_row_and_the_rounds_of_its_extension() -> None:
    header = {"kind": "run", "objectives": ["helpful", "harmless"], "rounds": 3, "alarms": ["a"]}
    extended, later = {**header, "rounds": 4, "alarms": []}, {**CLIENT, "round": 4}
    found, told = valid_rows([header, later, CLIENT, extended, later, {**CLIENT, "round": 5}])
    assert found == [extended, CLIENT, later]
    assert len(told) == 2


def test_a_log_with_literals_that_are_no_json_and_integers_past_floats_is_read(
    tmp_path: Path,
) -> None:
    run = Run.create(tmp_path / "run", {})
    run.log({"kind": "round", "round": 1, "seconds": 2.5})
    with (run.path / "metrics.jsonl").open("a") as file:
        for value in ("NaN", "-Infinity", "1e999", "1" + "0" * 400, "[" * 5000 + "]" * 5000):
            file.write(f'{{"kind": "round", "round": 2, "seconds": {value}}}\n')
    rows, told = run.checked_rows()
    assert rows == run.rows()
    assert rows[0]["seconds"] == 2.5
    assert rows[1:] == [{"kind": "round", "round": 2}] * 4
    assert len(told) == 5
    run.log_samples([{"round": 0, "prompt": 5, "completion": "b", "scores": {"helpful": 10**400}}])
    sample = {"round": 0, "completion": "b", "scores": {"helpful": None}}
    assert json.loads(json.dumps(run.samples())) == [sample]


def test_figures_with_noise_may_leave_their_ranges():
    """Clients whose statistics are noisy tell λ, cosines and whether they clipped with noise."""
    told = {"weights": [[1.7, -0.9]], "cosines": [[1.9]], "clipped": -0.4}
    row = {"kind": "client", "round": 1, "client": "a", **told}
    assert valid_row(row, num_objectives=2) == (row, [])
    privacy = {"epsilon": 3.0, "delta": 1e-5, "clipped": 1.3}
    round_row = {"kind": "round", "round": 1, "privacy": privacy}
    assert valid_row(round_row) == (round_row, [])
    exact = {**row, "update_norm": 0.2}  # no noise, so that the ranges hold
    found, left_out = valid_row(exact, num_objectives=2)
    assert not {"weights", "cosines"} & found.keys()
    assert len(left_out) == 2
