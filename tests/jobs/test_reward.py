"""A reward model is trained on pairs, reported on held-out ones, and read back as it was."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from firm.base.devices import fast_dtype
from firm.jobs import init, objects
from firm.jobs import reward as module
from firm.jobs.reward import TrainedReward, train_reward
from firm.jobs.sources import trained_settings
from firm.run.config import compose
from firm.run.errors import UserError
from reward_models import RewardModelConfig, load_reward_model, load_reward_models, training
from reward_models.training_config import RewardConfig
from tests.plugins import plugins_forgotten
from tests.tokens import byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A random language model whose template ends in its end token, which also pads."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=259, num_attention_heads=2, eos_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(pad_token="</s>", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Sixty questions, answered politely in the chosen replies."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"prompt": f"Question {n}?", "chosen": f"Yes {n % 7}, please", "rejected": f"No {n % 5}!!"}
        for n in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(base: Path, pairs: Path, out: Path, **options: object) -> RewardConfig:
    options = {"learning_rate": 0.02, "num_epochs": 3, "num_threads": 1, **options}
    return RewardConfig(base=str(base), pairs=str(pairs), out=out, **options)  # type: ignore[arg-type]


def test_attention_is_prepared_on_the_models_device(base, pairs, tmp_path, monkeypatch) -> None:
    prepared: list[torch.device] = []
    monkeypatch.setattr(training, "prepare_attention", prepared.append)
    training.new_reward(config(base, pairs, tmp_path))
    assert prepared == [torch.device("cpu")]


@pytest.fixture(scope="module")
def trained(base, pairs, tmp_path_factory) -> TrainedReward:
    out = tmp_path_factory.mktemp("trained") / "polite"
    return train_reward(config(base, pairs, out, name="polite", others={"brief": "brevity"}))


def test_the_model_learns_what_people_chose(trained) -> None:
    verdicts = trained.report.verdicts["polite"]
    assert verdicts.accuracy.num == 12
    assert verdicts.accuracy.value == 1
    assert trained.report.losses[0] > 0.4 > trained.report.losses[-1]
    assert trained.report.num_training == 48
    # the shorter reply was never chosen
    assert trained.report.verdicts["brief"].accuracy.value == 0
    assert trained.report.agreement["polite, brief"].value == 0


def test_the_written_settings_load_the_model_that_was_reported(trained) -> None:
    (text,) = yaml.safe_load((trained.path / "reward.yaml").read_text())["rewards"].values()
    settings = compose(RewardModelConfig, [], list(text.items()))
    assert [golden.score for golden in settings.golden] != [None, None]
    assert settings.dtype == fast_dtype()  # that of the golden scores
    reward = load_reward_model(settings, "polite")  # checks the golden scores
    prompts, replies = ["Question 3?"] * 2, ["Yes 3, please", "No 3!!"]
    chosen, rejected = reward(prompts=prompts, completions=replies)
    assert chosen > rejected
    wrong = RewardModelConfig(path=settings.path, format="plain", golden=settings.golden)
    with pytest.raises(ValueError, match="golden scores are off"):
        load_reward_model(wrong, "polite")


def test_other_models_are_compared_before_the_training(base, tmp_path, monkeypatch) -> None:
    """As in a run: with chats as messages, columns by name, and coroutines awaited."""
    file = tmp_path / "own.py"
    file.write_text(
        "async def right(completions, answer):\n"
        "    texts = [reply[0]['content'] for reply in completions]\n"
        "    return [float(text == own) for text, own in zip(texts, answer, strict=True)]\n"
    )
    pairs = tmp_path / "pairs.jsonl"
    asked = [[{"role": "user", "content": f"Why {n}?"}] for n in range(60)]
    own = {"answer": "Yes", "chosen": "Yes", "rejected": "No"}
    rows = [{"prompt": prompt, **own} for prompt in asked]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(training, "fit", lambda *_: 1 / 0)
    others = {"right": f"{file}:right"}
    with plugins_forgotten():
        with pytest.raises(ZeroDivisionError):  # once all is ready
            train_reward(config(base, pairs, tmp_path / "out", others=others))
        file.write_text("def wrong(completions):\n    return None\n")
        with pytest.raises(UserError, match="wrong"):
            train_reward(config(base, pairs, tmp_path / "out", others={"wrong": f"{file}:wrong"}))


def test_training_reads_the_tokens_and_the_place_that_scoring_reads(
    base, pairs, tmp_path, monkeypatch
) -> None:
    """TRL's first loss equals that of the scores before training; the pad token ends each text."""
    kept = []
    fit = training.fit

    def first_scores(reward, ranked, cfg):
        rows = ranked[: cfg.batch_size]
        kept.append(torch.tensor(training.score_differences(reward, ranked)))
        assert len(rows) == len(ranked)
        return fit(reward, ranked, cfg)

    monkeypatch.setattr(training, "fit", first_scores)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(pairs.read_text().splitlines(keepends=True)[:20]))
    cfg = config(base, few, tmp_path / "out", batch_size=16, num_epochs=1, dtype="float32")
    losses = train_reward(cfg).report.losses
    (differences,) = kept
    expected = torch.nn.functional.softplus(-differences).mean().item()
    assert losses == [pytest.approx(expected, rel=1e-4)]


