"""Numbers of settings over seeds and their paired differences, against a hand computation."""

import pytest

from firm.report.record import Record
from recipes.paper.over_seeds import difference, final_figure, final_reward, over_seeds


def record(tmp_path, *, seed=0, final=0.5) -> Record:
    end = {"round": 2, "split": "test", "rewards": {"a": {"mean": final}}, "scores": {}, "kl": 0.2}
    return Record(
        name="run",
        path=tmp_path,
        config="",
        settings={"seed": seed},
        run={},
        objectives=("a",),
        clients=(),
        num_rounds=2,
        header={},
        evaluations={"test": [end]},
        trainings={},
        rounds=[],
        samples=[],
    )


def test_a_difference_is_paired_by_seed_with_students_interval(tmp_path):
    first = [record(tmp_path, seed=s, final=f) for s, f in ((0, 0.9), (1, 0.5), (2, 0.7))]
    second = [record(tmp_path, seed=s, final=f) for s, f in ((0, 0.8), (1, 0.3), (2, 0.4))]
    found = difference(first, second, final_reward("a"))
    # differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), t of 2 degrees 4.3027
    assert found.mean == pytest.approx(0.2)
    assert found.high - found.mean == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert not found.is_clear
    assert difference(first, second, final_reward("a"), level=0.5).is_clear
    assert over_seeds(first, final_reward("a")).text(2) == "0.70 ± 0.20"


@pytest.mark.parametrize("seeds", [(0, 2), (1, 0), (0,)])
def test_other_seeds_are_not_paired(tmp_path, seeds):
    first = [record(tmp_path, seed=s) for s in (0, 1)]
    second = [record(tmp_path, seed=s) for s in seeds]
    with pytest.raises(ValueError, match="the same seeds, at least two"):
        difference(first, second, final_reward("a"))


def test_a_run_without_an_end_is_named(tmp_path):
    run = record(tmp_path)
    run.evaluations["test"][0]["round"] = 0
    with pytest.raises(ValueError, match="the run run has no final evaluation"):
        over_seeds([run], final_figure("kl"))
