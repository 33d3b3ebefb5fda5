import json
from dataclasses import dataclass, field
from typing import get_args

import pytest
from tokenizers.processors import TemplateProcessing

from firm.run import parse, to_dict
from reward_models import (
    GoldenScore,
    RewardModelConfig,
    SequenceClassifierReward,
    check_golden_scores,
    load_reward_model,
    reward_model,
)
from reward_models.config import CallFormat

PROMPT = "\n\nHuman: Where to now?\n\nAssistant:"
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
REPLIES = [" Home.", " Further on, as far as the road goes."]


pytestmark = pytest.mark.usefixtures("new_plugins")


@pytest.fixture
def asked(byte_tokenizer, classifier):
    """A causal classifier as a reward, asked in any way."""

    def ask(format="hh_pair", **options):
        tokenizer = byte_tokenizer(template=TEMPLATE)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
        return SequenceClassifierReward(
            classifier("llama"), tokenizer, name="r", format=format, **options
        )

    return ask


def golden_of(reward, **options):
    scores = reward([PROMPT] * len(REPLIES), REPLIES)
    return [GoldenScore(PROMPT, r, s, **options) for r, s in zip(REPLIES, scores, strict=True)]


@pytest.mark.parametrize("format", get_args(CallFormat))
def test_a_reward_that_gives_its_golden_scores_passes(format, asked):
    golden = golden_of(asked(format))
    reward = asked(format)
    check_golden_scores(reward, golden)


@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("format", get_args(CallFormat))
def test_a_mismatch_names_the_format_that_was_meant(format, append_eos, asked):
    golden = golden_of(asked(format, append_eos=append_eos), tolerance=1e-4)
    reward = asked("plain" if format == "response" else "response", append_eos=not append_eos)
    with pytest.raises(ValueError) as caught:
        check_golden_scores(reward, golden)
    message = str(caught.value)
    onoff = "on" if append_eos else "off"
    assert f": format '{format}' with append_eos {onoff} would match." in message
    assert f"golden.0 must score {golden[0].score:g} ± 0.0001, got" in message
    assert "(2 of 2 golden scores are off)" in message
    assert "road" not in message
    assert "Where" not in message
    assert "\n" not in message


def test_only_a_format_that_gives_all_scores_would_match(asked):
    plain, response = golden_of(asked("plain")), golden_of(asked("response"))
    with pytest.raises(ValueError, match="no other format would match, with append_eos on or off"):
        check_golden_scores(asked("hh_pair"), [plain[0], response[1]])
    with pytest.raises(ValueError, match=r"golden\.1 .*\(1 of 2 golden scores are off\)"):
        check_golden_scores(asked("plain"), [plain[0], response[1]])


def test_an_example_without_a_score_is_documentation(asked):
    def never(**_):
        raise AssertionError

    never.name = "never"
    check_golden_scores(never, [GoldenScore(PROMPT, "a"), GoldenScore("no dialogue", "b")])
    check_golden_scores(never, [])
    (_, second) = golden_of(asked("plain"))
    with pytest.raises(ValueError, match=r"golden\.1 must score .*\(1 of 1 golden"):
        check_golden_scores(asked("response"), [GoldenScore(PROMPT, "a"), second])


def test_a_function_without_a_score_for_an_example_does_not_give_the_known_one():
    def few(**_):
        return [None]

    few.name = "few"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"golden\.0 must score 0.5 .*\(1 of 1 golden"):
        check_golden_scores(few, [GoldenScore(PROMPT, "a", 0.5)])


def test_the_tolerance_bounds_the_difference():
    def load(score, tolerance):
        golden = [GoldenScore("p", "one", score, tolerance)]
        options = {"half_words": 1.0}
        return load_reward_model(RewardModelConfig("brevity", options=options, golden=golden), "r")

    assert load(0.52, 0.03).name == "r"
    with pytest.raises(ValueError, match=r"'r': golden\.0 must score 0.52 ± 0.01, got 0.5 "):
        load(0.52, 0.01)
    with pytest.raises(ValueError, match=r"must score 0.48 .*: correct the score, or the function"):
        load(0.48, 0.01)


def test_coroutine_functions_are_awaited():
    @reward_model("slow")
    async def slow(completions, **_):
        return [float(len(text)) for text in completions]

    def load(score):
        return load_reward_model(
            RewardModelConfig("slow", golden=[GoldenScore("p", "four", score)]), "r"
        )

    assert load(4.0).name == "r"
    with pytest.raises(ValueError, match=r"must score 5 .*, got 4 "):
        load(5.0)


def test_a_golden_score_that_is_not_finite_is_an_error_of_the_reward():
    @reward_model("broken")
    def broken(completions, **_):
        return [float("nan") for _ in completions]

    golden = [GoldenScore("p", "a", 1.0)]
    with pytest.raises(ValueError, match="reward 'r' returned nan at index 0"):
        load_reward_model(RewardModelConfig("broken", golden=golden), "r")


def test_what_tokenizers_cannot_spell_is_not_tried(byte_tokenizer, classifier):
    model, tokenizer = classifier("bert", pad_token_id=0), byte_tokenizer(opening=True)
    asked = [
        SequenceClassifierReward(model, tokenizer, name="r", format=format)
        for format in ("hh_pair", "plain")
    ]
    with pytest.raises(ValueError, match=r": format 'hh_pair' with append_eos off would match\.$"):
        check_golden_scores(asked[1], golden_of(asked[0]))


def test_an_eos_that_is_there_already_may_be_asked_for_or_not(byte_tokenizer, classifier):
    model, tokenizer = classifier("llama"), byte_tokenizer(opening=True)
    asked = [
        SequenceClassifierReward(model, tokenizer, name="r", format=format)
        for format in ("response", "plain")
    ]
    with pytest.raises(ValueError, match="format 'response' with append_eos off or on would match"):
        check_golden_scores(asked[1], golden_of(asked[0]))


@dataclass(frozen=True)
class Config:
    """Reward models as a recipe has them."""

    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """By objective."""


def test_golden_scores_are_read_from_yaml_and_the_command_line(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "rewards:\n  short:\n    name: brevity\n    golden:\n"
        f"      - {{ prompt: {json.dumps(PROMPT)}, completion: one, score: 0.5 }}\n"
        "      - { prompt: p, completion: c }\n"
    )
    config = parse(Config, ["--config", str(file), "--rewards.short.golden.1.tolerance", "0.5"])
    golden = [GoldenScore(PROMPT, "one", 0.5), GoldenScore("p", "c", None, 0.5)]
    assert config.rewards == {"short": RewardModelConfig("brevity", golden=golden)}
    assert to_dict(config)["rewards"]["short"]["golden"][1]["tolerance"] == 0.5
    for value, message in {
        "-1": r"rewards\.short\.golden\.0\.tolerance must be non-negative",
        "x": r"rewards\.short\.golden\.0\.tolerance must be",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse(Config, ["--config", str(file), "--rewards.short.golden.0.tolerance", value])


def test_impossible_examples_are_refused():
    with pytest.raises(ValueError, match="tolerance must be non-negative, got -1"):
        GoldenScore("p", "c", 1.0, -1.0)
    with pytest.raises(ValueError, match="score must be a finite number, got nan"):
        GoldenScore("p", "c", float("nan"))
