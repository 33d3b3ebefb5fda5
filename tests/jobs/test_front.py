"""Runs whose policy is conditioned on the preference: resumed, in every engine, and refused."""

import shlex
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from firm.alignment.adapters.conditioned import PreferenceStream, fold
from firm.cli.main import COMMANDS
from firm.fronts import Front, grid
from firm.jobs.alignment_config import AlignmentConfig, measured_preferences
from firm.jobs.chat import Conversation
from firm.jobs.configs import ChatConfig, PickConfig
from firm.jobs.finished_runs import parse_over_run
from firm.jobs.pick import main
from firm.report import formats
from firm.report.run_front import split_at
from firm.run import UserError, parse
from firm.serving.front import stated_preference
from tests import smoke
from tests.runs import read_adapter, read_rows
from tests.smoke import FRONT


def _slopes(run):
    return load_file(run / "adapter/conditioned.safetensors")


def _same(first, second, tolerance=0.0):
    for read in (read_adapter, _slopes):
        mine, theirs = read(first), read(second)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance)


def test_a_run_that_was_stopped_ends_as_one_that_was_not(trained, tmp_path):
    smoke.run_stopped_in_round_2(*FRONT, "--out", tmp_path / "run", strategy="fedavg")
    resumed = smoke.run(*FRONT, "--out", tmp_path / "run", "--resume", "true")
    _same(trained, resumed)
    assert any(value.abs().max() > 1e-4 for value in _slopes(trained).values())


def test_the_run_s_page_is_the_front_and_its_points_are_ordinary_adapters(trained):
    front = Front.load(trained / "front.json")
    assert [point.preference for point in front.points] == grid(4, 2)
    centre, slopes = read_adapter(trained), _slopes(trained)
    for point in front.points:
        assert point.preference is not None
        (row,) = read_rows(trained, "evaluation", split=split_at("test", point.preference))
        assert row["preference"] == list(point.preference)
        assert point.rewards == {name: row["rewards"][name]["mean"] for name in front.objectives}
        assert point.errors["kl"] == row["kl_se"] > 0
        assert all(point.errors[name] == row["scores"][name]["se"] for name in point.scores)
        *_, row = read_rows(trained, "evaluation", split=split_at("validation", point.preference))
        means = {name: row["rewards"][name]["mean"] for name in front.objectives}
        assert front.validation[point.name] == means != point.rewards
        folded = load_file(trained / point.adapter / "adapter_model.safetensors")
        assert folded.keys() == centre.keys()
        for name, value in centre.items():
            slope = slopes.get(name.replace("lora_B", "lora_B1"), torch.zeros(()))
            expected = value + (2 * point.preference[0] - 1) * slope
            torch.testing.assert_close(folded[name], expected)
    assert len({tuple(point.rewards.values()) for point in front.points}) > 1
    page = (trained / "report.html").read_text()
    for title in ("The front", "Models by preference"):
        assert title in page
    assert "The hypervolume over the rounds" not in page  # it was measured at the end alone
    assert "one adapter serves every preference" in page
    assert "at shares of 0 → 1" in page
    shown = [f"<h3>{formats.shares(point.preference)}</h3>" for point in front.points]
    assert all(heading in page for heading in ("<h3>Base</h3>", *shown))
    for point in front.points:
        assert f">{point.name}</" in page
        assert AutoTokenizer.from_pretrained(trained / point.adapter)("A cat.")["input_ids"]
    # every fourth round and the last one are measured on the validation prompts
    rounds = [row["round"] for row in read_rows(trained, "evaluation", split="validation at 1, 0")]
    assert rounds == [2]


def test_a_target_is_answered_at_the_preference_that_reaches_it(bent, tmp_path, capsys):
    options = ["--front", str(bent / "front.json"), "--target", "brevity=0.4,positivity=0.6"]
    main(parse(PickConfig, [*options, "--merge", "--out", str(tmp_path / "merged")]))
    # 0.4 of the way between 0.5² and 0.75² in rewards
    share = 0.5 + 0.25 * (0.4 - 0.25) / (0.5625 - 0.25)
    merged = load_file(tmp_path / "merged/adapter_model.safetensors")
    expected = fold({**read_adapter(bent), **_slopes(bent)}, [share, 1 - share])
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name])
    printed = capsys.readouterr().out
    shown = f"brevity {share:.3f}, positivity {1 - share:.3f}"
    assert f"reached   at the preference {shown}\n" in printed
    assert "a target is a proportion of the gains measured on the front" in printed
    assert "0.400 ± " in printed
    assert f"--adapter {tmp_path / 'merged'}" in printed
    assert f"preference {shown} as the mean" in (tmp_path / "merged/README.md").read_text()

    assert main(parse(PickConfig, options)) == bent / "front/50_50"
    printed = capsys.readouterr().out
    assert "50_50, measured at brevity 0.500, positivity 0.500" in printed
    assert f"the nearest measured preference. The target is reached at {shown}: --merge" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("chat")]
    program, command, *arguments = shlex.split(line.removeprefix("chat"))
    assert (program, command) == ("firm", "chat")
    cfg = COMMANDS["chat"].parse(arguments)
    assert cfg.run == bent
    assert cfg.preference.names == ("brevity", "positivity")
    assert cfg.preference == (0.5, 0.5)  # as the model with the expected rewards


