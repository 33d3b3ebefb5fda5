"""The guard in whole runs: silent where nothing runs away, and in time where something does."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from firm.alignment import MultiObjectiveTrainer
from firm.federation.strategies import STRATEGIES
from firm.fronts.front import Front
from firm.jobs.loop import Logbook
from firm.report.page import untrained_notes
from firm.report.record import read_record
from firm.run import Run, UserError
from firm.run.checkpoint import load_state
from tests.runs import read_adapter, read_rows
from tests.smoke import FRONT, config, run

OFF = ("--guard.kl_growth", "null", "--guard.max_kl", "null", "--estimator.max_approx_kl", "null")
CRITIC_FREE = ("--estimator.name", "critic_free", "--estimator.num_replies", 2)
KINDS = {
    "PPO": ("--strategy.num_local_steps", 1),
    "critic-free, stacked": (*CRITIC_FREE, "--engine", "stacked"),
    "conditioned": FRONT,
    "a training per objective": ("--strategy.name", "fsmgda", "--strategy.num_local_steps", 1),
}
kinds = pytest.mark.parametrize("kind", KINDS)
RUNAWAY = ("--estimator.actor_learning_rate", 0.1, "--rounds", 5)
"""Settings of a run that leaves the base model in its first round."""


def alarms(folder: Path) -> list[str]:
    return [text for row in read_rows(folder, "round") for text in row["alarms"]]


def undone_rounds(folder: Path) -> list[int]:
    rows = read_rows(folder, "round")
    return [row["round"] for row in rows if any("trust region" in text for text in row["alarms"])]


def final(folder: Path) -> dict:
    return read_rows(folder, "evaluation", split="test")[-1]


def without_seconds(row: object) -> object:
    if not isinstance(row, dict):
        return row
    return {key: without_seconds(value) for key, value in row.items() if key != "seconds"}


def equal(first: Path, second: Path) -> bool:
    one, other = read_adapter(first), read_adapter(second)
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@kinds
def test_a_run_in_which_nothing_runs_away_is_the_same_with_and_without_a_guard(kind, tmp_path):
    watched = run(*KINDS[kind], "--out", tmp_path / "guarded")
    free = run(*KINDS[kind], *OFF, "--out", tmp_path / "free")
    assert equal(watched, free)
    rows = zip(read_rows(watched), read_rows(free), strict=True)
    assert all(without_seconds(a) == without_seconds(b) for a, b in rows)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Callable[[str], tuple[Path, list[tuple[int, float]]]]:
    """A kind's run that runs away under the guard, and the rates of learning of its rounds.

    Every kind is run once; no test changes it.
    """
    set_rates = MultiObjectiveTrainer.set_learning_rates

    @cache
    def of(kind: str) -> tuple[Path, list[tuple[int, float]]]:
        rates = []

        def noted(trainer, learner, rounds_done, **options):
            set_rates(trainer, learner, rounds_done, **options)
            rate = learner.actor_optimizer.param_groups[0]["lr"]
            rates.append((math.floor(rounds_done) + 1, rate))

        out = tmp_path_factory.mktemp("runaway") / "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MultiObjectiveTrainer, "set_learning_rates", noted)
            return run(*KINDS[kind], *RUNAWAY, "--out", out), rates

    return of


@kinds
def test_a_run_that_runs_away_goes_back_and_ends_near_the_base_model(kind, guarded, tmp_path):
    free = run(*KINDS[kind], *RUNAWAY, *OFF, "--out", tmp_path / "free")
    folder, _ = guarded(kind)
    assert final(folder)["kl"] < 3 < final(free)["kl"]
    assert any("trust region" in text for text in alarms(folder))


@pytest.mark.parametrize("kind", ["PPO", "conditioned"])
def test_a_finished_run_resumed_without_its_guard_leaves_what_it_never_had_refused(kind, tmp_path):
    keys = (*KINDS[kind], *RUNAWAY, "--rounds", 1)
    free = run(*keys, *OFF[:4], "--out", tmp_path / "free")
    out = run(*keys, "--out", tmp_path / "run")
    assert final(out)["adapter_round"] == 0
    run(*keys, *OFF[:4], "--out", out, "--resume", "true")
    assert final(out)["adapter_reason"] == final(free)["adapter_reason"]
    assert equal(free, out)


def test_clients_whose_policy_leaves_its_batch_end_their_round_early(tmp_path):
    keys = (*RUNAWAY, "--guard.kl_growth", "null", "--guard.max_kl", "null", "--rounds", 2)
    limit = ("--estimator.max_approx_kl", 0.05)
    free = run(*keys, "--estimator.max_approx_kl", "null", "--out", tmp_path / "free")
    short = run(*keys, *limit, "--out", tmp_path / "short")
    whole = {row["client"]: len(row["weights"]) for row in read_rows(free, "client", round=2)}
    for row in read_rows(short, "client", round=2):
        assert len(row["weights"]) < whole[row["client"]]
        assert row["approx_kl"] > 0.05
    assert any("skips the rest of its round" in text for text in alarms(short))


@pytest.mark.slow
def test_a_run_that_ends_with_an_undone_round_names_the_round_it_went_back_to(guarded, tmp_path):
    undone, *_ = undone_rounds(guarded("critic-free, stacked")[0])
    keys = ("--rounds", undone, "--evaluation.num_validation_prompts", 0)
    short = run(*KINDS["critic-free, stacked"], *RUNAWAY, *keys, "--out", tmp_path / "run")
    assert final(short)["adapter_round"] == undone - 2
    assert final(short)["adapter_reason"].startswith("the last whose KL was inside the guard's")


@pytest.mark.slow
def test_a_run_resumes_behind_an_undone_round_to_the_same_adapter(guarded, tmp_path):
    keys = (*KINDS["critic-free, stacked"], *RUNAWAY)
    whole, _ = guarded("critic-free, stacked")
    undone = undone_rounds(whole)
    out, firm_round = tmp_path / "stopped", STRATEGIES["firm"]

    def stopped(state, *others):
        if state.round == undone[0]:
            raise KeyboardInterrupt
        return firm_round(state, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STRATEGIES, "firm", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(*keys, "--out", out)
    run(*keys, "--out", out, "--resume", "true")
    assert equal(whole, out)
    assert alarms(whole) == alarms(out)
    assert final(whole)["adapter_reason"] == final(out)["adapter_reason"]


def test_after_an_undone_round_clients_learn_at_half_the_rate(guarded):
    folder, rates = guarded("PPO")
    undone = undone_rounds(folder)
    assert undone
    assert rates
    for number, rate in rates:
        earlier = sum(each < number for each in undone)
        assert rate == pytest.approx(0.1 / 2**earlier)


def test_a_ceiling_ends_the_run_with_the_last_adapter_below_it(tmp_path, capsys):
    folder = run(
        *KINDS["PPO"], *RUNAWAY, "--guard.kl_growth", "null", "--guard.max_kl", 0.2,
        "--evaluation.num_validation_prompts", 0, "--out", tmp_path / "run",
    )  # fmt: skip
    rounds = read_rows(folder, "round")
    assert len(rounds) == 2  # of five: round 2's replies come of round 1's adapter
    assert "the ceiling of" in rounds[-1]["alarms"][0]
    assert final(folder)["adapter_round"] == 0
    assert final(folder)["kl"] == pytest.approx(0, abs=1e-4)  # the base model
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    printed = capsys.readouterr().out
    assert "the run ends, because the KL of its replies" in printed
    assert "of round 0: the last whose KL was inside the guard's trust region" in printed
    assert "inside the guard&#39;s trust region" in (folder / "report.html").read_text()
    (note,) = untrained_notes([read_record(folder)])  # which pages of several runs have
    assert note.startswith(
        "run left the adapter that it started from, of round 0: the last whose KL"
    )


def test_a_resumed_run_repeats_its_rows_to_the_tracker_without_their_alarms(tmp_path):
    class Noted:
        rows: ClassVar[list[dict]] = []

        def log(self, row):
            self.rows.append(row)

        def log_samples(self, rows):
            pass

    log = Run.create(tmp_path / "run", {})
    log.log({"kind": "run", "objectives": ["a"], "alarms": ["at the start"]})
    log.log({"kind": "round", "round": 1, "clients": [], "failures": [], "alarms": ["in a round"]})
    Logbook(log, Noted()).repeat_to_tracker()
    assert [row.get("alarms") for row in Noted.rows] == [["at the start"], None]


def test_a_rule_of_ones_own_ends_the_run(tmp_path):
    rules = '["response_length > 1 for 2", "kl > 1000"]'
    folder = run("--rounds", 5, "--guard.stop_when", rules, "--out", tmp_path / "run")
    assert len(read_rows(folder, "round")) == 2
    assert alarms(folder)[-1].endswith("guard.stop_when 'response_length > 1 for 2' holds.")
    assert final(folder)["adapter_round"] in (0, 1, 2)


def test_a_rule_reads_trainings_of_separate_objectives(tmp_path):
    rules = ("--guard.stop_when", '["response_length > 1"]', "--rounds", 3)
    folder = run(*KINDS["a training per objective"], *rules, "--out", tmp_path / "run")
    assert len(read_rows(folder, "round")) == 1


def test_a_rule_without_its_quantity_is_told_after_the_first_round(tmp_path):
    folder = run("--guard.stop_when", '["kl_by_preference.brevity > 9"]', "--out", tmp_path / "run")
    assert [row["alarms"] for row in read_rows(folder, "round")] == [
        ["guard.stop_when 'kl_by_preference.brevity > 9': this run has no such quantity."],
        [],
    ]
    assert final(folder)["adapter_round"] == 2
    assert final(folder)["adapter_reason"].startswith("the last")


def test_a_conditioned_run_that_a_rule_ends_has_its_front(tmp_path):
    keys = (*FRONT, "--rounds", 5, "--guard.stop_when", '["response_length > 1"]')
    folder = run(*keys, "--out", tmp_path / "run")
    assert len(read_rows(folder, "round")) == 1
    front = Front.load(folder / "front.json")
    assert len(front.points) == 5
    assert len(front.validation) == 5
    assert "not measured" not in final(folder)["adapter_reason"]


@pytest.mark.slow
def test_a_run_that_a_rule_has_ended_continues_under_another(tmp_path, capsys):
    out = ("--out", tmp_path / "run")
    rounds = ("--rounds", 3)
    run(*rounds, "--guard.stop_when", '["response_length > 1"]', *out)
    run(*rounds, "--guard.stop_when", '["response_length > 1"]', *out, "--resume", "true")
    assert "the run has ended before, because guard.stop_when" in capsys.readouterr().out
    folder = run(*rounds, *out, "--resume", "true")
    assert len(read_rows(folder, "round")) == 3
    whole = run(*rounds, "--out", tmp_path / "whole")
    assert equal(folder, whole)


def test_a_rule_about_an_unknown_quantity_is_refused_at_once():
    with pytest.raises(UserError, match="did you mean 'response_length'"):
        config("--guard.stop_when", '["response_lenght > 1"]')


def test_a_run_leaves_its_best_adapter_and_says_why(tmp_path, monkeypatch):
    """Rewards of validation replies fall after round 1; the guard sees nothing of it."""
    given = iter([0.2, 0.9, 0.1, 0.1])
    monkeypatch.setattr(
        "firm.jobs.alignment.utility",
        lambda measured: torch.linspace(-0.05, 0.05, 8, dtype=torch.float64) + next(given),
    )
    folder = run("--rounds", 3, "--out", tmp_path / "run")
    assert final(folder)["adapter_round"] == 1
    assert final(folder)["round"] == 3
    assert "the last has 0.100, 0.800 ± 0.000 less" in final(folder)["adapter_reason"]
    server = load_state(folder / "checkpoints/round_0001")["state"]["server"]["adapter"]
    left = read_adapter(folder)
    assert len(left) == len(server)
    pairs = zip(sorted(left), sorted(server), strict=True)
    assert all(torch.equal(left[a], server[b]) for a, b in pairs)
    *_, chosen, _, _, last = read_rows(folder, "evaluation", split="validation")
    assert (chosen["round"], last["round"]) == (1, 3)  # a sweep reads the last row
    assert last["rewards"] == chosen["rewards"]
    for text in ((folder / "report.html").read_text(), (folder / "adapter/README.md").read_text()):
        assert "round 1: the best on the validation data (mean reward 0.900)" in text


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("--evaluation.num_validation_prompts", 0), "the last; there is no validation data"),
        (("--checkpoints.keep_best", "false"), "the last"),
    ],
)
def test_a_run_that_leaves_its_last_adapter_says_why(keys, says, tmp_path):
    folder = run(*keys, "--out", tmp_path / "run")
    assert final(folder)["adapter_round"] == 2
    assert final(folder)["adapter_reason"].startswith(says)
