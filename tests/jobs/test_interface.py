"""The interface for Python: objects and paths give the same runs, and objects come back whole."""

import copy
import csv
import html
import json
import math
from itertools import chain, combinations

import datasets
import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, RwkvConfig
from transformers.utils import logging

import firm
from firm.alignment.rewards import score
from firm.cli.main import COMMANDS
from firm.jobs.alignment_config import GIVEN
from firm.run import Run, UserError
from reward_models import RewardModelConfig
from tests.plugins import plugins_forgotten
from tests.runs import read_adapter, read_rows
from tests.smoke import POLICY, ROOT

align_cli = COMMANDS["align"].run

PROMPTS = [f"Tell me about number {index}." for index in range(60)]
SETTINGS = {
    "num_threads": 1,
    "rounds": 1,
    "num_clients": 2,
    "strategy.num_local_steps": 1,
    "estimator.batch_size": 4,
    "estimator.minibatch_size": 4,
    "estimator.num_epochs": 1,
    "rollout.max_new_tokens": 8,
    "policy.lora.r": 4,
    "evaluation.num_calibration_prompts": 16,
    "evaluation.num_samples": 1,
}


def brief(completions, **kwargs):
    return [-float(len(text)) for text in completions]


def vowels(prompts, completions):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


PEFT_WARNS = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
REWARDS = {"brief": brief, "vowels": vowels}


@pytest.fixture(scope="module")
def model():
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    model.train()
    model.lm_head.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def result(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("interface") / "run"
    return firm.align(model, REWARDS, PROMPTS, settings=SETTINGS, out=out)


def test_a_run_returns_rewards_adapter_table_and_page(result):
    table, logged = result.rewards, read_rows(result.path, "evaluation", split="test")
    for model, row in zip(("base", "aligned"), logged, strict=True):
        for name, reward in row["rewards"].items():
            assert table[name][model] == pytest.approx(reward["mean"])
            assert table[name][f"{model}_se"] == pytest.approx(reward["se"])
    assert list(table.columns) == list(REWARDS)
    assert list(table.loc["num_prompts"]) == [6, 6]
    changes = (table.loc["aligned"] - table.loc["base"]).to_dict()
    assert table.loc["change"].to_dict() == pytest.approx(changes, abs=1e-6)
    header, *lines, folder = repr(result).splitlines()
    assert header.split() == list(REWARDS)
    shown = {line.split()[0]: line.split()[1:] for line in lines}
    assert list(shown) == list(table.index)
    assert shown["base"] == [f"{table[name]['base']:.3f}" for name in REWARDS]
    assert shown["num_prompts"] == ["6", "6"]
    assert folder == str(result.path)
    assert read_adapter(result.path)
    data = yaml.safe_load((result.path / "config.yaml").read_text())["data"]
    assert {data[split]["source"] for split in ("train", "validation", "test")} == {GIVEN}
    assert set(result.to_pandas()["objective"]) >= set(REWARDS)
    frame = result.report()._repr_html_()
    assert html.unescape(frame).count("<!doctype html>") == 1


def test_a_model_comes_back_as_it_was_lent(result, model):
    lent = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    state = model.state_dict()
    assert state.keys() == lent.state_dict().keys()
    assert all(torch.equal(values, state[name]) for name, values in lent.state_dict().items())
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"lm_head.weight"} or model.config.tie_word_embeddings
    assert all(module.training for module in model.modules())
    assert not hasattr(model, "peft_config")


