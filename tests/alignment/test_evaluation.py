import json
import math
import random
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from firm.alignment.adapter_files import check_settings, load_adapters, select_adapter
from firm.alignment.adapters.lora import LoraSettings
from firm.alignment.calibration import Calibration
from firm.alignment.evaluation import (
    Evaluation,
    Replies,
    distinct,
    evaluate,
    mean_and_error,
    sample_replies,
)
from firm.alignment.policy import load_policy, without_needless_warnings
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import Prompt, PromptFormat, prompt_of
from firm.alignment.rollout_config import RolloutConfig
from firm.base.randomness import RandomStream

PROMPTS = [prompt_of(f"\n\nHuman: Question {index}\n\nAssistant:") for index in range(6)]
CALIBRATIONS = {"words": Calibration("minmax", low=0.0, high=10.0)}


def num_words(completions, **kwargs):
    return [float(len(text.split())) for text in completions]


def matches(prompts, completions, **kwargs):
    """Whether a reply carries the number of its prompt."""
    return [float(p.split()[2] == c.split()[0]) for p, c in zip(prompts, completions, strict=True)]


def policy(extra_words=0):
    """A policy whose replies name their prompt and then talk for a random while."""

    def generate(asked, on_progress):
        prompts = [prompt.text for prompt in asked]
        on_progress(len(asked) / 2)
        words = [random.randint(0, 3) + extra_words for _ in prompts]
        return Replies(
            completions=[
                " ".join(["", prompt.split()[2], *["word"] * num])
                for prompt, num in zip(prompts, words, strict=True)
            ],
            kl=torch.tensor(words) / 10,
            num_tokens=torch.tensor(words) + 1,
            ended=torch.tensor(words) < 3,
            completion_ids=[[1]] * len(prompts),
            has_template=[False] * len(prompts),
        )

    return generate


def run(generate, **options):
    defaults = {
        "calibrations": CALIBRATIONS,
        "stream": RandomStream(0, "evaluation"),
        "extra_fns": {"match": matches},
        "num_samples": 3,
    }
    reward_fns = options.pop("reward_fns", {"words": num_words})
    return evaluate(generate, PROMPTS, reward_fns, **(defaults | options))


def test_figures_equal_a_hand_computation():
    counts = iter([1, 3, 2, 6])  # two prompts with two replies each

    def generate(asked, on_progress):
        prompts = [prompt.text for prompt in asked]
        on_progress(len(asked) / 2)
        words = [next(counts) for _ in prompts]
        return Replies(
            [" ".join("ab"[i % 2] for i in range(n)) for n in words],
            kl=torch.tensor(words) * 0.5,
            num_tokens=torch.tensor(words),
            ended=torch.tensor([n < 6 for n in words]),
            completion_ids=[[1]] * len(prompts),
            has_template=[False] * len(prompts),
        )

    evaluation = evaluate(
        generate,
        PROMPTS[:2],
        {"words": num_words},
        calibrations=CALIBRATIONS,
        stream=RandomStream(0),
        num_samples=2,
        batch_size=3,
    )
    row = evaluation.row(round=0, split="test")
    # prompts' means 2 and 4: mean 3, standard deviation sqrt(2), error sqrt(2) / sqrt(2)
    assert row == {
        "kind": "evaluation",
        "round": 0,
        "split": "test",
        "num_prompts": 2,
        "num_rows": 2,
        "num_samples": 2,
        "scores": {"words": {"mean": 3.0, "se": pytest.approx(1.0), "num_prompts": 2}},
        "rewards": {
            "words": {"mean": pytest.approx(0.3), "se": pytest.approx(0.1), "num_prompts": 2}
        },
        "kl": 1.5,
        "kl_se": pytest.approx(0.5),
        "length": 3.0,
        "distinct_1": 2 / 12,
        "distinct_2": 2 / 8,
        "end_share": 0.75,
        "commonest_share": 0.5,
        "empty_share": 0.0,
    }


