"""`firm init`: a configuration that runs, from flags or from answers, or one line that says why."""

import gzip
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from firm.alignment.inspection import inspect_policy
from firm.alignment.policy import read_tokenizer
from firm.cli.main import COMMANDS
from firm.jobs.alarms import alarms_at_start
from firm.jobs.alignment import main as align
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_data import data_of
from firm.jobs.configs import InitConfig
from firm.jobs.init import MAX_ROUNDS, MIN_SHARD, SECONDS, init, likely_format, main
from firm.jobs.plan.record import Seconds
from firm.report.formats import duration
from firm.run import UserError, compose, parse
from tests.runs import read_rows
from tests.smoke import ROOT, SMOKE
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.kinds import KINDS

cli = COMMANDS["init"].run

POLICY = str(ROOT / "firm/miniature/checkpoints/policy")
REWARDS = {
    "helpful": str(ROOT / "firm/miniature/checkpoints/helpful"),
    "brief": "brevity",
    "loud": "my 😀 rewards.py:loud",
}
FILE = """
from reward_models import (reward_model)

@reward_model("loud")
def loud(completions, **kwargs):
    return [float(text.count("!")) for text in completions]
"""


MODEL = ("--policy", POLICY, "--prompts", "prompts.jsonl")
GOOD = ("--prompts", "prompts.jsonl", "--rewards", "{x: brevity}")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Tell me about number {index}."} for index in range(50)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.usefixtures("new_plugins")
def test_what_it_writes_runs_and_keeps_splits_apart(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("firm.jobs.init.SECONDS", 100 * SECONDS)  # enough on a busy machine
    (tmp_path / "my 😀 rewards.py").write_text(FILE)
    main(InitConfig(POLICY, REWARDS, str(data), out=tmp_path / "own.yaml"))
    said = capsys.readouterr().out
    assert "firm align --config" in said
    assert "data     40 prompts for 4 clients, 10 held out for testing, too few to measure" in said
    rounds, length = re.search(
        r"run      (\d+) rounds, replies of up to (\d+) tokens, ab", said
    ).groups()
    assert (int(rounds), int(length)) == (MAX_ROUNDS, 128)  # a fast policy
    options = (
        "--policy.dtype", "float32", "--rounds", 1, "--num_clients", 2, "--num_threads", 1,
        "--strategy.num_local_steps", 1, "--estimator.num_epochs", 1, "--rollout.max_new_tokens", 4,
        "--estimator.batch_size", 8, "--out", "run",
        "--rewards.helpful.dtype", "float32",
        "--rewards.loud.normalization", "none",
    )  # fmt: skip
    cfg = parse(AlignmentConfig, ["--config", "own.yaml", *map(str, options)])
    assert align(cfg)
    rows = read_rows(tmp_path / "run", "evaluation")
    assert {(row["split"], row["num_prompts"]) for row in rows} == {("test", 10)}
    assert set(rows[0]["rewards"]) == set(REWARDS)
    # fewer than 200 prompts: a fifth is held out for each use, in place of a tenth
    assert (cfg.data.train.split, cfg.data.hold_out) == ("[:]", 0.2)
    # a comparison takes the prompts that the run held out, and none that it trained on
    again = COMMANDS["evaluate"].parse(["--runs", "[run]", "--seed", "3"])
    assert (again.prompts, again.held_out, again.held_out_seed) == (cfg.data.train, 0.2, 0)
    other = COMMANDS["evaluate"].parse(["--runs", "[run]", "--prompts.source", "more.jsonl"])
    assert other.held_out == 0
    (tmp_path / "more.yaml").write_text("prompts: { source: more.jsonl }\n")
    other = COMMANDS["evaluate"].parse(["--runs", "[run]", "--config", "more.yaml"])
    assert (str(other.prompts.source), other.held_out) == ("more.jsonl", 0)
    with pytest.raises(UserError, match=r"prompts.max_tokens: the run held its test prompts out"):
        COMMANDS["evaluate"].parse(["--runs", "[run]", "--prompts.max_tokens", "9"])
    (tmp_path / "more.yaml").write_text("1: 2\n")
    with pytest.raises(UserError, match="must have strings as keys, got 1"):
        COMMANDS["evaluate"].parse(["--runs", "[run]", "--config", "more.yaml"])


@pytest.mark.parametrize(
    ("num_parameters", "full", "rate"),
    [
        (10**6, True, 6e-5),
        (135 * 10**6, True, 5e-4),
        (10**9, True, 6e-5),
        (10**6, False, 3e-3),
        (135 * 10**6, False, 5e-4),
        (10**9, False, 1e-4),
    ],
)
def test_models_of_a_size_that_was_measured_get_its_settings(
    data, tmp_path, monkeypatch, num_parameters, full, rate
):
    found = inspect_policy(POLICY, on_error=print)
    assert found is not None
    assert 800_000 < found.num_parameters < 1_000_000
    resized = replace(found, num_parameters=num_parameters)
    monkeypatch.setattr("firm.jobs.init.inspect_policy", lambda *_, **__: resized)
    rewards = {"brief": "brevity", "positive": "positivity"}
    own = init(InitConfig(POLICY, rewards, str(data), full=full, out=tmp_path / "own.yaml")).config
    assert own.estimator.actor_learning_rate == rate
    assert own.estimator.name == ("ppo" if full else "critic_free")
    assert own.estimator.num_epochs == (3 if full and rate == 6e-5 else 1)


@pytest.mark.parametrize(
    ("token", "rounds", "length"), [(0.01, 20, 128), (0.4, 16, 32), (10.0, 4, 8), (None, 12, 128)]
)
def test_replies_are_as_long_as_ten_minutes_allow(
    token, rounds, length, data, tmp_path, monkeypatch, capsys
):
    def plan(cfg, *_):
        num = cfg.rollout.max_new_tokens
        own = token and Seconds(token * num, updates=2.0, evaluation=60.0, rounds=cfg.rounds)
        return SimpleNamespace(seconds=own)

    monkeypatch.setattr("firm.jobs.init.make_plan", plan)
    main(InitConfig(POLICY, {"brief": "brevity"}, str(data), out=tmp_path / "own.yaml"))
    own = compose(AlignmentConfig, [tmp_path / "own.yaml"], [])
    assert (own.rounds, own.rollout.max_new_tokens) == (rounds, length)
    seconds = 60 + rounds * (2 + (token or 0) * length)
    assert seconds <= SECONDS or length == 8
    said = capsys.readouterr().out
    assert f"run      {rounds} rounds, replies of up to {length} tokens" in said
    assert (f"about {duration(seconds)} here" in said) is (token is not None)
    assert ("a smaller policy, or an accelerator, takes less" in said) is (seconds > SECONDS)


def test_pairs_take_the_place_of_prompts_and_rewards(tmp_path, monkeypatch, capsys, refusal):
    monkeypatch.chdir(tmp_path)
    pairs = {}
    for name, num in (("helpful", 80), ("brief", 1_500)):
        rows = [{"prompt": f"Q{i}", "chosen": f"yes {i}", "rejected": "no"} for i in range(num)]
        pairs[name] = f"{name}.jsonl"
        Path(pairs[name]).write_text("\n".join(map(json.dumps, rows)))
    main(InitConfig(POLICY, pairs=pairs, out=Path("own.yaml")))
    said = capsys.readouterr().out
    assert "data     72 pairs of an objective for 4 clients, 8 held out for testing, too fe" in said
    options = ("--rounds", "1", "--strategy.num_local_steps", "1", "--out", "run")
    cfg = parse(AlignmentConfig, ["--config", "own.yaml", *options])
    assert list(cfg.pairs) == ["helpful", "brief"]
    assert cfg.estimator.name == "dpo"
    splits = [own.split for own in cfg.pairs.values()]
    # of a file that may be sorted, four parts
    assert splits == ["[:]", "[0:250]+[375:625]+[750:1000]+[1125:1375]"]
    assert (cfg.rollout.max_prompt_tokens, cfg.rollout.max_new_tokens) == (16, 16)
    assert align(cfg)
    assert "could not be drawn" not in Path("run/report.html").read_text()
    main(InitConfig(POLICY, pairs=pairs, full=True, out=Path("full.yaml")))
    cfg = parse(AlignmentConfig, ["--config", "full.yaml"])
    assert [own.split for own in cfg.pairs.values()] == ["[:]", "[:]"]
    Path("mine.py").write_text("def right(completions):\n    return []\n")
    typo = ["--policy", POLICY, "--prompts", "b.jsonl", "--rewards", "{x: 'mine.py:rihgt'}"]
    told = refusal(cli, [*typo, "--out", "x.yaml"])
    assert "rewards.x: mine.py has no function 'rihgt'; did you mean 'right'?" in told
    both = ["--policy", POLICY, "--pairs", "{x: a.jsonl}", "--prompts", "b.jsonl"]
    both += ["--out", "x.yaml"]
    assert "pairs take the place of prompts and rewards" in refusal(cli, both)
    missing = ["--policy", POLICY, "--pairs", "{x: helpfl.jsonl}", "--out", "x.yaml"]
    assert "pairs.x: there is no file helpfl.jsonl (did you mean helpful.jsonl" in refusal(
        cli, missing
    )
    Path("bad.jsonl").write_text('{"prompt": "Q", "chosen": "yes"}\n')
    malformed = ["--policy", POLICY, "--pairs", "{x: bad.jsonl}", "--out", "x.yaml"]
    assert "pairs.x: bad.jsonl" in refusal(cli, malformed)
    assert not Path("x.yaml").exists()


def test_prompts_that_are_too_long_are_not_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Tell {n} " + "more " * 300 * (n % 5 == 0)} for n in range(180)]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for is_full in (False, True):
        out = tmp_path / f"{is_full}.yaml"
        main(InitConfig(POLICY, {"brief": "brevity"}, "p.jsonl", full=is_full, out=out))
        cfg = parse(AlignmentConfig, ["--config", str(out)])
        tokenizer = read_tokenizer(POLICY)
        splits = data_of(cfg).load(cfg, tokenizer, {}, measures=True, on_note=lambda _: None)
        count = cfg.num_clients
        told = f"{len(splits.train)} prompts for {count} clients, {len(splits.test)} held out"
        assert told in capsys.readouterr().out
        assert len(splits.train) < 180 * 0.9
        assert len(splits.train) >= count * MIN_SHARD["full" if is_full else "quick"]
        assert (count < 8) == is_full or count == 4


def test_held_out_prompts_of_their_own_and_data_sets(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my 😀 rewards.py").write_text(FILE)
    data.rename("a.jsonl")
    Path("b.jsonl.gz").write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    own = InitConfig("a/b", REWARDS, "a.jsonl", "b.jsonl.gz", out=tmp_path / "short.yaml")
    data = init(own).config.data  # a short run measures no validation prompts
    assert (data.test.source, data.test.split) == ("b.jsonl.gz", "[:]")
    assert data.validation.split is None
    own = replace(own, full=True, out=tmp_path / "own.yaml")
    data = init(own).config.data
    assert (data.train.source, data.train.split) == ("a.jsonl", "[:]")
    assert (data.validation.source, data.validation.split) == ("b.jsonl.gz", "[:50%]")
    assert (data.test.source, data.test.split) == ("b.jsonl.gz", "[50%:]")
    own = replace(own, prompts="trl-lib/tldr", test_prompts="", out=tmp_path / "hub.yaml")
    hub = init(own).config.data
    splits = [hub.train.split, hub.validation.split, hub.test.split]
    assert splits == ["train", "test[:50%]", "test[50%:]"]
    rewards = {"here": REWARDS["helpful"], "elsewhere": "a/reward"}
    formats = init(InitConfig("a/b", rewards, "trl-lib/tldr", out=tmp_path / "c.yaml")).config
    found = {name: own.format for name, own in formats.rewards.items()}
    assert found == {"here": "plain", "elsewhere": "chat_template"}  # the first has no template
    both = init(replace(own, test_prompts="a.jsonl", out=tmp_path / "both.yaml"))
    data = both.config.data
    assert [data.train.split, data.validation.split] == ["train", "[:50%]"]


def test_a_person_is_asked_for_what_is_missing(tmp_path, data):
    answers = {"policy": "a: b/c", "prompts": str(data), "rewards": "one: brevity, two: a/b"}
    asked = []

    def ask(question):
        asked.append(question.partition(":")[0])
        return answers[asked[-1]]

    cfg = init(InitConfig(out=tmp_path / "own.yaml"), ask).config
    assert asked == ["policy", "prompts", "rewards"]
    assert cfg.policy.path == "a: b/c"
    assert {name: reward.path or reward.name for name, reward in cfg.rewards.items()} == {
        "one": "brevity", "two": "a/b",
    }  # fmt: skip


def test_an_answer_that_names_no_rewards_is_shown(tmp_path, data):
    for answer in ("one: [", "brevity", "one: 2"):
        with pytest.raises(UserError, match=re.escape(f"a reward model each, got {answer!r}")):
            init(
                InitConfig("a/b", prompts=str(data), out=tmp_path / "own.yaml"),
                lambda _, answer=answer: answer,
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "policy is missing; pass --policy, or run this in a terminal"),
        (["--policy", "a", "--prompts", "b"], "rewards is missing"),
        (
            ["--policy", POLICY, "--prompts", "b", "--rewards", "{'not a name!': brevity}"],
            "rewards: th",
        ),
        (
            ["--policy", "./a", "--prompts", "b", "--rewards", "{x: brevity}"],
            "policy: there is no f",
        ),
        (["--policy", POLICY + "s", *GOOD], "checkpoints/policy?); correct it."),
        (
            ["--policy", POLICY, "--prompts", "promts.jsonl", "--rewards", "{x: brevity}"],
            "prompts.js",
        ),
        (
            [*MODEL, "--rewards", "{x: brevty}"],
            "rewards.x: there is no reward model 'brevty': did y",
        ),
        ([*MODEL, "--rewards", "{x: own.py:f}"], "rewards.x: there is no file own.py; correct it"),
        ([*MODEL, "--rewards", "{x: /no/such}"], "rewards.x: there is no folder /no/such; correct"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments, message, tmp_path, data, monkeypatch, refusal
):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "own.yaml"
    assert message in refusal(cli, [*arguments, "--out", out])
    assert not out.exists()


def test_a_model_that_cannot_be_read_keeps_the_defaults_and_says_why(tmp_path, data, capsys):
    own = {"rewards": {"brief": "brevity"}, "prompts": str(data)}
    main(InitConfig("some/model", **own, out=tmp_path / "own.yaml"))
    printed = capsys.readouterr().out
    assert "model    default settings; policy.path: there is no folder some/model, and" in printed


def test_known_reward_models_of_the_hub_have_their_format():
    assert likely_format("Ray2333/gpt2-large-helpful-reward_model") == "hh_pair"
    assert likely_format("OpenAssistant/reward-model-deberta-v3-large-v2") == "question_answer"
    assert likely_format("someone/reward") == "chat_template"


@pytest.mark.parametrize("name", ["nosuch", "models/nosuch"])
def test_a_policy_that_is_nowhere_is_refused(name, data, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    line = refusal(cli, ["--policy", name, *GOOD])
    assert f"error: policy: there is no folder {name}, and no such tokenizer" in line
    assert not Path("own.yaml").exists()


@pytest.mark.parametrize(
    ("cause", "is_refused"), [(RepositoryNotFoundError, True), (GatedRepoError, False)]
)
def test_a_policy_that_the_hub_lacks_is_refused_but_not_a_gated_one(
    cause, is_refused, data, tmp_path, monkeypatch
):
    def read(**options):
        response = httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co"))
        raise OSError("it is not here") from cause("no", response=response)

    monkeypatch.setattr("firm.alignment.policy.AutoTokenizer.from_pretrained", read)
    cfg = InitConfig("some/model", {"brief": "brevity"}, str(data), out=tmp_path / "own.yaml")
    with (
        pytest.raises(UserError, match="policy: there is no folder some/model")
        if is_refused
        else nullcontext()
    ):
        init(cfg)
    assert cfg.out.exists() is not is_refused


@pytest.mark.parametrize(
    ("num_rows", "test_rows", "message"),
    [
        (0, None, "prompts: prompts.jsonl has no rows; add prompts to it."),
        (4, None, "prompts: prompts.jsonl has too few rows to hold any out; add"),
        (0, 9, "prompts: prompts.jsonl has no rows; add prompts to it."),
        (9, 0, "test_prompts: test.jsonl has no rows; add"),
    ],
)
def test_a_file_without_prompts_for_a_use_is_refused(
    num_rows, test_rows, message, tmp_path, monkeypatch, refusal
):
    monkeypatch.chdir(tmp_path)
    row = '{"prompt": "Tell me more."}\n'
    Path("prompts.jsonl").write_text(row * num_rows)
    Path("test.jsonl").write_text(row * (test_rows or 0))
    held_out = [] if test_rows is None else ["--test_prompts", "test.jsonl"]
    assert message in refusal(cli, ["--policy", POLICY, *GOOD, *held_out])
    assert not Path("own.yaml").exists()


def test_a_fault_of_the_program_is_not_taken_for_a_model_that_cannot_be_read(
    tmp_path, data, monkeypatch
):
    def fails(config):
        raise ZeroDivisionError

    monkeypatch.setattr("firm.alignment.inspection.empty_model", fails)
    with pytest.raises(ZeroDivisionError):
        init(InitConfig(POLICY, {"brief": "brevity"}, str(data), out=tmp_path / "own.yaml"))


@pytest.mark.slow
def test_a_file_that_is_stopped_before_it_is_whole_does_not_stay(tmp_path, data, monkeypatch):
    def stops(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("firm.jobs.init.compose", stops)
    out = tmp_path / "own.yaml"
    with pytest.raises(KeyboardInterrupt):
        init(InitConfig(POLICY, {"brief": "brevity"}, str(data), out=out))
    assert not out.exists()


def test_a_file_that_is_there_stays(tmp_path, refusal):
    out = tmp_path / "own.yaml"
    out.write_text("mine")
    assert "already exists" in refusal(cli, ["--policy", "a", "--out", out])
    assert out.read_text() == "mine"


@pytest.mark.parametrize("answer", ["brevity", "a: [b]", "a: {b: c", ""])
def test_an_answer_that_names_no_rewards_is_refused(answer, tmp_path):
    cfg = InitConfig("a", {}, "b", out=tmp_path / "own.yaml")
    with pytest.raises(UserError, match="rewards"):
        init(cfg, lambda question: answer)
    assert not cfg.out.exists()


def test_a_policy_of_ones_own_with_the_rest_of_the_miniature_is_warned_of():
    plain = parse(AlignmentConfig, ["--config", str(ROOT / "configs/miniature.yaml")])
    assert alarms_at_start(plain) == []
    keys = ["--config", str(ROOT / "configs/miniature.yaml"), "--policy.path", "mine"]
    (alarm,) = alarms_at_start(parse(AlignmentConfig, keys))
    assert alarm.startswith("policy.path is your own, but data.train.source, data.validation.sourc")
    assert "rewards.helpful.path" in alarm
    keys = ["--config", str(SMOKE), "--data.train.source", "mine.jsonl"]
    alarms = alarms_at_start(parse(AlignmentConfig, keys))
    assert any(
        alarm.startswith("data.train.source is your own, but policy.path") for alarm in alarms
    )
    own = [(f"data.{split}.source", "mine") for split in ("train", "validation", "test")]
    own.append(("rewards", {"brief": {"name": "brevity"}}))  # the policy alone is the miniature's
    alarms = alarms_at_start(compose(AlignmentConfig, [SMOKE], own))
    assert not [alarm for alarm in alarms if "miniature" in alarm]


FAMILIES = ("llama_tied", "qwen2", "gemma3_text", "phi3", "opt", "bloom", "gpt2")
"""Families that differ in kind; the zoo has all."""


@pytest.mark.parametrize("name", FAMILIES)
def test_what_it_writes_fits_each_family_of_models(name, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = KINDS["ends"].tokenizer()
    special = {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id")}
    model = ARCHITECTURES[name].model({**special, "eos_token_id": tokenizer.eos_token_id})
    model.generation_config.eos_token_id = KINDS["ends"].ends(tokenizer)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    cli(["--policy", "./model", *GOOD[:2], "--rewards", "{brief: brevity, short: brevity}"])
    said = capsys.readouterr().out
    assert said.startswith("wrote own.yaml")
    context = getattr(model.config, "max_position_embeddings", None)
    assert f"{model.config.model_type}, {context or 'any length'}" in said
    ends = tokenizer.convert_ids_to_tokens(KINDS["ends"].ends(tokenizer))
    assert len(ends) > 1
    assert all(end in said.split("ends")[1].split("\n")[0] for end in ends)
    options = ("--rounds", "1", "--num_clients", "1", "--strategy.num_local_steps", "1")
    small = ("--estimator.num_epochs", "1", "--rollout.max_new_tokens", "4", "--out", "run")
    cfg = parse(AlignmentConfig, ["--config", "own.yaml", *options, *small])
    assert cfg.rollout.max_prompt_tokens + 4 <= (context or 512)
    align(replace(cfg, plan=True))
    planned = " ".join(capsys.readouterr().out.split())
    assert all(end in planned for end in ends)
    assert "messages in its chat template" in planned
    if name in ("gpt2", "qwen2"):
        assert align(cfg)