def test_a_model_comes_back_from_a_run_that_fails(model):
    def broken(completions, **kwargs):
        raise OSError("no judge")

    with pytest.raises(ValueError, match="'broken' raised OSError: no judge"):
        firm.align(model, {"broken": broken}, PROMPTS, settings=SETTINGS)
    assert not [name for name in model.state_dict() if "lora" in name]
    assert all(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's
def test_a_model_with_an_adapter_of_its_own_is_refused_and_keeps_it(model):
    own = copy.deepcopy(model)
    own.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    names = list(own.state_dict())
    with pytest.raises(UserError, match="model must have no adapter of its own"):
        firm.align(own, REWARDS, PROMPTS, settings=SETTINGS)
    wrapped = PeftModel(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="model must have no adapter of its own"):
        firm.align(wrapped, REWARDS, PROMPTS)
    with pytest.raises(UserError, match=r"model must be a folder, .* got Linear"):
        firm.align(torch.nn.Linear(1, 1), REWARDS, PROMPTS)
    assert list(own.state_dict()) == names


def test_objects_and_paths_give_the_same_adapter(result, model, tokenizer, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    given = {"settings": SETTINGS, "out": tmp_path / "objects"}
    objects = firm.align(model, REWARDS, rows, tokenizer=tokenizer, **given)
    given = {"settings": {**SETTINGS, "policy.dtype": "float32"}, "out": tmp_path / "paths"}
    paths = firm.align(POLICY, REWARDS, str(file), **given)
    expected = read_adapter(result.path)
    for run in (objects, paths):
        adapter = read_adapter(run.path)
        assert all(torch.equal(values, adapter[name]) for name, values in expected.items())


def evaluated(run, out, *arguments):
    """The rows of `firm evaluate`'s figures on a run, by model and figure."""
    COMMANDS["evaluate"].run(["--runs", f"[{run.path}]", "--out", str(out), *map(str, arguments)])
    with (out / "figures.csv").open() as file:
        return {(row["model"], row["figure"]): row for row in csv.DictReader(file)}


def test_a_run_of_objects_is_evaluated_on_its_own_prompts_by_the_rewards_that_have_names(
    model, tmp_path, capsys, monkeypatch
):
    rows = [{"prompt": prompt, "answer": len(prompt)} for prompt in PROMPTS]
    rewards = {"brief": brief, "short": "brevity"}
    run = firm.align(model, rewards, rows, settings=SETTINGS, out=tmp_path / "run")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    figures = evaluated(run, tmp_path / "first")
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "replies of up" not in line]
    assert note.startswith("note: brief: not scored, since these reward functions were passed")
    for column, name in (("mean", "aligned"), ("se", "aligned_se"), ("change", "change")):
        own = float(figures["run", "short in [0, 1]"][column])
        assert own == pytest.approx(run.rewards["short"][name], abs=1e-6)
    assert not [figure for _, figure in figures if figure.startswith("brief")]
    COMMANDS["export"].run(["--run", str(run.path), "--to", "peft", "--out", str(tmp_path / "own")])
    assert (tmp_path / "own/adapter_model.safetensors").exists()
    assert "note: brief" not in capsys.readouterr().err
    file = tmp_path / "again.py"
    file.write_text(
        "from reward_models import reward_model\n"
        "@reward_model('again')\n"
        "def again(completions, answer, **_):\n"
        "    return [float(number) for number in answer]\n"
    )
    with plugins_forgotten():
        given = ("--rewards.brief.name", "again", "--rewards.brief.file", file)
        figures = evaluated(run, tmp_path / "second", *given)
    assert "note" not in capsys.readouterr().err
    assert 24 <= float(figures["run", "brief"]["mean"]) <= 25


def test_a_run_that_keeps_no_texts_keeps_no_prompts_and_says_so(model, tmp_path, refusal):
    settings = {**SETTINGS, "evaluation.num_shown_samples": 0}
    run = firm.align(model, {"short": "brevity"}, PROMPTS, settings=settings, out=tmp_path / "run")
    assert not list(run.path.glob("*prompts*"))
    line = refusal(COMMANDS["evaluate"].run, ["--runs", f"[{run.path}]", "--out", tmp_path / "out"])
    assert "the run's test prompts were passed to firm.align as objects and were not saved" in line
    line = refusal(align_cli, ["--config", run.path / "config.yaml", "--out", tmp_path / "other"])
    assert "data.train.source: the prompts were passed to firm.align as objects; call it" in line
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert any("checkpoints" in path.parts for path in files)
    assert not [path for path in files if b"Tell me about" in path.read_bytes()]

    longer = {**settings, "rounds": 2}
    given = {"model": model, "rewards": {"short": "brevity"}, "prompts": PROMPTS}
    resumed = firm.align(**given, settings=longer, out=run.path, resume=True)
    whole = firm.align(**given, settings=longer, out=tmp_path / "whole")
    assert resumed.rewards.equals(whole.rewards)  # the base model's replies are sampled again


def test_prompts_that_are_given_by_name_are_named(model, tmp_path):
    file = tmp_path / "tests.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS[:8]))
    given = {"test_prompts": str(file), "settings": SETTINGS, "out": tmp_path / "run"}
    run = firm.align(model, {"short": "brevity"}, PROMPTS[8:], **given)
    assert Run(run.path).settings()["data"]["test"]["source"] == str(file)
    assert not list(run.path.glob("*prompts*"))
    figures = evaluated(run, tmp_path / "out")
    own = run.rewards["short"]["aligned"]
    assert float(figures["run", "short in [0, 1]"]["mean"]) == pytest.approx(own, abs=1e-6)


def test_a_model_that_reads_padding_is_refused_before_anything_is_sampled(tokenizer):
    config = RwkvConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config)
    settings = {**SETTINGS, "policy.lora.target_modules": None}
    with pytest.raises(ValueError, match="padding on the left has an effect although it is masked"):
        firm.align(model, REWARDS, PROMPTS, tokenizer=tokenizer, settings=settings)


