"""The settings of the FIRM paper as files: each is planned, and differs where the paper says so."""

from pathlib import Path

import pytest

from firm.federation import Processes
from firm.jobs import alignment, sweep
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.plan import make_plan
from firm.jobs.sweep import main as sweep_main
from firm.run import parse

ROOT = Path(__file__).parents[2]
OVERLAYS = ("fedcmoo_a", "beta_0", "beta_0.05", "deberta_half", "dirichlet", "clients_16")


def config(name: str, *arguments: str, model: str = "hh_tinyllama") -> AlignmentConfig:
    files = ["--config", f"configs/{model}.yaml", "--config", f"configs/paper/{name}.yaml"]
    return parse(AlignmentConfig, [*files, *arguments])


def plan_of(name: str, *arguments: str, model: str = "hh_tinyllama"):
    cfg = config(name, *arguments, model=model)
    clients = [f"client_{index}" for index in range(cfg.num_clients)]
    return make_plan(cfg, clients, Processes(0, 1, 1))


def test_every_file_of_the_paper_is_tested_here():
    assert {path.stem for path in (ROOT / "configs/paper").glob("*.yaml")} == {
        *OVERLAYS,
        "preferences",
    }


@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, "hh_tinyllama") for name in OVERLAYS), ("deberta_half", "hh_llama32")],
)
def test_every_setting_is_planned_without_weights_and_without_a_network(name, model, capsys):
    with pytest.raises(SystemExit) as end:  # the policy is on the hub
        alignment.main(config(name, "--plan", model=model))
    assert end.value.code == 1
    assert "optimizer steps" in capsys.readouterr().out
    cfg = config(name, model=model)
    assert cfg.name == name
    assert cfg.policy == parse(AlignmentConfig, ["--config", f"configs/{model}.yaml"]).policy


def test_work_is_that_of_the_setting():
    assert plan_of("beta_0").work.clients_per_round == 2
    assert plan_of("beta_0.05").work.clients_per_round == 2
    sixteen, eight = plan_of("clients_16").work, plan_of("dirichlet").work
    assert sixteen.training_replies == 2 * eight.training_replies == 2 * 16 * 8 * 4 * 16
    fedcmoo = plan_of("fedcmoo_a").work
    assert (fedcmoo.solves, fedcmoo.server_solves) == (0, 1)
    assert fedcmoo.training_replies == eight.training_replies


def test_fedcmoo_a_is_firm_s_baseline_without_compression_and_without_beta(monkeypatch):
    takes_seconds = "firm.jobs.plan.planning.estimate_costs"
    monkeypatch.setattr(takes_seconds, lambda *_: (None, None))
    local = ("--policy.path", "firm/miniature/checkpoints/policy", "--policy.prompt.name", "hh")
    cfg = config("fedcmoo_a")
    assert (cfg.strategy.name, cfg.strategy.beta) == ("fedcmoo", 0.0)
    assert cfg.strategy.num_local_steps == 4
    firm, fedcmoo = plan_of("clients_16", *local).policy, plan_of("fedcmoo_a", *local).policy
    assert fedcmoo.bytes_up == pytest.approx(firm.bytes_up + 2 * 4 * firm.num_trainable, rel=0.02)
    assert fedcmoo.bytes_down == pytest.approx(2 * firm.bytes_down, rel=0.02)


def test_half_of_the_clients_judge_helpfulness_by_deberta_and_harmlessness_as_all():
    cfg = config("deberta_half")
    (group,) = cfg.groups.values()
    assert 2 * len(group.clients) == cfg.num_clients
    assert set(group.rewards) == {"helpful"}
    assert group.rewards["helpful"].format == "question_answer"
    told = " ".join(plan_of("deberta_half").notes)
    assert "--groups.deberta.rewards.helpful.path FOLDER" in told


def test_prompts_have_kinds_where_a_dirichlet_distribution_divides_them():
    cfg = config("dirichlet")
    assert (cfg.partition.kind, cfg.partition.alpha) == ("dirichlet", 0.3)
    assert len({source.partition(":")[2] for source in cfg.data.train.source}) == 4


def test_the_preferences_of_the_paper_are_five_points_of_its_own_run(capsys):
    cfg = parse(sweep.SweepConfig, ["--config", "configs/paper/preferences.yaml", "--plan"])
    with pytest.raises(SystemExit):  # the policy is on the hub
        sweep_main(cfg)
    printed = capsys.readouterr().out
    assert printed.count("firm-") == 5
    assert "TinyLlama/TinyLlama-1.1B-Chat-v1.0" in printed
    assert not cfg.out