def test_the_widest_gaps_of_the_final_front_are_measured_too(tmp_path):
    options = (*FRONT, "--evaluation.preferences", "brevity=1", "positivity=1,brevity=0")
    run = smoke.run(*options, "--evaluation.num_refined", 3, "--out", tmp_path / "run")
    front = Front.load(run / "front.json")
    names = [point.name for point in front.points]
    assert len(names) == 5
    assert names[0] == "100_0"
    assert "50_50" in names
    assert sorted(point.preference for point in front.points)[::-1] == [
        point.preference for point in front.points
    ]
    for point in front.points:
        assert (run / point.adapter / "adapter_model.safetensors").is_file()
    rows = read_rows(run, "evaluation", split=split_at("validation", [0.5, 0.5]))
    last = read_rows(run, "round")[-1]["round"]
    assert [row["round"] for row in rows] == [last]  # earlier rounds do not have the preference
    assert set(front.validation) == set(names)
    page = (run / "report.html").read_text()
    assert all(f">{name}</" in page for name in names)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((*FRONT, "--evaluation.preferences", "[[1, 0]]"), "needs at least two preferences"),
        ((), "evaluation.num_refined needs policy.conditioning.kind preference, got 2"),
        (
            (*FRONT, "--rewards", f"{{{', '.join(f'{n}: {{name: brevity}}' for n in 'abcdefg')}}}"),
            "num_refined must be 0 with 210 evaluation.preferences of 7 objectives",
        ),
    ],
)
def test_gaps_of_no_front_are_refused(options, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        smoke.run(*options, "--evaluation.num_refined", 2, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_point_measures_what_its_folded_adapter_does(trained, tmp_path):
    folded = smoke.run(
        *("--start", f"{{{trained / 'front/75_25'}: 1}}", "--rounds", 0),
        *("--out", tmp_path / "folded"),
    )
    (expected,) = read_rows(trained, "evaluation", split=split_at("test", [0.75, 0.25]))
    _, row = read_rows(folded, "evaluation", split="test")
    assert row["scores"] == expected["scores"]  # the same replies
    assert row["kl"] == pytest.approx(expected["kl"], abs=1e-4)


def _conversation(run, *options):
    arguments = ["--run", str(run), "--policy.path", str(smoke.POLICY), *options]
    cfg = parse_over_run(ChatConfig, arguments, key="run", description="")
    return Conversation(replace(cfg, check_base=False))


def _answer(run, *options):
    return _conversation(run, *options).answer("Where is my ladder?", 0)["aligned"]


def test_a_conditioned_adapter_answers_at_the_preference_that_is_asked_for(trained, strong):
    folded = _answer(trained, "--adapter", str(trained / "front/100_0"))
    assert _answer(trained, "--preference", "[2, 0]") == folded
    assert _answer(trained, "--preference", "positivity=0") == folded
    answers = {_answer(strong, "--preference", p).text for p in ("[1, 0]", "[0, 1]", "[1, 1]")}
    assert len(answers) == 3
    assert _answer(strong).text in answers  # at equal shares


def test_a_chat_takes_a_target_or_requirements_as_requests_do(bent):
    front = Front.load(bent / "front.json")
    first, second = front.objectives
    target, require = f"{first}=0.7,{second}=0.3", f"{first}>=0.01, kl<=100"
    asked = {"--target": {"target": target}, "--require": {"require": require}}
    for option, request in asked.items():
        (value,) = request.values()
        expected = stated_preference(front, **request)
        assert _conversation(bent, option, value).preference == expected != [0.5, 0.5]
    with pytest.raises(UserError, match="no mixture meets"):
        _conversation(bent, "--require", f"{first}>=2")
    with pytest.raises(UserError, match="pass one of preference, target and require"):
        _conversation(bent, "--require", require, "--target", target)


def test_the_terminal_shows_the_policy_at_equal_shares(trained, tmp_path, capsys):
    smoke.run(*FRONT, "--rounds", 1, "--evaluation.front_every", 1, "--out", tmp_path / "run")
    (row,) = read_rows(tmp_path / "run", "evaluation", split="validation", round=1)
    shown = f"brevity {row['scores']['brevity']['mean']:.3f}"
    assert shown in capsys.readouterr().out.replace("  ", " ")


def test_stacked_clients_end_as_in_turn(trained, tmp_path):
    stacked = smoke.run(*FRONT, "--engine", "stacked", "--out", tmp_path / "run")
    _same(trained, stacked, tolerance=5e-5)  # Adam enlarges what rounding does to small gradients


@pytest.mark.parametrize("engine", ["local", "stacked"])
def test_firm_solves_at_the_preferences_that_were_drawn(trained, tmp_path, engine):
    options = ("--strategy.name", "firm", "--engine", engine, "--strategy.lora_mean", "products")
    run = smoke.run(*FRONT, *options, "--out", tmp_path / "run")
    weights = [row["weights"] for row in read_rows(run, "client")]
    assert all(sum(own) == pytest.approx(1) for row in weights for own in row)
    assert len({tuple(own) for row in weights for own in row}) > 2
    assert len(Front.load(run / "front.json").points) == 5
    assert not any("β" in alarm for row in read_rows(run, "round") for alarm in row["alarms"])
    with pytest.raises(AssertionError):
        _same(trained, run, tolerance=1e-3)


def test_a_group_draws_between_its_own_preferences(tmp_path, monkeypatch):
    drawn, own = [], PreferenceStream.draw

    def noted(*arguments):
        drawn.append(own(*arguments))
        return drawn[-1]

    monkeypatch.setattr(PreferenceStream, "draw", noted)
    groups = "{careful: {clients: [1], preferences: [{positivity: 3, brevity: 1}]}}"
    smoke.run(*FRONT, "--groups", groups, "--rounds", 1, "--out", tmp_path / "run")
    first, second = (torch.cat(drawn[at : at + 2]) for at in (0, 2))  # two local steps each
    assert first.std(0).min() > 0.05
    assert (second == torch.tensor([0.25, 0.75])).all()


@pytest.mark.slow
def test_frozen_a_sends_the_matrices_b_alone(trained, tmp_path):
    frozen = smoke.run(*FRONT, "--policy.lora.freeze_a", "true", "--out", tmp_path / "run")
    assert _slopes(frozen).keys() == _slopes(trained).keys()
    folded = smoke.run(
        *("--start", f"{{{frozen / 'adapter'}: 1}}", "--start_preference", "brevity=1"),
        *("--rounds", 0, "--out", tmp_path / "folded"),
    )
    own, slopes, centre = read_adapter(folded), _slopes(frozen), read_adapter(frozen)
    for name, value in centre.items():
        slope = slopes.get(name.replace("lora_B", "lora_B1"), torch.zeros(()))
        torch.testing.assert_close(own[name], value + slope)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--estimator.name", "ppo"], "needs an estimator that compares replies"),
        (
            ["--strategy", "{name: firm, preference: [0.5, 0.5]}"],
            r"strategy\.preference must be None with policy\.conditioning\.kind preference",
        ),
        (
            ["--strategy", "{name: firm, solve_per: batch}"],
            r"solve_per must be minibatch",
        ),
        (["--start", "{a: 1}"], "start must be empty with policy.conditioning.kind preference"),
        (["--start_preference", "[1, 1]"], "start_preference needs adapters in start"),
        (["--policy.conditioning.corner_share", 2], "policy.conditioning.corner_share"),
        (["--evaluation.preferences", "[[1]]"], "must have a share for each of brevity"),
        (["--evaluation.preferences", "[[1, 1], [2, 2]]"], "must differ in the first three digits"),
        (["--evaluation.preferences", "[[0, 0]]"], "not negative and not all zero"),
        (
            ["--evaluation.preferences", "[[1, 1]]", "--policy.conditioning.kind", "none"],
            "evaluation.preferences needs policy.conditioning.kind preference",
        ),
        (
            ["--groups", "{a: {clients: [0], preferences: []}}"],
            "must contain at least one preference",
        ),
        (
            ["--groups", "{a: {clients: [0], preferences: [[1]]}}"],
            r"groups\.a\.preferences must have",
        ),
        (["--rewards", "{brevity: {name: brevity}}"], "must be none with a single objective"),
    ],
)
def test_what_cannot_be_conditioned_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        smoke.config(*(FRONT[6:] if "ppo" in arguments else FRONT), *arguments)


@pytest.mark.parametrize(
    "names",
    [
        ["miniature_front"],
        ["miniature_critic_free", "front"],
        ["hh_tinyllama_critic_free", "front"],
    ],
    ids=" ".join,
)
def test_shipped_configurations_train_a_front(names):
    options = [option for name in names for option in ("--config", name)]
    cfg = parse(AlignmentConfig, options)
    assert cfg.policy.conditioning.kind == "preference"
    assert cfg.strategy.name == "fedavg"
    assert measured_preferences(cfg) == grid(4, 2)


def test_an_ordinary_adapter_is_not_folded(tmp_path, run):
    with pytest.raises(ValueError, match=r"has no conditioned\.safetensors"):
        smoke.run(
            *("--start", f"{{{run / 'adapter'}: 1}}", "--start_preference", "[1, 0]"),
            *("--rounds", 0, "--out", tmp_path / "folded"),
        )