@PEFT_WARNS
def test_an_adapter_loads_from_any_folder(result, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert AutoPeftModelForCausalLM.from_pretrained(result.adapter).peft_config
    own = AutoTokenizer.from_pretrained(result.adapter)
    assert own("A cat.")["input_ids"] == tokenizer("A cat.")["input_ids"]


def test_what_ships_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = "firm/miniature/checkpoints"
    given = {"settings": SETTINGS, "out": tmp_path / "run", "test_prompts": PROMPTS[:4]}
    run = firm.align(f"{shipped}/policy", REWARDS, f"{shipped}/prompts_validation.jsonl", **given)
    assert list(run.rewards) == list(REWARDS)


@PEFT_WARNS
def test_a_model_without_a_path_is_saved_beside_its_adapter(model, tokenizer, tmp_path):
    bare = AutoModelForCausalLM.from_config(model.config)
    bare.name_or_path = bare.config._name_or_path = ""
    with pytest.raises(
        UserError, match="tokenizer must be given, since the model does not know the path"
    ):
        firm.align(bare, REWARDS, PROMPTS, settings=SETTINGS)
    given = {"tokenizer": tokenizer, "settings": SETTINGS, "out": tmp_path / "run"}
    run = firm.align(bare, REWARDS, PROMPTS, **given)
    loaded = AutoPeftModelForCausalLM.from_pretrained(run.adapter)
    for name, values in bare.state_dict().items():
        base = loaded.get_base_model().state_dict()
        own = next(base[key] for key in base if key.replace(".base_layer", "") == name)
        assert torch.equal(values, own)


@PEFT_WARNS
def test_a_model_that_was_changed_after_loading_is_evaluated_as_it_was_given(
    model, tmp_path, monkeypatch
):
    changed = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    with torch.no_grad():
        changed.lm_head.weight.mul_(3)
    given = {"settings": SETTINGS, "out": tmp_path / "run"}
    run = firm.align(changed, {"short": "brevity"}, PROMPTS, **given)
    base = AutoPeftModelForCausalLM.from_pretrained(run.adapter).get_base_model()
    assert torch.equal(base.lm_head.weight, changed.lm_head.weight)
    monkeypatch.chdir(tmp_path)
    figures = evaluated(run, tmp_path / "evaluated")
    for name, column in (("base", "base"), ("run", "aligned")):
        own = float(figures[name, "short in [0, 1]"]["mean"])
        assert own == pytest.approx(run.rewards["short"][column], abs=1e-6)
    same = firm.align(model, REWARDS, PROMPTS, settings=SETTINGS, out=tmp_path / "same")
    assert not (same.path / "base").exists()


def test_prompts_that_are_held_out_are_not_trained_on(model, tmp_path):
    seen = []

    def noting(prompts, completions):
        seen.append(list(prompts))
        return [float(len(text)) for text in completions]

    out, tests = tmp_path / "run", ["Is this a test?", "Is that a test?", "Is it over?"]
    settings = {**SETTINGS, "evaluation.num_validation_prompts": 6, "data.hold_out": 0.25}
    given = {"settings": settings, "out": out}
    firm.align(model, {"long": noting}, PROMPTS[:24], test_prompts=tests, **given)
    sizes = [len(prompts) for prompts in seen]
    assert sizes == [16, 3, 6, 4, 4, 6, 3]  # calibration, base twice, clients, the model twice
    validation = set(seen[2])
    trained = set(chain(*seen[3:5], seen[0]))
    assert not trained & (validation | set(seen[1]))
    assert set(seen[1]) == set(tests)


def test_prompts_are_held_out_of_those_that_the_filters_leave(model, tmp_path, capsys):
    """As on the command line: otherwise long prompts would be measured and not trained on."""
    file = tmp_path / "prompts.jsonl"
    long = [f"{prompt} {'Again. ' * 40}" for prompt in PROMPTS]
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in [*PROMPTS, *long]))
    settings = {**SETTINGS, "data.hold_out": 0.25, "data.train.max_tokens": 30}
    run = firm.align(model, REWARDS, str(file), settings=settings, out=tmp_path / "run")
    assert "60 of 120 rows are dropped" in capsys.readouterr().err
    kept = [json.loads(line) for line in (run.path / "test_prompts.jsonl").read_text().splitlines()]
    assert 10 <= len(kept) <= 20
    assert {row["prompt"] for row in kept} <= set(PROMPTS)