def test_replies_stay_with_their_prompts_whatever_the_batch_size():
    by_size = [run(policy(), batch_size=size) for size in (1, 4, 64)]
    for evaluation in by_size:
        assert torch.equal(evaluation.scores["match"], torch.ones(6))
        assert torch.equal(evaluation.scores["words"], by_size[0].scores["words"])
        assert evaluation.samples == by_size[0].samples
        for sample in evaluation.samples:
            assert sample["completion"].split()[0] == sample["prompt"].split()[2]
            assert sample["scores"]["words"] == len(sample["completion"].split())
            assert sample["completion"].startswith(" ")  # as the reward models have seen it


def test_equal_streams_give_equal_evaluations_and_the_outer_generator_is_left_alone():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    first, second = run(policy()), run(policy())
    assert random.random() == expected
    assert first.samples == second.samples
    assert first.samples != run(policy(), stream=RandomStream(1, "evaluation")).samples


def test_the_change_is_paired_by_row():
    base, final = run(policy()), run(policy(extra_words=2))
    change = final.row(base, round=3, split="validation")["change"]
    assert change["words"]["mean"] == pytest.approx(2.0)
    assert change["words"]["se"] == pytest.approx(0.0, abs=1e-6)
    assert change["match"] == {"mean": 0.0, "se": 0.0, "num_prompts": 6}
    unpaired = mean_and_error(base.scores["words"])[1]
    assert unpaired > 0.1


def test_evaluations_of_other_prompts_or_scores_cannot_be_paired():
    base = run(policy())
    reordered = Evaluation(**{**asdict(base), "samples": base.samples[::-1]})
    renamed = run(policy(), extra_fns={"other": matches})
    for other in (reordered, renamed):
        with pytest.raises(ValueError, match="evaluate both policies on the same prompts"):
            base.row(other, round=1, split="test")


def test_the_table_sets_base_and_final_side_by_side():
    base, final = run(policy()), run(policy(extra_words=2), stream=RandomStream(1))
    table = {row.name: row for row in final.comparison(base)}
    figures = ["kl", "length", "end_share", "distinct_1", "distinct_2"]
    assert list(table) == ["words", "match", *figures]
    kl = table["kl"]
    assert (kl.base, kl.base_se) == pytest.approx(mean_and_error(base.kl))
    assert (kl.aligned, kl.aligned_se) == pytest.approx(mean_and_error(final.kl))
    assert (kl.change, kl.change_se) == pytest.approx(mean_and_error(final.kl - base.kl))
    assert kl.z == pytest.approx(kl.change / kl.change_se)
    assert table["match"].z is None
    assert table["distinct_1"].change_se is None


def test_rewards_in_0_to_1_follow_the_scores_when_asked_for():
    base, final = run(policy()), run(policy(extra_words=2))
    plain, table = final.comparison(base), final.comparison(base, rewards=["words"])
    assert [row.name for row in table][:3] == ["words", "match", "words in [0, 1]"]
    assert [row for row in table if row.name != "words in [0, 1]"] == plain
    reward, raw = table[2], table[0]
    assert (reward.base, reward.aligned) == pytest.approx((raw.base / 10, raw.aligned / 10))
    assert reward.change == pytest.approx(0.2)


def test_a_policy_can_be_measured_without_any_score():
    evaluation = run(policy(), calibrations={}, extra_fns={}, reward_fns={})
    assert evaluation.scores == evaluation.rewards == {}
    assert evaluation.num_prompts == 6
    assert evaluation.comparison(evaluation)[0].name == "kl"


