"""What the page of the replayed figures says of a claim."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from firm.jobs.configs import StudyConfig
from firm.jobs.study import run_config
from firm.report import Record
from firm.report.seeds import Difference
from firm.run import UserError, compose
from recipes.paper import __main__ as paper
from recipes.paper.__main__ import common_seeds
from recipes.paper.claims import Finding, figure_1


@pytest.mark.parametrize(
    ("wanted", "low", "high", "verdict"),
    [
        ("larger", 0.1, 0.3, "holds"),
        ("larger", -0.1, 0.3, "open: no clear difference"),
        ("larger", -0.3, -0.1, "does not hold: the opposite is clear"),
        ("smaller", -0.3, -0.1, "holds"),
        ("smaller", 0.1, 0.3, "does not hold: the opposite is clear"),
        ("at least", 0.1, 0.3, "holds"),
        ("at least", -0.1, 0.3, "open: no clear difference"),
        ("at least", -0.3, -0.1, "does not hold: the opposite is clear"),
        ("close", -0.01, 0.04, "holds: the difference is within ± 0.05"),
        ("close", -0.01, 0.06, "open: the interval reaches beyond ± 0.05"),
        ("close", 0.05, 0.06, "does not hold: the difference is beyond ± 0.05"),
        ("close", -0.2, -0.1, "does not hold: the difference is beyond ± 0.05"),
    ],
)
def test_a_verdict_follows_from_the_interval(wanted, low, high, verdict):
    measured = Difference((low + high) / 2, low, high, 10)
    assert Finding("it", wanted, measured, tolerance=0.05).verdict == verdict


def test_five_seeds_show_no_equality():
    measured = Difference(0.0, -0.01, 0.01, 5)
    verdict = Finding("it", "close", measured, tolerance=0.05).verdict
    assert verdict == "open: the difference is within ± 0.05, too few seeds"


def test_settings_are_compared_on_the_seeds_that_all_have_finished():
    def finished(*seeds: int) -> list[Any]:
        return [SimpleNamespace(settings={"seed": seed}) for seed in seeds]

    runs = {"A": finished(0, 1, 2), "B": finished(0, 1)}
    common, num_missing = common_seeds(runs)
    assert common == {"A": finished(0, 1), "B": finished(0, 1)}
    assert num_missing == 1
    with pytest.raises(UserError, match="two seeds that every setting has finished, got 1"):
        common_seeds({**runs, "C": runs["A"][:1]})


def of_noise(*, seed: int, solved_by: str, num_rounds: int = 400) -> Record:
    """A run whose solves are independent and uniform: 8 clients with 4 each, or the server's."""
    generator = np.random.default_rng([seed, solved_by == "server"])
    solves = generator.random((8, num_rounds, 4))
    rounds: list[dict[str, Any]] = [
        {"round": index + 1, "bytes_up": 1_000_000} for index in range(num_rounds)
    ]
    if solved_by == "server":
        for row, value in zip(rounds, generator.random(num_rounds), strict=True):
            row["weights"] = {"a": value, "b": 1 - value}
        solves = np.full_like(solves, 0.5)
    trainings = {
        f"client_{index}": [
            {
                "round": at + 1,
                "weights": [[value, 1 - value] for value in values],
                "rewards": {"a": 0.5, "b": 0.5},
            }
            for at, values in enumerate(own)
        ]
        for index, own in enumerate(solves)
    }
    end = {"round": num_rounds, "rewards": {name: {"mean": 0.5} for name in "ab"}}
    return Record(
        name="run",
        path=Path("run"),
        config="",
        settings={"seed": seed},
        run={},
        objectives=("a", "b"),
        clients=tuple(trainings),
        num_rounds=num_rounds,
        header={},
        evaluations={"test": [end]},
        trainings=trainings,
        rounds=rounds,
        samples=[],
    )