def test_rows_that_share_a_prompt_stay_rows_on_one_side(model, tmp_path):
    seen = []

    def noting(prompts, completions, answer):
        seen.append(list(zip((" ".join(p.split()) for p in prompts), answer, strict=True)))
        return [float(len(text)) for text in completions]

    # every prompt has two rows, in which white space differs, and the last one has a third
    rows = [{"prompt": f"Say  it {n}.", "answer": f"{n} a"} for n in range(20)]
    rows += [{"prompt": f"Say it {n}.", "answer": f"{n} b"} for n in range(20)]
    rows += [{"prompt": "Say it 19.", "answer": "19 c"}]
    given = {"settings": {**SETTINGS, "evaluation.num_calibration_prompts": 60}}
    run = firm.align(model, {"long": noting}, rows, out=tmp_path / "run", **given)
    calibration, test, validation, *_ = seen
    assert sorted([*calibration, *test, *validation]) == sorted(
        (" ".join(row["prompt"].split()), row["answer"]) for row in rows
    )
    for one, other in combinations((calibration, test, validation), 2):
        assert not {prompt for prompt, _ in one} & {prompt for prompt, _ in other}
    assert len({prompt for prompt, _ in test}) == 2
    (logged,) = read_rows(run.path, "evaluation", split="test", round=0)
    assert (logged["num_prompts"], logged["num_rows"]) == (2, 4)
    assert list(run.rewards.loc["num_prompts"]) == [2]
    assert "2 test prompts in 4 rows" in run.page.read_text()


