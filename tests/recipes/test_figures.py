"""What the page of the replayed figures says of a claim."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from firm.report.trajectories import Difference
from firm.run import UserError, compose
from recipes import firm_hh
from recipes.figures import Finding, common_seeds
from recipes.study import StudyConfig, point_name
from recipes.study import _run_config as run_config


@pytest.mark.parametrize(
    ("wanted", "low", "high", "verdict"),
    [
        ("larger", 0.1, 0.3, "holds"),
        ("larger", -0.1, 0.3, "does not show: no clear difference"),
        ("larger", -0.3, -0.1, "does not hold: the opposite is clear"),
        ("smaller", -0.3, -0.1, "holds"),
        ("smaller", 0.1, 0.3, "does not hold: the opposite is clear"),
        ("at least", 0.1, 0.3, "holds"),
        ("at least", -0.1, 0.3, "no clear difference: not shown to be worse"),
        ("at least", -0.3, -0.1, "does not hold: the opposite is clear"),
        ("close", -0.01, 0.04, "holds: the difference is within ± 0.05"),
        ("close", -0.01, 0.06, "open: the interval reaches beyond ± 0.05"),
        ("close", 0.05, 0.06, "does not hold: the difference is beyond ± 0.05"),
        ("close", -0.2, -0.1, "does not hold: the difference is beyond ± 0.05"),
    ],
)
def test_a_verdict_follows_from_the_interval(wanted, low, high, verdict):
    measured = Difference((low + high) / 2, low, high, 5)
    assert Finding("it", wanted, measured, tolerance=0.05).verdict == verdict


def test_settings_are_compared_on_the_seeds_that_all_have_finished():
    def finished(*seeds: int) -> list[Any]:
        return [SimpleNamespace(settings={"seed": seed}) for seed in seeds]

    runs = {"A": finished(0, 1, 2), "B": finished(0, 1)}
    common, num_missing = common_seeds(runs)
    assert common == {"A": finished(0, 1), "B": finished(0, 1)}
    assert num_missing == 1
    with pytest.raises(UserError, match="two seeds that every setting has finished, got 1"):
        common_seeds({**runs, "C": runs["A"][:1]})


@pytest.mark.parametrize("file", ["configs/figures.yaml", "configs/hh_study.yaml"])
def test_every_setting_of_the_studies_is_a_valid_run(file):
    cfg = compose(StudyConfig, [file], [])
    for setting in cfg.settings:
        run = run_config(cfg, setting=setting, seed=1)
        assert isinstance(run, firm_hh.Config)
        assert run.seed == 1
        assert run.evaluation.calibration_seed == cfg.seeds[0]
    assert len({point_name(setting, 0) for setting in cfg.settings}) == len(cfg.settings)
    wrong = replace(cfg, overrides={"strategy.bta": 1})
    with pytest.raises(UserError, match=r"unknown key strategy\.bta"):
        run_config(wrong, setting=next(iter(cfg.settings)), seed=0)
