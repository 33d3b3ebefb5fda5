"""Runs that learn from pairs alone."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from firm.alignment.tensor_cache import _warn
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.cli.main import COMMANDS
from firm.federation import Processes
from firm.fronts import Front
from firm.jobs.alignment import align, main, print_result
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_data import data_of
from firm.jobs.compare import compare
from firm.jobs.configs import SweepConfig
from firm.jobs.interface import align as firm_align
from firm.jobs.plan.planning import make_plan
from firm.jobs.study import final_rows
from firm.jobs.sweep import main as sweep_main
from firm.report.record import read_record
from firm.run.config import compose
from firm.run.directory import Run
from firm.run.errors import UserError
from tests.nursery import forked_workers
from tests.runs import distance, read_rows

align_cli = COMMANDS["align"].run
CHOSEN = {"helpful": " Take a new one and keep it warm.", "harmless": " I would rather not."}
REJECTED = {"helpful": " No.", "harmless": " Sure, do it now."}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def pairs(tmp_path):
    for name in CHOSEN:
        rows = [
            {
                "prompt": f"\n\nHuman: Can you help me with my {n} {name} cabs?\n\nAssistant:",
                "chosen": CHOSEN[name],
                "rejected": REJECTED[name],
            }
            for n in range(40)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def settings(folder, **changes):
    return {
        "num_threads": 1,
        "rounds": 2,
        "num_clients": 3,
        "policy.path": "firm/miniature/checkpoints/policy",
        "policy.lora.r": 4,
        **{f"pairs.{name}.source": str(folder / f"{name}.jsonl") for name in CHOSEN},
        "groups": {"one": {"clients": [2], "objectives": ["helpful"]}},
        "rollout.max_new_tokens": 16,
        "rollout.max_prompt_tokens": 64,
        "estimator.name": "dpo",
        "estimator.batch_size": 8,
        "estimator.minibatch_size": 4,
        "estimator.actor_learning_rate": 1e-3,
        "strategy.num_local_steps": 1,
        "evaluation.num_validation_prompts": 4,
        "evaluation.num_test_prompts": 4,
        **changes,
    }


def configured(folder, out, **changes):
    given = settings(folder, **{key.replace("__", "."): value for key, value in changes.items()})
    return compose(AlignmentConfig, [], [*given.items(), ("out", str(out))], source="test")


def test_a_cache_that_cannot_be_used_ends_no_run(pairs, tmp_path, caplog):
    _warn.cache_clear()
    (tmp_path / "cache").touch()
    align(configured(pairs, tmp_path / "run", rounds=1))
    assert Run(tmp_path / "run").record()["status"] == "finished"
    assert "references cannot be used (Not a directory), which only costs time" in caplog.text


def test_the_base_model_takes_no_passes_besides_those_of_the_reference_which_are_told(
    pairs, tmp_path, monkeypatch, capsys
):
    passed = []
    original = MultiObjectiveTrainer.reply_logprobs

    def noted(trainer, own, *, of_reference=False, **options):
        passed.append(of_reference)
        return original(trainer, own, of_reference=of_reference, **options)

    monkeypatch.setattr(MultiObjectiveTrainer, "reply_logprobs", noted)
    align(configured(pairs, tmp_path / "run", rounds=1))
    assert passed.count(False) == 2  # the aligned model on validation and test pairs
    told = capsys.readouterr().err
    for line in (
        "client_0's pairs under the reference: ",
        "client_2's pairs under the reference: ",
        "test pairs under the reference: 12 replies of up to 16 tokens",
        "test pairs: 12 replies of up to 16 tokens",
    ):
        assert told.count(line) == 1, told


def test_a_run_learns_to_rank_held_out_pairs(pairs, tmp_path):
    result = align(configured(pairs, tmp_path / "run"))
    table = result.rewards
    assert (table.loc["base"] == 0.5).all()
    assert (table.loc["aligned"] > 0.9).all()
    rows = result.rows
    assert not next(row for row in rows if row["kind"] == "run")["calibration"]
    assert not any(row["alarms"] for row in rows if row["kind"] == "round")
    last = [row for row in rows if row["kind"] == "client" and row["client"] == "client_2"][-1]
    assert last["pair_accuracy"]["harmless"] is None
    assert last["pair_accuracy"]["helpful"] > 0.5
    cells = {row.name: row.cells() for row in result.comparison}
    exact = ["0.500", "1.000 [0.292, 1.000]", "+0.500 [-0.208, +0.500]", ""]  # of three prompts
    assert cells["helpful, accuracy"] == ["helpful, accuracy", *exact]
    assert "pair_margin" in json.dumps(rows)
    figures = {row["figure"]: row for row in final_rows({"pairs": [read_record(result.path)]})}
    kinds = [f"{kind} {name}" for kind in ("accuracy", "margin") for name in CHOSEN]
    assert [*figures] == [*kinds, "bytes up"]
    assert figures["accuracy helpful"]["aligned"] == table.loc["aligned", "helpful"]
    samples = list(Run(result.path).samples())
    (prompts, same) = ([row["prompt"] for row in samples if row["round"] == r] for r in (0, 2))
    assert len(prompts) == len(set(prompts)) > 1
    assert prompts == same
    text = result.page.read_text().partition("plotly.js v")[0]
    assert "The replies are sampled; nothing scores them." in text
    for words in ("mean raw score", "mean score", "calibration of rewards"):
        assert words not in text


def test_a_resumed_run_equals_one_that_was_not_stopped(pairs, tmp_path):
    whole = align(configured(pairs, tmp_path / "whole", rounds=3))
    cut = configured(pairs, tmp_path / "cut", rounds=1)
    align(cut)
    resumed = align(replace(cut, rounds=3, resume=True))
    assert (whole.adapter / "adapter_model.safetensors").read_bytes() == (
        resumed.adapter / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy__name": "fedavg"},
        {"strategy__name": "fedcmoo"},
        {"strategy__upload__bits": 8},
        {
            "policy__conditioning__kind": "preference",
            "policy__conditioning__draw_per": "step",
            "groups": {},
            "evaluation__preferences": [[1, 0], [0, 1]],
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_rest_of_the_house_trains_on_pairs(pairs, tmp_path, capsys, changes):
    cfg = configured(pairs, tmp_path / "run", **changes)
    result = align(cfg)
    assert (result.rewards.loc["aligned"] > 0.6).all()
    if cfg.policy.conditioning.kind == "preference":
        print_result(cfg, result)
        printed = capsys.readouterr().out
        assert "the same pairs at each measured preference" in printed
        assert "helpful, accuracy" in printed
    assert Run(tmp_path / "run").record()["status"] == "finished"


@pytest.mark.slow
def test_pairs_train_under_masks_as_without_and_with_noise_from_a_budget(pairs, tmp_path):
    runs = {
        name: align(configured(pairs, tmp_path / name, **changes)).path
        for name, changes in {
            "plain": {},
            "masks": {"strategy__secure": "masks"},
            "noise": {"strategy__privacy": {"clip_norm": 0.5, "noise_multiplier": 0.1}},
        }.items()
    }
    assert 0 < distance(runs["plain"], runs["masks"]) < 2e-6
    assert distance(runs["plain"], runs["noise"]) > 1e-2
    for row in read_rows(runs["noise"], "client"):  # averages of a shard's pairs would tell of it
        assert not row.keys() & {"pair_accuracy", "pair_margin"}
    assert all(row["privacy"]["epsilon"] > 0 for row in read_rows(runs["noise"], "round"))


def test_a_run_on_pairs_is_measured_on_prompts_of_the_user_s_own(pairs, tmp_path):
    result = align(configured(pairs, tmp_path / "run", rounds=1))
    own = ["evaluate", str(result.path), "--rewards", "{brief: {name: brevity}}"]
    with pytest.raises(UserError, match=r"the run learned from pairs, and has no test prompts"):
        compare(COMMANDS["evaluate"].parse(own[1:]))


@pytest.mark.slow
def test_a_sweep_over_preferences_learns_from_pairs(pairs, tmp_path, capsys):
    base = tmp_path / "base.yaml"
    base.write_text("name: pairs\n")
    keys = {
        "out": tmp_path / "sweep",
        "base": base,
        "seeds": [0, 1],
        "overrides": settings(pairs, groups={}, **{"strategy.name": "fedavg"}),
        "preferences": [[0.6, 0.4], [0.5, 0.5]],
        "methods": {"one run": {"kind": "front"}, "separate runs": {}},
    }
    with forked_workers():
        sweep_main(compose(SweepConfig, [], list(keys.items())))
    told = capsys.readouterr()
    assert told.out.count("accuracies on held-out pairs of replies to ") == 2
    assert "helpful 0.600, harmless 0.400" in told.out
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "Hypervolume on the test pairs" in page
    assert "mapped to [0, 1]" not in page
    assert "nan" not in told.out
    assert "could not" not in told.err
    for name in ("one_run", "separate_runs"):
        front = Front.load(tmp_path / "sweep" / f"{name}.front.json")
        assert front.objectives == ("helpful", "harmless")
        assert Counter(front.preferences()[:, 0].round(3)) == {0.6: 2, 0.5: 2}
        assert front.base == {"helpful": 0.5, "harmless": 0.5}
        assert (front.rewards() > 0.5).all()


def test_stacked_clients_train_as_alone(pairs, tmp_path):
    alone = align(configured(pairs, tmp_path / "alone"))
    stacked = align(configured(pairs, tmp_path / "stacked", engine="stacked"))
    for name in ("helpful", "harmless"):
        own, theirs = (each.aligned.scores[name].nanmean() for each in (alone, stacked))
        assert own.item() == pytest.approx(theirs.item(), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards__brief__name": "brevity"}, "rewards must be left out with estimator dpo"),
        ({"estimator__name": "critic_free"}, "rewards must name at least one objective"),
        ({"policy__conditioning__kind": "preference"}, "draw_per must be step"),
        ({"evaluation__metrics": {"x": {"name": "brevity"}}}, "samples no replies"),
    ],
)
def test_settings_that_do_not_fit_are_refused(pairs, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        configured(pairs, tmp_path / "run", **changes)


def test_a_field_names_the_objective_of_a_row(pairs, tmp_path):
    rows = []
    for name in CHOSEN:
        own = (pairs / f"{name}.jsonl").read_text().splitlines()
        rows += [{**json.loads(line), "kind": name} for line in own]
    source = tmp_path / "all.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs_of = {name: {"source": str(source), "named_by": "aim"} for name in CHOSEN}
    with pytest.raises((UserError, ValueError), match="no row of 80 has 'helpful'"):
        align(configured(pairs, tmp_path / "run", pairs=pairs_of))


def test_a_plan_counts_pairs_and_no_replies(pairs, tmp_path, capsys):
    cfg = configured(pairs, tmp_path / "run", plan=True)
    main(cfg)
    text = capsys.readouterr().out
    assert "replies sampled" not in text
    assert "passes over pairs without gradients" in text
    assert "update without gradient checkpointing" in text
    assert "rollout, with" not in text
    plan = make_plan(configured(pairs, tmp_path / "run"), client_names(cfg), Processes())
    more = configured(pairs, tmp_path / "run", evaluation__num_test_prompts=3000)
    most = make_plan(more, client_names(cfg), Processes())
    assert (
        most.work.test == plan.work.test == (3, 2)
    )  # a tenth of the prompts that validation leaves


def test_several_pairs_of_a_prompt_are_held_out_with_another_prompt(pairs, tmp_path):
    for name in CHOSEN:
        file = pairs / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        several = [{**row, "rejected": f" No {n}."} for row in rows for n in range(4)]
        file.write_text("".join(json.dumps(row) + "\n" for row in several))
    cfg = configured(pairs, tmp_path / "run")
    splits = data_of(cfg).load(cfg, None, {}, measures=True, on_note=lambda _: None)
    for held_out in (splits.validation, splits.test):
        for name in CHOSEN:
            own = [pair.prompt.text for pair in held_out if pair.objective == name]
            assert len(set(own)) == 2 <= len(own)
    own = {"measures": False, "holds_out": False, "on_note": lambda _: None}
    num_all = sum(map(len, (splits.train, splits.validation, splits.test)))
    assert len(data_of(cfg).load(cfg, None, {}, **own).train) == num_all > len(splits.train)
    first, *_ = cfg.objectives  # a site that serves one needs the pairs of no other
    (alone,) = {
        pair.objective for pair in data_of(cfg).load(cfg, None, {}, **own, objectives=[first]).train
    }
    assert alone == first


def test_python_passes_lists_of_pairs(pairs, tmp_path):
    lists = {
        name: [json.loads(line) for line in (pairs / f"{name}.jsonl").read_text().splitlines()]
        for name in CHOSEN
    }
    given = settings(pairs, rounds=1, groups={})
    path = given.pop("policy.path")
    for name in CHOSEN:
        del given[f"pairs.{name}.source"]
    result = firm_align(path, pairs=lists, settings=given, out=tmp_path / "run")
    assert set(result.rewards) == set(CHOSEN)
    with pytest.raises(UserError, match="pairs must be passed without rewards"):
        firm_align(path, {"x": "brevity"}, ["a"], pairs=lists)
    with pytest.raises(UserError, match="or pairs"):
        firm_align(path)


THOUGHT = [{"role": "assistant", "content": "b", "reasoning_content": "c"}]


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        (None, "`chosen` must be a reply"),
        (THOUGHT, "a reply has `reasoning_content`, which a prompt format without"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named_by_objective_file_and_line(
    pairs, tmp_path, refusal, chosen, line
):
    file = pairs / "helpful.jsonl"
    row = {"prompt": "a", "chosen": chosen, "rejected": "b"}
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    given: dict = {}
    for key, value in settings(pairs, out=str(tmp_path / "run")).items():
        *sections, name = key.split(".")
        place = given
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    (tmp_path / "pairs.yaml").write_text(json.dumps(given))
    told = refusal(align_cli, ["--config", tmp_path / "pairs.yaml"])
    assert f"pairs.helpful: {file}, line 41: {line}" in told


def test_too_few_pairs_name_their_objective(pairs, tmp_path):
    file = pairs / "harmless.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:10]))
    with pytest.raises(ValueError, match=r"pairs\.harmless: .*"):
        align(configured(pairs, tmp_path / "run"))


def test_pairs_that_are_equal_after_truncation_are_dropped_and_noted(pairs, tmp_path):
    file = pairs / "helpful.jsonl"
    same = "The very same beginning, which is longer than the limit, and then "
    row = {"prompt": "a", "chosen": f"{same} yes", "rejected": f"{same} no"}
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    result = align(configured(pairs, tmp_path / "run", rounds=1, estimator__minibatch_size=8))
    (about,) = read_rows(result.path, "run")
    assert (
        "pairs.helpful: 1 of 41 pairs are dropped, since their replies are equal after truncation "
        "to 16 tokens." in about["alarms"]
    )
    first = read_rows(result.path, "client")[0]["pair_accuracy"]
    assert first["helpful"] == 0.5  # the policy is its reference, and all margins are zero


def test_a_policy_that_loses_the_preferred_replies_goes_back(pairs, tmp_path):
    """Both replies are the base model's own words, and the rate is far too large."""
    for name in CHOSEN:
        rows = map(json.loads, (pairs / f"{name}.jsonl").read_text().splitlines())
        own = {"chosen": " I am not sure about that.", "rejected": " I am not sure about this."}
        lines = [json.dumps({**row, **own}) + "\n" for row in rows]
        (pairs / f"{name}.jsonl").write_text("".join(lines))
    runaway = {"estimator.actor_learning_rate": 0.3, "rounds": 4}
    result = align(configured(pairs, tmp_path / "run", **runaway))
    alarms = [text for r in result.rows if r["kind"] == "round" for text in r["alarms"]]
    assert "the log-probability that preferred replies have lost" in alarms[0]
    assert "trust region" in alarms[0]