def test_figures_are_of_the_replies_that_have_a_score():
    counts = iter([1, 3, 2, 6, 4, 4, 8, 2])  # four prompts with two replies each

    def generate(asked, on_progress):
        prompts = [prompt.text for prompt in asked]
        on_progress(len(asked) / 2)
        words = torch.tensor([next(counts) for _ in prompts])
        texts = ["w " * n for n in words]
        return Replies(texts, words / 2, words, words < 3, [[1]] * len(words), [False] * len(words))

    def few(completions, **kwargs):
        return [n if n < 4 else None for n in num_words(completions)]

    evaluation = evaluate(
        generate,
        PROMPTS[:4],
        {"few": few},
        calibrations={"few": Calibration("minmax", low=0.0, high=10.0)},
        stream=RandomStream(0),
        num_samples=2,
    )
    # prompts' means 2, 2, none, 2: the fourth prompt's first reply has no score
    assert evaluation.scores["few"].nan_to_num(nan=-1).tolist() == [2, 2, -1, 2]
    assert [sample["scores"]["few"] for sample in evaluation.samples] == [1, 2, None, None]
    row = evaluation.row(round=0, split="test")
    assert row["scores"] == {"few": {"mean": 2.0, "se": 0.0, "num_prompts": 3}}
    assert row["rewards"] == {"few": {"mean": pytest.approx(0.2), "se": 0.0, "num_prompts": 3}}
    assert row["kl"] == pytest.approx(30 / 8 / 2)
    assert row["num_prompts"] == 4
    json.dumps([row, *evaluation.samples], allow_nan=False)


def test_the_change_is_that_of_prompts_on_which_both_have_a_score():
    nan = math.nan

    def having(scores):
        values = {"words": torch.tensor(scores)}
        return replace(run(policy(), extra_fns={}), scores=values, rewards=values)

    base, final = having([1.0, 2, nan, 5, 6, nan]), having([2.0, nan, 3, 5, 8, nan])
    change = final.row(base, round=1, split="test")["change"]["words"]
    assert change == {"mean": 1.0, "se": pytest.approx(1 / 3**0.5), "num_prompts": 3}  # 1, 0, 2
    scores, line = final.comparison(base, rewards=["words"])[:2]
    assert scores.cells()[0] == "words, 3 prompts"
    assert (line.base, line.aligned, line.change) == (3.5, 4.5, 1.0)
    with pytest.raises(ValueError, match=r"^1 of 6 .* a score of 'words' of both policies, and"):
        having([nan, nan, 3.0, 5, nan, nan]).change(base)


@pytest.mark.parametrize("count", [0, 1])
def test_a_score_that_fewer_than_two_prompts_have_is_refused(count):
    def of_few(prompts, completions, **kwargs):
        return [1.0 if int(prompt.split()[2]) < count else None for prompt in prompts]

    for option in ("reward_fns", "extra_fns"):
        calibrations = {"maths": Calibration("none"), **CALIBRATIONS}
        with pytest.raises(ValueError, match=f"^{count} of 6 .* a score of 'maths', and a stand"):
            run(policy(), calibrations=calibrations, **{option: {"maths": of_few}})


def test_rows_that_share_a_prompt_are_rows_and_one_cluster():
    shared = [replace(PROMPTS[0], columns={"answer": index}) for index in range(3)]
    rows = [*shared, *PROMPTS[1:3]]

    def right(prompts, completions, answer, **kwargs):
        return [{None: 9.0, 0: 1.0, 1: 2.0, 2: 6.0}[each] for each in answer]

    evaluation = evaluate(
        policy(),
        rows,
        {"right": right},
        calibrations={"right": Calibration("none")},
        stream=RandomStream(0),
        num_samples=2,
    )
    assert (evaluation.num_rows, evaluation.num_prompts) == (5, 3)
    assert evaluation.scores["right"].tolist() == [1, 2, 6, 9, 9]
    assert evaluation.prompt_of_row.tolist() == [0, 0, 0, 1, 2]
    row = evaluation.row(round=0, split="test")
    assert (row["num_prompts"], row["num_rows"]) == (3, 5)
    # mean 27 / 5 = 5.4; residuals by prompt 9 - 16.2, 3.6, 3.6: sqrt(3 / 2 * 77.76) / 5
    expected = {"mean": pytest.approx(5.4), "se": pytest.approx(116.64**0.5 / 5), "num_prompts": 3}
    assert row["scores"]["right"] == expected
    table = {line.name: line for line in evaluation.comparison(evaluation)}
    assert table["right"].aligned_se == pytest.approx(116.64**0.5 / 5)
    assert (table["right"].num_prompts, table["distinct_1"].num_prompts) == (3, 3)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), times=st.integers(2, 5))
