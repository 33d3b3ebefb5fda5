import pytest

from firm.fronts.confidence import share_interval
from firm.report import read_record
from firm.report.comparison import best_comparison, comparison_of
from firm.run.comparison import Measure
from tests.runs import read_rows, write_rows


def test_the_test_split_is_preferred_once_the_aligned_model_was_tested(make_run):
    over = best_comparison(read_record(make_run("over", num_done=4)))
    running = best_comparison(read_record(make_run("running", num_done=4, is_over=False)))
    assert over is not None
    assert running is not None
    assert (over.round, over.prompts) == (4, "256 test prompts")
    assert running.round == 4
    assert running.prompts == "128 validation prompts"


def test_there_is_no_comparison_before_both_models_were_evaluated(make_run):
    run_path = make_run(num_done=0, is_over=False)
    assert best_comparison(read_record(run_path)) is None
    run_path = make_run("aligned only", num_done=2)
    kept = [row for row in read_rows(run_path) if row.get("round") != 0]
    write_rows(run_path, kept)
    assert comparison_of(read_record(run_path), "validation") is None


def test_the_change_is_the_paired_one_of_the_evaluation(make_run):
    run_path = make_run(num_done=4)
    (row,) = read_rows(run_path, "evaluation", split="test", round=4)
    comparison = best_comparison(read_record(run_path))
    assert comparison is not None
    for name in ("helpful", "harmless", "true_helpful", "true_harmless", "parse"):
        line = comparison.line(name)
        assert line is not None
        assert line.change == Measure(**row["change"][name], num_prompts=256)
        mean = row["scores"][name]["mean"]
        interval = share_interval(mean, 256) if name == "parse" else None  # a share
        expected = Measure(**row["scores"][name], num_prompts=256, interval=interval)
        assert line.aligned == expected
    line = comparison.line("end_share")
    assert line is not None
    assert line.aligned == Measure(0.93, None, 256, interval=share_interval(0.93, 256))


def test_a_side_figure_changes_by_the_difference_and_has_no_standard_error(make_run):
    comparison = best_comparison(read_record(make_run(num_done=4)))
    assert comparison is not None
    line = comparison.line("length")
    assert line is not None
    assert line.change == Measure(-2.0)
    assert line.change.z is None


def test_objectives_come_first_and_are_marked(make_run):
    comparison = best_comparison(read_record(make_run(objectives=("a", "b", "c"))))
    assert comparison is not None
    assert [line.name for line in comparison.lines if line.is_score][:3] == ["a", "b", "c"]
    assert [line.name for line in comparison.lines][:3] == ["a", "b", "c"]


def test_z_is_the_mean_in_standard_errors():
    assert Measure(0.6, 0.2).z == pytest.approx(3.0)
    assert Measure(0.6, 0.0).z is None