def test_averaging_alone_makes_no_algorithm_smoother_than_another():
    firm, server = (
        [of_noise(seed=seed, solved_by=name) for seed in range(3)] for name in ("client", "server")
    )
    runs = {"FIRM": firm, "FedCMOO-A": server, "aligned: FIRM": firm, "aligned: FedCMOO-A": server}
    findings = figure_1(runs, {"figure_1": "figure_1.png"}).findings
    verdicts = {
        finding.what: finding.verdict for finding in findings if "variation" in finding.what
    }
    # noise is as restless at one client as at the server; a mean of 32 is calmer by √32
    assert verdicts == {
        f"{world}: total variation of λ, {of}": verdict
        for world in ("conflict", "aligned")
        for of, verdict in (
            ("mean", "holds"),
            ("first solves", "open: no clear difference"),
        )
    }


def test_each_figure_of_the_settings_stands_under_its_heading():
    def ended(reward: float, kl: float) -> dict[str, Any]:
        scores = {name: {"mean": 10 * reward} for name in ("true_helpful", "true_harmless")}
        rewards = {name: {"mean": reward} for name in "ab"}
        return {
            "round": 9,
            "rewards": rewards,
            "scores": scores | {"parse": {"mean": 0.9}},
            "kl": kl,
        }

    runs = {
        setting: [
            replace(
                of_noise(seed=seed, solved_by="client", num_rounds=9),
                evaluations={"test": [{**ended(0.1, 0.0), "round": 0}, ended(0.25, 3.0 + seed)]},
            )
            for seed in range(2)
        ]
        for setting in ("FIRM", "aligned: FIRM")
    }
    table = [line[2:-2].split(" | ") for line in paper.all_settings(runs).splitlines()[4:]]
    (header, _, row, _) = table
    cells = dict(zip(header, row, strict=True))
    assert cells["setting"] == "FIRM"
    assert cells["reward 1"] == "0.25 ± 0.00"
    assert cells["true helpful"] == "2.50 ± 0.00"
    assert cells["parse"] == "0.90 ± 0.00"
    assert cells["KL"] == "3.50 ± 0.71"
    assert cells["λ 1"].startswith(("0.4", "0.5"))
    assert cells["MB up"] == "9.00 ± 0.00"


def departures_of(num_settings: int | None = None, **overrides: Any) -> dict[str, list[str]]:
    """Cells of the table of departures by key, for the study of the figures or its beginning."""
    cfg = compose(StudyConfig, ["configs/figures.yaml"], [])
    cfg = replace(cfg, overrides={**cfg.overrides, **overrides})
    settings = list(cfg.settings)[:num_settings]
    text = paper.departures_section(
        {setting: run_config(cfg, setting=setting, seed=0) for setting in settings}
    )
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {key.strip("`"): cells for key, *cells in lines}


def test_every_departure_from_the_papers_values_is_listed_with_its_settings():
    departures = departures_of()
    assert departures["estimator.actor_learning_rate"] == ["6e-05", "A.1", "0.003 (50 times)"]
    assert departures["estimator.critic_learning_rate"] == ["0.0001", "A.1", "0.03 (300 times)"]
    assert departures["estimator.num_epochs"] == ["3", "A.1", "2"]
    assert departures["estimator.kl.controller"] == ["adaptive", "A.1", "fixed"]
    assert departures["policy.path"][-1] == "firm/miniature/checkpoints/policy"
    assert departures["partition.kind"] == ["iid", "A.1", "dirichlet: `Dirichlet 0.3`"]
    assert departures["estimator.batch_size"] == ["16", "A.1", "128: `centralised`"]
    assert "0.5 (50 times): `β = 0.5, C = 2`, `β = 0.5, C = 8`" in departures["strategy.beta"][-1]
    assert "; 16: `16 clients`" in departures["num_clients"][-1]
    others = "all but `aligned: FIRM`, `aligned: FedCMOO-A`"
    path = departures["rewards.harmless.path"][-1]
    assert f"firm/miniature/checkpoints/harmless: {others}" in path
    assert not {"policy.lora.r", "rounds"} & departures.keys()
    assert not any(key.startswith("evaluation.") for key in departures)


def test_a_changed_value_adds_its_line_and_the_papers_own_takes_it_away():
    before = departures_of(2)
    changed = {"policy.lora.r": 8, "rounds": 2, "estimator.num_epochs": 3}
    after = departures_of(2, **changed)
    assert after.keys() ^ before.keys() == changed.keys()
    assert after["policy.lora.r"] == ["16", "section 5", "8"]
    assert after["rounds"] == ["16", "A.1", "2"]