def test_rows_that_are_repeated_add_no_certainty(values, times):
    once = torch.tensor(values, dtype=torch.float64)
    expected = mean_and_error(once)
    assert expected[1] == pytest.approx(once.std().item() / len(values) ** 0.5, rel=1e-9, abs=1e-9)
    groups = torch.arange(len(values)).repeat(times)
    repeated = mean_and_error(once.repeat(times), groups)
    assert repeated == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_standard_errors_of_dependent_rows_cover_as_often_as_they_say():
    torch.manual_seed(0)
    groups = torch.arange(60).repeat_interleave(4)
    hits = {"clustered": 0, "naive": 0}
    for _ in range(400):
        values = torch.randn(60).repeat_interleave(4) + 0.5 * torch.randn(240)
        for name, (mean, error) in {
            "clustered": mean_and_error(values, groups),
            "naive": mean_and_error(values),
        }.items():
            hits[name] += abs(mean) <= 2 * error
    assert hits["clustered"] / 400 == pytest.approx(0.95, abs=0.033)  # 3 standard errors
    assert hits["naive"] / 400 < 0.8


def test_rows_can_be_written_to_disk():
    base = run(policy())
    rows = [base.row(base, round=1, split="test"), *base.samples[:2]]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert [row["prompt"] for row in rows[1:]] == [prompt.text for prompt in PROMPTS[:2]]
    assert rows[1].keys() == {"prompt", "messages", "completion", "scores"}
    assert rows[1]["messages"] == [{"role": "user", "content": "Question 0"}]
    assert rows[1]["scores"].keys() == {"words", "match"}


def test_no_text_means_no_distinct_words():
    assert distinct(["", "one"], 2) == 0.0
    assert distinct(["a b c", "A b"], 1) == 3 / 5


def test_evaluations_that_cannot_be_trusted_are_refused():
    options = {"calibrations": CALIBRATIONS, "stream": RandomStream(0)}
    fns = {"words": num_words}
    for prompts in (PROMPTS[:1], [PROMPTS[0]] * 3):
        with pytest.raises(
            ValueError, match=r"needs at least 2 distinct prompts for a standard .* got 1"
        ):
            evaluate(policy(), prompts, fns, **options)
    with pytest.raises(ValueError, match="'words' is both"):
        evaluate(policy(), PROMPTS, fns, extra_fns={"words": num_words}, **options)
    with pytest.raises(ValueError, match="num_samples and batch_size must be positive, got 0"):
        evaluate(policy(), PROMPTS, fns, num_samples=0, **options)
    with pytest.raises(ValueError, match="'words' has no calibration"):
        evaluate(policy(), PROMPTS, fns, **{**options, "calibrations": {}})


LETTER_PROMPTS = [Prompt(text) for text in ("abc", "jihgfe", "d", "cafe bad")]
TOKEN_IDS = torch.tensor([[4, 9, 7, 14, 5], [8, 8, 4, 6, 10]])
ROLLOUT = RolloutConfig(max_new_tokens=10, temperature=0.8, stop_strings=[])


@pytest.fixture
def save_adapter(checkpoint, tmp_path):
    """Saves an adapter that does something, with modules and rank of its own, to a folder."""

    def save(name: str, *, r: int, target_modules: list[str]) -> Path:
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=r, target_modules=target_modules, init_lora_weights=False
        )
        with without_needless_warnings():
            get_peft_model(base, lora).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def folders(save_adapter) -> list[Path]:
    torch.manual_seed(0)
    return [
        save_adapter("wide", r=4, target_modules=["q_proj", "v_proj"]),
        save_adapter("small", r=2, target_modules=["o_proj"]),
    ]