def test_adapters_of_one_base_share_its_weights(trained, base, pairs, tmp_path) -> None:
    other = train_reward(config(base, pairs, tmp_path / "other", seed=1, num_epochs=1))
    alone = [
        load_reward_model(settings, "one")(prompts=["Why?"], completions=["Yes."])
        for settings in (trained.settings, other.settings)
    ]
    both = load_reward_models({"a": trained.settings, "b": other.settings})
    weights = [each.model.model.embed_tokens.weight.data_ptr() for each in both.values()]
    assert weights[0] == weights[1]
    for _ in range(2):  # in turns
        for reward, expected in zip(both.values(), alone, strict=True):
            assert reward(prompts=["Why?"], completions=["Yes."]) == pytest.approx(expected)
    assert alone[0] != pytest.approx(alone[1])


def test_another_reward_model_is_scored_as_it_was_trained(base, tmp_path):
    trained = {"format": "plain", "append_eos": True, "max_length": 99, "dtype": "float32"}
    written = {"rewards": {"old": {"path": "moved", **trained, "file": "own.py"}}}
    (tmp_path / "old").mkdir()
    (tmp_path / "old/reward.yaml").write_text(json.dumps(written))
    found = trained_settings(str(tmp_path / "old"))
    assert found == {**trained, "path": str(tmp_path / "old")}  # and no file of code
    assert module._settings_of(str(tmp_path / "old")) == RewardModelConfig(**found)
    (line,) = init._rewards({"mine": str(tmp_path / "old")})
    assert "append_eos: true, max_length: 99" in line
    assert objects._reward_settings("mine", str(tmp_path / "old")) == found
    for malformed in ("[1]", "rewards: {a: 1}", "rewards: {}", "{"):
        (tmp_path / "old/reward.yaml").write_text(malformed)
        with pytest.raises(UserError, match="does not have the settings of a trained reward"):
            trained_settings(str(tmp_path / "old"))
    assert module._settings_of(str(base)).format == init.likely_format(str(base))
    assert trained_settings("brevity") == {"name": "brevity"}


def test_held_out_pairs_share_no_prompt_with_training(base, pairs, tmp_path, monkeypatch) -> None:
    twice = tmp_path / "twice.jsonl"
    again = pairs.read_text().replace("please", "thank you").replace("Question ", "Question  ")
    twice.write_text(pairs.read_text() + again)
    sides = []
    split = training.split_pairs
    monkeypatch.setattr(training, "split_pairs", lambda *a: sides.append(split(*a)) or sides[0])
    train_reward(config(base, twice, tmp_path / "out", num_epochs=1))
    ranked, held_out = ({" ".join(p.prompt.text.split()) for p in side} for side in sides[0])
    assert not ranked & held_out
    assert [len(side) for side in sides[0]] == [96, 24]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": "missing.jsonl"}, "pairs: there is no file missing.jsonl"),
        ({"base": "./missing"}, "base: there is no folder ./missing"),
        ({"base": "nowhere/x"}, "^base: there is no folder nowhere/x, and no such tokenizer"),
        ({"others": {"kind": "polliteness"}}, "others.kind: there is no reward model"),
        ({"held_out": 0.01}, "held_out 0.01 of 60 prompts leaves too few pairs on one side"),
        ({"rank": 100_000}, "rank must be at most the hidden size of .*, got 100000"),
        ({"ranked_by": "nope"}, "has no field `nope` with the index"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_line(
    options, message, base, pairs, tmp_path
) -> None:
    places = {"base": str(base), "pairs": str(pairs), "out": tmp_path / "out", **options}
    with pytest.raises(UserError, match=message):
        train_reward(RewardConfig(**places))
    assert not (tmp_path / "out").exists()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name: the name of an objective must be .*, got ''"),
        ({"name": "../x"}, r"begin with a letter or a digit, got '\.\./x'"),
        ({"name": "a\nb"}, "must be at most 64 letters, digits"),
        ({"max_length": 1}, "max_length must be at least 4, got 1"),
    ],
)
def test_settings_that_make_no_reward_model_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(**{"base": "base", "pairs": "pairs.jsonl", **options})


