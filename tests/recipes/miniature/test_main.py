import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from firm.run import parse, run_cli
from firm.run.errors import UserError
from recipes.miniature.__main__ import BuildConfig, earlier_report, load_corpus, main, other_corpus
from recipes.miniature.preferences import split_of
from tests.smoke import ROOT

TINY = {
    "num_texts": 60,
    "num_pairs": 20,
    "num_held_out": 10,
    "policy.num_steps": 3,
    "policy.hidden_size": 16,
    "policy.intermediate_size": 16,
    "policy.num_layers": 1,
    "policy.num_heads": 2,
    "policy.batch_size": 2,
    "encoder.num_steps": 3,
    "encoder.hidden_size": 16,
    "encoder.intermediate_size": 16,
    "encoder.num_layers": 1,
    "encoder.num_heads": 2,
    "encoder.batch_size": 2,
    "reward.num_epochs": 1,
}

REWARD_MODELS = ("helpful", "harmless", "helpful_other")


def command_line(out: Path, *arguments: str) -> list[str]:
    return [*(f"--{key}={value}" for key, value in TINY.items()), f"--out={out}", *arguments]


def build(out: Path, *arguments: str) -> dict:
    return main(parse(BuildConfig, command_line(out, *arguments)))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("build")
    return out, build(out)


def test_the_generated_world_becomes_checkpoints_prompts_and_figures(built):
    out, report = built
    policy = AutoModelForCausalLM.from_pretrained(out / "policy")
    assert policy.num_parameters() == report["policy"]["num_parameters"]
    for kind in REWARD_MODELS:
        scorer = AutoModelForSequenceClassification.from_pretrained(out / kind, num_labels=1)
        tokenizer = AutoTokenizer.from_pretrained(out / kind)
        scores = scorer(**tokenizer([" Yes.", " No, no."], padding=True, return_tensors="pt"))
        assert scores.logits.shape == (2, 1)
        figures = report["reward_models"][kind]
        for split in ("train", "validation", "test", "test_acts"):
            assert set(figures[split]) == {"model", "length", "bag_of_words"}
            assert figures[split]["model"]["num_pairs"] == (20 if split == "train" else 10)
    assert report["policy"]["tokens_seen"] == 3 * 2 * 128
    assert json.loads((out / "build.json").read_text()) == report
    for split, num in report["num_prompts"].items():
        lines = (out / f"prompts_{split}.jsonl").read_text().splitlines()
        assert len(lines) == num
        row = json.loads(lines[0])
        assert row["prompt"].startswith("\n\nHuman:")
        assert row["prompt"].endswith("\n\nAssistant:")
        assert row["kind"] in ("harmless", "dual", "risky")


def test_equal_seeds_build_equal_files(built, tmp_path):
    build(tmp_path)
    for name in ("policy", *REWARD_MODELS):
        assert same_files(tmp_path / name, built[0] / name)


def same_files(one: Path, other: Path) -> bool:
    files = ("model.safetensors", "tokenizer.json")
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.mark.parametrize("name", ["helpful", "helpful_other"])
def test_one_missing_checkpoint_is_built_alone_and_comes_out_as_with_the_others(
    built, tmp_path, name
):
    out, report = built
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / name)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    again = build(tmp_path, f"--only=[{name}]")
    assert same_files(tmp_path / name, out / name)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    for figures in ("policy", "reward_models", "num_prompts"):
        assert again[figures] == report[figures]


def test_the_other_reward_model_is_an_encoder_that_needs_no_policy(built, tmp_path):
    report = build(tmp_path, "--only=[helpful_other]")
    assert {path.name for path in tmp_path.iterdir()} == {"helpful_other", "build.json"}
    assert "policy" not in report
    assert same_files(tmp_path / "helpful_other", built[0] / "helpful_other")
    kinds = {
        name: AutoModelForSequenceClassification.from_pretrained(built[0] / name).config.model_type
        for name in ("helpful", "helpful_other")
    }
    assert kinds == {"helpful": "llama", "helpful_other": "electra"}


def test_the_other_reward_model_learns_from_texts_and_pairs_of_its_own():
    cfg = parse(BuildConfig, command_line(Path("nowhere")))
    corpus = load_corpus(cfg)
    texts, pairs = other_corpus(cfg, corpus)
    assert len(texts) == cfg.num_texts
    assert len(pairs["train"]) == cfg.num_pairs
    assert not set(pairs["train"]) & set(corpus.pairs["helpful"]["train"])
    assert not set(texts) & {*corpus.texts["train"], *corpus.texts["test"]}
    assert pairs["test"] == corpus.pairs["helpful"]["test"]