def test_adapters_of_other_ranks_and_modules_share_a_base_and_act_as_if_alone(checkpoint, folders):
    policy = load_adapters(PolicyConfig(path=str(checkpoint)), folders)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert not policy.training
    expected = [base(TOKEN_IDS).logits]
    for folder in folders:
        fresh = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with without_needless_warnings():
            expected.append(PeftModel.from_pretrained(fresh, str(folder))(TOKEN_IDS).logits)
    for index in (1, None, 0, 1, 0, None):  # whoever spoke before
        with select_adapter(policy, index) as reference:
            place = 0 if index is None else index + 1
            assert torch.equal(policy(TOKEN_IDS).logits, expected[place])
            with reference():
                assert torch.equal(policy(TOKEN_IDS).logits, expected[0])
            assert torch.equal(policy(TOKEN_IDS).logits, expected[place])
    assert not torch.equal(expected[1], expected[2])


def test_more_adapters_than_digits_keep_their_own_tensors(checkpoint, save_adapter):
    torch.manual_seed(0)
    folders = [save_adapter(f"a{i}", r=2, target_modules=["q_proj"]) for i in range(12)]
    policy = load_adapters(PolicyConfig(path=str(checkpoint)), folders)
    outputs = []
    for index in range(12):
        with select_adapter(policy, index):
            outputs.append(policy(TOKEN_IDS).logits)
    alone = load_adapters(PolicyConfig(path=str(checkpoint)), folders[1:2])
    assert torch.equal(outputs[1], alone(TOKEN_IDS).logits)
    assert not any(torch.equal(outputs[1], other) for other in [outputs[0], *outputs[2:]])


def test_replies_without_a_trainer_are_the_trainer_s(make_trainer, letter_count, tokenizer):
    trainer = make_trainer(rewards={"a": letter_count("a")})
    with RandomStream(0):
        expected = trainer.replies(LETTER_PROMPTS)
    with RandomStream(0):
        replies = sample_replies(
            trainer.policy_model,
            LETTER_PROMPTS,
            tokenizer=tokenizer,
            prompt_format=PromptFormat(),
            config=ROLLOUT,
            reference=trainer.policy_model.disable_adapter,
        )
    assert replies.completions == expected.completions
    for name in ("kl", "num_tokens", "ended"):
        assert torch.equal(getattr(replies, name), getattr(expected, name))
    assert replies.kl.abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_model_has_no_kl_from_itself(checkpoint, folders, tokenizer, dtype):
    policy = load_adapters(PolicyConfig(path=str(checkpoint), dtype=dtype), folders)
    with select_adapter(policy, None) as reference, RandomStream(0):
        replies = sample_replies(
            policy,
            LETTER_PROMPTS,
            tokenizer=tokenizer,
            prompt_format=PromptFormat(),
            config=ROLLOUT,
            reference=reference,
        )
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    with RandomStream(0):
        expected = sample_replies(
            base,
            LETTER_PROMPTS,
            tokenizer=tokenizer,
            prompt_format=PromptFormat(),
            config=ROLLOUT,
            reference=nullcontext,
        )
    assert replies.completions == expected.completions
    assert replies.kl.abs().max() < (1e-5 if dtype == "float32" else 1e-30)