def test_prompts_that_are_trained_and_measured_on_are_told_everywhere(model, tmp_path, capsys):
    given = {"settings": SETTINGS, "out": tmp_path / "run"}
    tests = ["Is this a test?", PROMPTS[3], f" {PROMPTS[5]}  ", PROMPTS[7].replace(" ", "  ")]
    run = firm.align(model, REWARDS, PROMPTS, test_prompts=tests, **given)
    note = "3 of 4 test prompts are also in the training data (2 of them up to white space)"
    (header,) = read_rows(run.path, "run")
    assert [alarm for alarm in header["alarms"] if alarm.startswith(note)]
    assert note in " ".join(html.unescape(run.page.read_text()).split())
    assert note in " ".join(capsys.readouterr().out.split())


def test_splits_of_the_settings_hold_for_objects(model, tmp_path):
    seen = []

    def noting(prompts, completions):
        seen.append(set(prompts))
        return [float(len(text)) for text in completions]

    names = {"train": [f"a{i}" for i in range(40)], "test": [f"b{i}" for i in range(8)]}
    tables = {key: datasets.Dataset.from_dict({"prompt": own}) for key, own in names.items()}
    given = {
        "settings": {
            **SETTINGS,
            "data.train.split": "train[:50%]",
            "evaluation.num_calibration_prompts": 60,
        },
        "validation_prompts": [f"c{i}" for i in range(8)],
        "test_prompts": datasets.DatasetDict(tables),
        "out": tmp_path / "run",
    }
    firm.align(model, {"long": noting}, datasets.DatasetDict(tables), **given)
    calibration, test, validation, *_, last = seen
    assert calibration == set(names["train"][:20])
    assert test == last == set(names["test"][4:])
    assert validation == {f"c{i}" for i in range(8)}
    given["settings"]["data.test.split"] = "dev"
    with pytest.raises(ValueError, match=r"^test_prompts has no split 'dev', only 'train', 'test'"):
        firm.align(model, {"long": noting}, datasets.DatasetDict(tables), **given)


def test_rewards_are_functions_names_settings_and_paths(model, tmp_path):
    rewards = {
        "vowels": vowels,
        "positive": "positivity",
        "brief": {"name": "brevity", "options": {"half_words": 3}},
        "polite": RewardModelConfig(name="politeness", normalization="none"),
        "helpful": str(ROOT / "firm/miniature/checkpoints/helpful"),
    }
    settings = {**SETTINGS, "rewards.helpful.format": "plain"}
    run = firm.align(model, rewards, PROMPTS, settings=settings, out=tmp_path / "run")
    assert list(run.rewards) == list(rewards)
    assert math.isfinite(run.rewards.loc["aligned"].sum())


def test_settings_hold_for_functions_too(model, tmp_path, monkeypatch):
    def lengths(completions, unit=1):
        return {"long": [len(reply) / unit for reply in completions], "other": [0.0]}

    kept = []
    monkeypatch.setattr("firm.jobs.objects.run_alignment", lambda cfg, given: kept.append(given))
    settings = {
        **SETTINGS,
        "rewards.a.only_if": "vowels > 0.5",
        "rewards.a.options.unit": 2,
        "rewards.a.output": "long",
    }
    given = {"settings": settings, "out": tmp_path / "run"}
    firm.align(model, {"a": lengths, "vowels": vowels}, PROMPTS, **given)
    reward = kept[0].reward_fns["a"]
    assert score({"a": reward}, ["p"], ["four"]).tolist() == [[2.0]]
    assert reward.condition.name == "vowels"
    golden = [{"prompt": "p", "completion": "four", "score": 9.0}]
    with pytest.raises(ValueError, match=r"reward model of 'a': .*9"):
        firm.align(
            model,
            {"a": lengths, "vowels": vowels},
            PROMPTS,
            settings={**settings, "rewards.a.golden": golden},
            out=tmp_path / "run",
        )