def write_preferences(path: Path, kind: str, *, held_out_reply: str = " yes") -> None:
    rows = []
    for i in range(60):
        prompt = f"\n\nHuman: {'secret ' * 40}{i}?\n\nAssistant:"
        chosen = " yes" if split_of(prompt) == "train" else held_out_reply
        replies = {"chosen": chosen * (i % 7 + 1), "rejected": " no" * (i % 5 + 1)}
        rows.append({"prompt": prompt, **replies, "kind": kind})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


RESPONSE = ("--reward.call_format=response", "--max_prompt_tokens=12")


def test_preference_files_give_one_reward_model_per_kind(tmp_path, capsys):
    files = [tmp_path / "brief.jsonl", tmp_path / "polite.jsonl"]
    for file in files:
        write_preferences(file, file.stem)
    out = tmp_path / "out"
    report = build(out, f"--preferences=[{files[0]}, {files[1]}]", *RESPONSE)
    assert set(report["reward_models"]) == {"brief", "polite"}
    assert sum(report["num_prompts"].values()) == 120
    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    for line in (out / "prompts_train.jsonl").read_text().splitlines():
        prompt = json.loads(line)["prompt"]
        assert len(tokenizer(prompt, add_special_tokens=False).input_ids) <= 12
    printed = capsys.readouterr().out
    assert "polite, test" in printed
    assert "secret" not in printed


def test_no_checkpoint_depends_on_held_out_rows(tmp_path):
    for name, reply in (("one", " yes"), ("other", " perhaps")):
        write_preferences(tmp_path / f"{name}.jsonl", "brief", held_out_reply=reply)
        build(tmp_path / name, f"--preferences=[{tmp_path / name}.jsonl]", *RESPONSE)
    for folder in ("policy", "brief"):
        for file in ("model.safetensors", "tokenizer.json"):
            one, other = (tmp_path / name / folder / file for name in ("one", "other"))
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preferences", "[nowhere.jsonl]"], "preference file not found: nowhere.jsonl"),
        (["--preferences", "[{bad}]"], "bad.jsonl, line 1: field 'rejected' is missing"),
        (["--preferences", "[{policy}]"], "kind 'policy'"),
        (["--max_prompt_tokens", "126"], "reward.max_length must be at least 129"),
        (
            ["--only", "[harmful]"],
            "only must name some of policy, helpful, harmless, helpful_other",
        ),
        (["--only", "[helpful]"], "'helpful' starts from the policy, and"),
        (["--polcy.num_steps", "3"], "did you mean policy"),
    ],
)
def test_bad_input_ends_in_code_2_and_one_line_and_leaves_nothing_behind(
    tmp_path, refusal, arguments, message
):
    row = {"prompt": "p", "chosen": "c", "kind": "k"}
    (tmp_path / "bad.jsonl").write_text(json.dumps(row))
    rows = [{**row, "prompt": f"{i}", "rejected": "r", "kind": "policy"} for i in range(50)]
    (tmp_path / "policy.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    places = {name: tmp_path / f"{name}.jsonl" for name in ("bad", "policy")}
    arguments = [argument.format(**places) for argument in arguments]
    assert message in refusal(
        run_cli, main, BuildConfig, command_line(tmp_path / "out", *arguments)
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--num_texts=-1", "num_texts must be at least 1, got -1"),
        ("--num_pairs=0", "num_pairs must be at least 1, got 0"),
        ("--num_held_out=0", "num_held_out must be at least 1, got 0"),
        ("--max_prompt_tokens=0", "max_prompt_tokens must be at least 1, got 0"),
        ("--noise=.nan", "noise must be a finite number, got nan"),
    ],
)
def test_counts_that_build_nothing_are_refused(tmp_path, argument, message):
    with pytest.raises(UserError, match=message):
        parse(BuildConfig, command_line(tmp_path, argument))


def test_an_earlier_report_that_is_damaged_is_named(tmp_path):
    (tmp_path / "build.json").write_text("")
    cfg = parse(BuildConfig, command_line(tmp_path, "--only=[policy]"))
    with pytest.raises(UserError, match=r"build\.json is empty; remove it, or build everything"):
        earlier_report(cfg)


def test_the_configuration_for_human_preferences_is_valid(tmp_path):
    config = ["--config", str(ROOT / "recipes/miniature/hh.yaml"), "--out", str(tmp_path)]
    assert parse(BuildConfig, config).policy.num_layers == 4