def test_an_adapter_of_another_base_is_refused_unless_the_base_is_said_to_be_the_same(
    checkpoint, folders, monkeypatch
):
    settings = folders[0] / "adapter_config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"base_model_name_or_path": "some/other"}))
    config = PolicyConfig(path=str(checkpoint))
    with pytest.raises(
        ValueError, match=r"was made for the base model 'some/other', got .*check_base"
    ):
        load_adapters(config, folders)
    load_adapters(config, folders, check_base=False)
    monkeypatch.chdir(checkpoint.parent)  # the same folder, spelt otherwise
    settings.write_text(json.dumps(values))
    load_adapters(PolicyConfig(path=checkpoint.name), folders)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 10**9}, r"states the rank 1000000000, but the largest size of its tensors is 16"),
        ({"r": "4"}, r"states the rank '4', but the largest size"),
        ({"rank_pattern": {"q_proj": 10**7}}, r"states the rank 10000000, but the largest size"),
        ({"rank_pattern": [1]}, r"rank_pattern must be an object"),
        ({"r": 16}, r"does not fit .* has shape \[4, 16\], expected \[16, 16\]"),
        ({"layer_replication": [[0, 10**6]]}, r"changes the base model, by layer_replication"),
        (
            {"init_lora_weights": "pissa"},
            r"changes the base model, by .* init_lora_weights 'pissa'",
        ),
        ({"peft_type": "NONE_SUCH"}, r"adapter_config.json is malformed"),
        ({"target_modules": "("}, r"the pattern '\(', which is broken or could take too long"),
    ],
)
def test_settings_that_are_not_the_file_s_are_refused(checkpoint, folders, changes, message):
    settings = folders[0] / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_adapters(PolicyConfig(path=str(checkpoint)), folders)


def test_an_adapter_of_another_kind_is_refused(checkpoint, folders):
    settings = folders[0] / "adapter_config.json"
    values = {"peft_type": "IA3", "base_model_name_or_path": str(checkpoint)}
    settings.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"has a IA3Config, expected a LoraConfig: use a LoRA"):
        load_adapters(PolicyConfig(path=str(checkpoint)), folders)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"base_model_name_or_path": "elsewhere/BASE"}, None),
        ({"base_model_name_or_path": "some/other"}, "made for the base model 'some/other', got "),
        ({"r": 2}, r"does not fit policy\.lora: its r is 2, got 4: use"),
        ({"lora_alpha": 64}, r"its alpha / r is 16\.0, got 2\.0"),
        ({"use_rslora": True}, r"its alpha / r is 4\.0, got 2\.0"),
        ({"alpha_pattern": {"q_proj": 1}}, r"its alpha per layer is \{'q_proj': 1\}, got \{\}"),
        ({"target_modules": ["q_proj"]}, r"target_modules is \['q_proj'\], got \['q_proj', 'v_p"),
    ],
)
def test_an_adapter_that_means_something_else_in_a_slot_is_refused(
    checkpoint, folders, changes, message
):
    file = folders[0] / "adapter_config.json"
    if base := changes.get("base_model_name_or_path"):
        changes = {"base_model_name_or_path": base.replace("BASE", checkpoint.name)}
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | changes))
    lora = LoraSettings(r=4, alpha=before["lora_alpha"], target_modules=before["target_modules"])
    config = PolicyConfig(path=str(checkpoint), lora=lora)
    policy = load_policy(config, stream=RandomStream(0))
    if message is None:
        check_settings(folders[0], policy, config.path)
        return
    with pytest.raises(ValueError, match=message) as caught:
        check_settings(folders[0], policy, config.path)
    assert "\n" not in str(caught.value)


def test_settings_that_are_nested_too_deeply_are_malformed(checkpoint, folders):
    (folders[0] / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"adapter_config\.json is malformed \("):
        load_adapters(PolicyConfig(path=str(checkpoint)), folders)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adapter_that_is_not_finite_is_refused(checkpoint, folders, value):
    file = folders[1] / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name][0, 0] = value
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"small has non-finite values in"):
        load_adapters(PolicyConfig(path=str(checkpoint)), folders)


def test_an_evaluation_tells_how_many_replies_are_sampled():
    told = []
    run(policy(), batch_size=7, on_progress=lambda *counts: told.append(counts))
    assert told == [(n, 18) for n in (0, 3.5, 7, 10.5, 14, 16, 18)]