def test_an_adapter_without_its_base_is_named(trained, base, tmp_path) -> None:
    folder = tmp_path / "moved"
    folder.mkdir()
    for file in trained.path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "gone")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="keep its base model where it was"):
        load_reward_model(RewardModelConfig(path=str(folder), format="chat_template"), "r")


def test_an_adapter_needs_the_tokenizer_that_it_was_trained_with(trained, tmp_path) -> None:
    settings = RewardModelConfig(path=str(tmp_path / "other"), format="chat_template")
    shutil.copytree(trained.path, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(trained.path)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"'r': the tokenizer of .* has ids up to"):
        load_reward_model(settings, "r")
    for file in (tmp_path / "other").glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"'r': no sequence classifier .*other"):
        load_reward_model(settings, "r")


def test_an_adapter_that_is_a_pickle_is_refused(trained, tmp_path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    for file in trained.path.iterdir():
        name = "adapter_model.bin" if file.name == "adapter_model.safetensors" else file.name
        (folder / name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"it has no adapter_model.safetensors"):
        load_reward_model(RewardModelConfig(path=str(folder), format="chat_template"), "r")


def test_the_report_is_strict_json_where_nothing_is_known(base, tmp_path, monkeypatch) -> None:
    """Of replies of one length, how often the longer one is chosen is unknown."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Question {n}?", "chosen": "Yes", "rejected": "No!"} for n in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = train_reward(config(base, path, Path("out"), num_epochs=1))
    assert done.settings.path == str(tmp_path / "out")  # for commands in any folder

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = (done.path / "report.json").read_text()
    data = json.loads(text, parse_constant=refuse)
    assert data["verdicts"]["reward"]["longer_chosen"]["value"] is None


def test_a_prompt_that_both_replies_begin_with_is_not_cut_off_them(
    base, tmp_path, monkeypatch
) -> None:
    rows = [{"prompt": "Yes", "chosen": f"Yesterday {n}", "rejected": f"Yes {n}"} for n in range(3)]
    rows += [{"prompt": f"{n}", "chosen": f"{n}5", "rejected": f"{n}"} for n in range(9)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []

    class Stop(Exception):
        pass

    def fit(reward, pairs, cfg):
        seen.extend(pairs)
        raise Stop

    monkeypatch.setattr(training, "fit", fit)
    with pytest.raises(Stop):
        train_reward(config(base, path, tmp_path / "out"))
    assert seen
    for pair in seen:
        assert all(reply.startswith(str(pair.prompt.text)) for reply in pair.replies)


def test_pairs_that_are_equal_after_truncation_are_dropped_or_refused(
    base, tmp_path, capsys
) -> None:
    ends = ["same", "same", "other"]
    rows = [
        {"prompt": f"{n}?", "chosen": f"Yes, a {ends[n % 3]} end", "rejected": "No, a same end"}
        for n in range(30)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_reward(config(base, path, tmp_path / "out", max_length=10, num_epochs=1))
    told = capsys.readouterr()
    assert "training pairs are dropped, since their replies are equal" in told.out + told.err
    assert "note: training has only 1 step, after which a model may" in told.err
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if "other" not in row["chosen"]))
    with pytest.raises(UserError, match="are equal in the last 4 tokens; raise max_length"):
        train_reward(config(base, path, tmp_path / "other", max_length=4, num_epochs=1))


def test_replies_with_calls_are_refused_by_file_and_line(base, tmp_path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {
        "prompt": [{"role": "user", "content": "a"}],
        "chosen": [{"role": "assistant", "content": "b", "tool_calls": [call]}],
        "rejected": [{"role": "assistant", "content": "c"}],
    }
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"pairs.jsonl, line 1: a reply has `tool_calls`"):
        train_reward(config(base, path, tmp_path / "out"))