@pytest.mark.parametrize(
    ("rewards", "prompts", "settings", "message"),
    [
        ({"a": 3}, PROMPTS, {}, "rewards: 'a' must be a function, a name, .* got int"),
        ({"a": lambda texts: []}, PROMPTS, {}, "'a' cannot be called with prompts, completions"),
        ({"a": "brevety"}, PROMPTS, {}, "no reward model 'brevety': did you mean 'brevity'"),
        (REWARDS, PROMPTS[:4], {}, "more than 4 distinct prompts, which are held out, got 4"),
        (REWARDS, [*PROMPTS, " "], {}, "prompts, row 61: no prompt in an empty text"),
        (REWARDS, PROMPTS, {"strategy.betta": 1}, "settings: .*betta.*did you mean.*beta"),
        ([brief], PROMPTS, {}, "rewards must be given by objective, .*got list"),
        (REWARDS, PROMPTS, {"rewards": {"x": {"name": "brevity"}}}, "beside the argument rewards"),
        (REWARDS, PROMPTS, {"plan": True}, "settings must not have plan"),
        (REWARDS, PROMPTS, {"data.test.source": "a.jsonl"}, "as the argument test_prompts"),
        (REWARDS, PROMPTS, {"data": {"train": {"source": "a"}}}, "as the argument prompts"),
        (REWARDS, {"prompt": PROMPTS}, {}, "prompts must be a list of texts or rows.* got dict"),
    ],
)
def test_bad_arguments_are_one_line(model, rewards, prompts, settings, message, tmp_path):
    given = {"settings": {**SETTINGS, **settings}, "out": tmp_path / "run"}
    with pytest.raises((UserError, ValueError), match=message) as caught:
        firm.align(model, rewards, prompts, **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_dtype_than_the_models_is_refused(model, tmp_path):
    for settings in ({"policy.dtype": "bfloat16"}, {"policy": {"dtype": "bfloat16"}}):
        with pytest.raises(UserError, match="which has float32, got bfloat16: leave it out"):
            firm.align(model, REWARDS, PROMPTS, settings=settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_and_tokenizers_of_other_kinds_are_one_line(model, tokenizer, tmp_path):
    double = copy.deepcopy(model).double()
    for given, own, message in (
        (double, tokenizer, "model must be float32, bfloat16 or float16, got torch.float64"),
        (AutoModel.from_pretrained(POLICY), tokenizer, "model must generate texts, got LlamaModel"),
        (model, str(POLICY), "tokenizer must be a loaded tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            firm.align(given, REWARDS, PROMPTS, tokenizer=own, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_a_program_has_set_changes_no_run_and_stays(result, model, tmp_path):
    logging.enable_progress_bar()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(num_threads := 3)  # the run takes one
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            run = firm.align(model, REWARDS, PROMPTS, settings=SETTINGS, out=tmp_path / "run")
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
    assert logging.is_progress_bar_enabled()
    adapter = read_adapter(run.path)
    assert all(torch.equal(own, adapter[n]) for n, own in read_adapter(result.path).items())
    assert run != result
    assert len({run, result}) == 2


def test_trl_s_own_rewards_and_chats_are_taken_as_they_are(model, tmp_path):
    from trl.rewards import get_soft_overlong_punishment, think_format_reward

    seen = []

    def right(prompts, completions, completion_ids, answer, **kwargs):
        seen.extend(zip(prompts, completions, completion_ids, answer, strict=True))
        return [float(len(reply[0]["content"])) for reply in completions]

    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"Say {n}.\n\nAssistant: No"},
            ],
            "answer": n,
        }
        for n in range(40)
    ]
    settings = {**SETTINGS, "rewards.think.normalization": "none"}  # nobody thinks here
    rewards = {
        "think": think_format_reward,
        "short": get_soft_overlong_punishment(max_completion_len=9, soft_punish_cache=8),
        "right": right,
    }
    run = firm.align(
        model, rewards, datasets.Dataset.from_list(rows), settings=settings, out=tmp_path
    )
    assert list(run.rewards) == ["think", "short", "right"]
    for prompt, (reply,), ids, answer in seen:
        assert prompt == rows[answer]["prompt"]
        assert reply.keys() == {"role", "content"}
        assert 1 <= len(ids) <= 8
    sample = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert [turn["role"] for turn in sample["messages"]] == ["system", "user"]
