import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import t

from firm.report import read_record
from firm.report.record import final_row
from firm.report.run_figures import trade_off_planes
from firm.report.run_front import SCORES_NAME
from firm.report.run_page import run_page
from firm.run.errors import UserError
from tests.runs import read_rows, write_rows


def test_a_directory_without_a_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"no run at .*run\.json"):
        read_record(tmp_path)


def test_a_line_that_is_still_being_written_is_left_out(make_run):
    run_path = make_run(num_done=3)
    with (run_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "round": 4, "cli')
    assert read_record(run_path).last_round == 3


def test_the_last_row_on_a_round_counts(make_run):
    run_path = make_run(num_done=2)
    write_rows(run_path, [*read_rows(run_path), {"kind": "round", "round": 2, "seconds": 123.0}])
    record = read_record(run_path)
    assert [row["round"] for row in record.rounds] == [1, 2]
    assert record.rounds[-1]["seconds"] == 123.0


def test_rows_come_by_rising_round_whatever_their_order_in_the_file(make_run):
    run_path = make_run(num_done=2)
    rows = read_rows(run_path)
    write_rows(run_path, rows[:1] + rows[:0:-1])
    record = read_record(run_path)
    assert [row["round"] for row in record.evaluations["validation"]] == [0, 1, 2]
    assert all([row["round"] for row in rows] == [1, 2] for rows in record.trainings.values())


def test_a_run_that_has_written_no_metrics_is_empty(make_run):
    run_path = make_run()
    (run_path / "metrics.jsonl").unlink()
    (run_path / "samples.jsonl").unlink()
    record = read_record(run_path)
    assert record.objectives == record.clients == ()
    assert record.last_round == 0


def test_a_client_that_joins_later_stands_after_the_known_ones(make_run):
    run_path = make_run(num_clients=2, num_done=1)
    write_rows(
        run_path, [*read_rows(run_path), {"kind": "client", "round": 2, "client": "newcomer"}]
    )
    assert read_record(run_path).clients == ("client_0", "client_1", "newcomer")


def test_extra_scores_are_those_that_are_no_objective(make_run):
    assert read_record(make_run()).extra_scores() == ["true_helpful", "true_harmless", "parse"]


def test_trainings_by_objective_read_like_one(make_run):
    run_path = make_run(num_clients=1, num_done=0, is_over=False)
    own = {
        "helpful": {
            "rewards": {"helpful": 0.6, "harmless": 0.2},
            "score_correlation": {"helpful-harmless": -0.4},
            "kl": 2.0,
            "seconds": {"rollout": 1.0, "step": 0.5},
            "weights": [[1.0, 0.0]],
        },
        "harmless": {
            "rewards": {"helpful": 0.1, "harmless": 0.7},
            "score_correlation": {"helpful-harmless": None},
            "kl": 4.0,
            "seconds": {"rollout": 3.0},
            "weights": [[0.0, 1.0]],
        },
    }
    row = {"kind": "client", "round": 1, "client": "client_0", "by_objective": own, "bytes_up": 9}
    write_rows(run_path, [*read_rows(run_path), row])
    (row,) = read_record(run_path).trainings["client_0"]
    assert row == {
        "kind": "client",
        "round": 1,
        "client": "client_0",
        "rewards": {"helpful": 0.6, "harmless": 0.7},
        "score_correlation": {"helpful-harmless": -0.4},
        "kl": 3.0,
        "seconds": {"rollout": 4.0, "step": 0.5},
        "bytes_up": 9,
    }


def test_a_record_tells_seed_preference_and_whether_it_is_over(make_run):
    run_path = make_run(seed=3)
    record = read_record(run_path)
    assert (record.seed, record.preference, record.is_finished) == (3, None, True)
    with (run_path / "config.yaml").open("a") as file:
        file.write("  preference: [0.2, 0.8]\n")
    assert read_record(run_path).preference == (0.2, 0.8)
    assert not read_record(make_run("going", is_over=False)).is_finished


def test_constraints_hold_are_missed_or_stay_open_by_their_one_sided_bounds(make_run):
    run_path = make_run()
    rows = read_rows(run_path)
    last = [row for row in rows if row["kind"] == "evaluation" and row["split"] == "test"][-1]
    for name, mean in (("helpful", 0.7), ("harmless", 0.5)):
        last["rewards"][name] = {**last["rewards"][name], "mean": mean, "se": 0.1}
    write_rows(run_path, rows)
    record = read_record(run_path)
    reach = 0.1 * t.ppf(0.95, last["num_prompts"] - 1)
    low, high = 0.7 - reach, 0.7 + reach
    for bounds, expected in (
        ({"helpful": low - 0.01}, ["helpful >= 0.", "reward in [0, 1] 0.700 ± 0.100, one-s"]),
        ({"helpful": low + 0.01}, ["helpful >= 0.", "is open"]),
        ({"helpful": high - 0.01}, ["helpful >= 0.", "is open"]),
        ({"helpful": high + 0.01}, ["helpful >= 0.", "is missed"]),
        ({"unknown": 0.5}, []),
    ):
        record.settings["strategy"] = {"min_rewards": bounds}
        found = record.constraint_outcomes
        assert len(found) == bool(expected)
        assert all(part in text for text in found for part in expected)
        assert [text for text in run_page(record).summary if text.startswith("Constraint ")] == [
            f"Constraint {text}." for text in found
        ]


@pytest.mark.slow
def test_few_equal_rewards_leave_a_constraint_open(make_run):
    run_path = make_run()
    save_file(
        {"prompt": torch.arange(4), "rewards/helpful": torch.full((4,), 0.413)},
        run_path / SCORES_NAME,
    )
    record = read_record(run_path)
    for bound, verdict in ((0.1, "holds"), (0.3, "is open"), (0.6, "is open"), (0.9, "is missed")):
        record.settings["strategy"] = {"min_rewards": {"helpful": bound}}
        (text,) = record.constraint_outcomes
        assert text.startswith(f"helpful >= {bound:g} {verdict}: ")
    (run_path / SCORES_NAME).unlink()
    without = record.constraint_outcomes
    for values in (  # a stranger's
        torch.full((4,), 7.0), torch.full((3,), 0.9), torch.full((4, 2), 0.9),
        torch.full((4,), torch.nan), torch.full((4,), 7.0, dtype=torch.bfloat16),
    ):  # fmt: skip
        save_file({"prompt": torch.arange(4), "rewards/helpful": values}, run_path / SCORES_NAME)
        assert record.constraint_outcomes == without


def test_the_validation_of_an_earlier_adapter_that_was_kept_is_no_point_of_the_course(make_run):
    run_path = make_run(num_rounds=4, num_done=4)
    rows = read_rows(run_path)
    last = {"kind": "evaluation", "split": "validation", "round": 4}
    (own,) = [row for row in rows if last.items() <= row.items()]
    kept = {"adapter_round": 1, "adapter_reason": "the best"}
    again = {**own, "kl": 0.125, **kept}
    write_rows(run_path, [*rows[:-1], {**rows[-1], **kept}, again])
    record = read_record(run_path)
    assert record.evaluations["validation"][-1] == own
    assert final_row(record, "validation") == again
    assert final_row(record)["adapter_round"] == 1
    page = run_page(record)
    assert "aligned is the global model after round 1." in page.block("evaluation").text
    assert page.summary[0].startswith("After 4 rounds")
    plane = trade_off_planes(record)[0].figure["data"][-1]
    assert plane["x"][-1] == own["scores"]["helpful"]["mean"]


def test_a_run_without_rounds_compares_the_adapter_that_it_starts_from(make_run):
    run_path = make_run(num_rounds=0, num_done=0)
    record = read_record(run_path)
    page = run_page(record)
    assert page.summary[0].startswith("After 0 rounds")
    assert len(page.headlines) == 2
    assert page.block("evaluation").rows
    assert list(page.block("samples").models) == ["Base", "Aligned"]
    for sample in page.block("samples").samples:
        base, aligned = (reply.text for reply in sample.replies)
        assert base.startswith("I do not know")
        assert aligned.startswith("First look")
