"""A classic study's figures at given rounds, and their differences by seed."""

import shutil

import pytest

from firm.cli.main import COMMANDS
from firm.run.sweep import Sweep
from tests.runs import write_classic_run

cli = COMMANDS["report"].run


@pytest.fixture
def study(tmp_path):
    """Two settings with two seeds: the accuracies of one objective at rounds 0, 5, 10 and 15."""
    values = {
        "ours": [[0.1, 0.5, 0.8, 0.9], [0.1, 0.6, 0.7, 0.8]],
        "theirs": [[0.1, 0.5, 0.5, 0.7], [0.1, 0.4, 0.8, 0.4]],
    }
    for setting, seeds in values.items():
        for seed, accuracies in enumerate(seeds):
            rows = [
                {"kind": "evaluation", "round": 5 * place, "split": "test"}
                | {"losses": {"left": 1.0}, "accuracies": {"left": value}}
                for place, value in enumerate(accuracies)
            ]
            write_classic_run(tmp_path / setting / f"seed_{seed}", rows, seeds=[seed])
    return tmp_path


def test_figures_at_given_rounds_are_means_over_seeds_with_standard_errors(study, capsys):
    cli([str(study), "--rounds", "5", "15"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "ours, left 0.550 ± 0.050 0.850 ± 0.050" in lines
    assert "theirs, left 0.450 ± 0.050 0.550 ± 0.150" in lines


def test_differences_are_paired_by_seed_and_count_what_is_not_better_in_between(study, capsys):
    cli([str(study), "--rounds", "15", "5", "--against", "theirs"])
    paired = capsys.readouterr().out.split("Difference from theirs")[1].splitlines()
    lines = [" ".join(line.split()) for line in paired]
    # 0.0 and 0.2 at round 5; 0.2 and 0.4 at round 15, after 0.3 and -0.1 at round 10
    assert "ours, left 0.100 ± 0.100 (1, 0 of 1) 0.300 ± 0.100 (0, 1 of 2)" in lines


def test_runs_that_have_not_ended_are_named_and_not_compared(study, capsys):
    cli([str(study), "--against", "theirs"])
    whole = capsys.readouterr().out
    (study / "ours/seed_1/run.json").write_text('{"status": "running"}')
    cli([str(study), "--against", "theirs"])
    printed = capsys.readouterr().out
    assert "not compared, since it has not ended: ours, seed_1" in printed
    assert "not compared" not in whole
    assert "90 % intervals" in whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "7"], "was not evaluated at round 7; choose from 0, 5, 10, 15"),
        (
            ["--rounds", "5", "--against", "X"],
            "no finished runs of 'X'; choose from ours, theirs",
        ),
    ],
)
def test_unknown_rounds_and_settings_end_in_one_line(study, capsys, options, message):
    with pytest.raises(SystemExit):
        cli([str(study), *options])
    assert message in capsys.readouterr().err


def test_differences_at_the_end_are_paired_by_seed_with_intervals(study, capsys):
    cli([str(study), "--against", "theirs"])
    printed = capsys.readouterr().out
    assert printed.startswith("Differences from theirs on the test split, by seed")
    (ours,) = [" ".join(line.split()) for line in printed.splitlines() if "ours" in line]
    assert ours == "ours +0.300 [-0.331, +0.931]"  # 0.2 and 0.4: 6.314 standard errors of 0.1


def test_differences_without_two_common_seeds_are_said_to_need_them(study, capsys):
    shutil.rmtree(study / "ours/seed_1")
    cli([str(study), "--against", "theirs"])
    printed = capsys.readouterr().out
    assert printed == (
        "no differences from theirs: they need two seeds that it shares with another setting; run "
        "the study with more --seeds.\n"
    )


def test_settings_are_in_the_order_of_the_study(study, capsys):
    # a resumed study may have left out `ours`
    (study / "study.yaml").write_text("algorithms: {theirs: {}, a: {}}")
    cli([str(study), "--rounds", "5"])
    printed = capsys.readouterr().out
    assert printed.index("theirs, left") < printed.index("ours, left")


def test_a_sweep_has_no_settings_to_compare(tmp_path, refusal):
    points = {"a": {"method": "FIRM", "preference": [1, 0], "seed": 0}}
    Sweep.open(tmp_path / "sweep", {}, points, resume=False, kind="sweep")
    assert "is a sweep, without settings to compare" in refusal(
        cli, [str(tmp_path / "sweep"), "--against", "FIRM"]
    )


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli([str(tmp_path), "--against", "theirs"])
    assert "pass a study's folder" in capsys.readouterr().err
