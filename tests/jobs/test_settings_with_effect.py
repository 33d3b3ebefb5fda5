"""Every setting of sampling, data, prompts and rewards changes a run, or is refused."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from firm.alignment.pairs import RankedPairsConfig
from firm.alignment.policy import load_tokenizer
from firm.alignment.prompt_data import PromptsConfig
from firm.alignment.prompts import Prompt, PromptFormat, format_prompt
from firm.alignment.rewards import Judges, ScoringRequest, scored
from firm.alignment.rollout_config import RolloutConfig
from firm.federation import RandomStream
from firm.federation.processes import Processes
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_data import data_of
from firm.jobs.alignment_loading import load
from firm.run.config import compose
from firm.run.errors import UserError
from reward_models import RewardModelConfig, load_reward_models
from reward_models.config import GoldenScore
from tests.smoke import POLICY, ROOT, SMOKE

TURNS = [
    {"role": "user", "content": "How are you? " * 8},
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "And today?"},
]
ROWS: list[dict[str, Any]] = [
    *({"prompt": TURNS}, {"prompt": "Hi"}, {"prompt": "Hi"}, {"prompt": "Say more."}),
    *({"prompt": f"\n\nHuman: Is {n} large?\n\nAssistant:"} for n in range(4)),
]
PAIRS = [
    {
        "prompt": f"Is {n // 2 * 2} large?",
        "chosen": f"No, {n} is small.",
        "rejected": "Yes." if n % 2 else "It is.",
        "response_0": "a",
        "response_1": "b",
        "best": n % 2,
        "criterion": "one" if n % 3 else "other",
    }
    for n in range(40)
]
PAIRS += PAIRS[:1]
HH_PAIR = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Yes.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: No.",
}
OTHER = "OTHER"
"""Stands for the path of another file."""

SAMPLING: dict[str, list[Any]] = {
    "max_new_tokens": [3],
    "temperature": [0.2],
    "max_prompt_tokens": [16],
    "stop_strings": [["e"], ["<eos>"]],
    "end_tokens": [["."], ["nothing"]],
    "forward_batch_size": [2],
    "cache": ["static"],
    "compile": [False],
    "logprobs": ["forward"],
    "max_staleness": [1],
    "engine": [{"name": "vllm"}],
}
"""Values that change samples, or how they are made; or that are refused."""
PROMPTS: dict[str, list[Any]] = {
    "source": [OTHER, "nothing.jsonl"],
    "split": ["train[:50%]", "nothing"],
    "min_tokens": [15],
    "max_tokens": [8],
    "reader": ["text"],
    "drop_duplicates": [True],
}
RANKED: dict[str, list[Any]] = {
    **PROMPTS,
    "min_tokens": [400],
    "ranked_by": ["best", "nothing"],
    "named_by": ["criterion", "nothing"],
    "validation": ["train[:50%]"],
    "test": ["train[:50%]"],
}
FORMAT: dict[str, list[Any]] = {
    "name": ["plain", "chat"],
    "template": ["Q: {prompt}"],
    "system_prompt": ["Be brief."],
    "template_options": [{"extra": "!"}],
    "date_string": ["today"],
}
REWARD: dict[str, list[Any]] = {
    "name": ["length", "nothing"],
    "path": ["nofolder"],
    "format": ["plain"],
    "append_eos": [True],
    "max_length": [3],
    "dtype": ["bfloat16"],
    "output": ["other"],
    "file": ["nothing.py"],
    "options": [{"half_words": 3}, {"nothing": 3}],
    "golden": [[GoldenScore("a", "b", 7.0)]],
}
"""Settings beside the function `brevity`, but those of where and in which portions it scores."""


def has_effect(read: Callable[..., Any], key: str, value: Any) -> bool:
    """Returns whether a setting changes what `read` returns, or is refused."""
    try:
        return read(**{key: value}) != read()
    except (UserError, ValueError):
        return True


def names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    contents = {"rows": ROWS, "other": ROWS[::-1], "pairs": PAIRS, "other_pairs": PAIRS[::-1]}
    contents["hh_pairs"] = [HH_PAIR, {**HH_PAIR, "rejected": "\n\nHuman: Hi\n\nAssistant: Nope."}]
    for name, rows in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def smoke(**given: Any) -> AlignmentConfig:
    own = {"policy.path": str(POLICY), **given}
    return compose(AlignmentConfig, [str(SMOKE)], list(own.items()), source="test")


@pytest.mark.parametrize("key", names(RolloutConfig))
def test_every_setting_of_sampling_has_an_effect(folder, key):
    source = {"source": str(folder / "rows.jsonl")}

    def sampled(**given: Any) -> Any:
        own = {f"rollout.{name}": value for name, value in given.items()}
        with contextlib.chdir(ROOT):
            cfg = smoke(**{f"data.{use}": source for use in ("train", "validation", "test")}, **own)
            run = load(cfg, Processes.join())
        with RandomStream(0, "sampled"):
            replies = run.trainer.sample(run.trainer.encode(run.data.train))
            found = run.trainer.with_logprobs(replies)
        tokens, logprobs = found.query_responses.tolist(), found.logprobs.tolist()
        return tokens, found.completions, logprobs, cfg.rollout.cache, cfg.rollout.compile

    for value in SAMPLING[key]:
        assert has_effect(sampled, key, value)


def read(cfg: AlignmentConfig) -> Any:
    tokenizer = load_tokenizer(cfg.policy)
    data = data_of(cfg).load(cfg, tokenizer, {}, measures=True, on_note=lambda _: None)
    return [
        [(str(each), str(getattr(each, "messages", ""))) for each in part]
        for part in (data.train, data.validation, data.test)
    ]


@pytest.mark.parametrize("key", names(PromptsConfig))
def test_every_setting_of_prompts_has_an_effect(folder, key):
    def prompts(**given: Any) -> Any:
        own = {"source": str(folder / "rows.jsonl"), **given}
        if own["source"] == OTHER:
            own["source"] = str(folder / "other.jsonl")
        rows = str(folder / "rows.jsonl")
        sources = {"data.validation.source": rows, "data.test.source": rows}
        return read(smoke(**sources, **{f"data.train.{name}": each for name, each in own.items()}))

    for value in PROMPTS[key]:
        assert has_effect(prompts, key, value)


@pytest.mark.parametrize("key", names(RankedPairsConfig))
def test_every_setting_of_pairs_has_an_effect(folder, key):
    file = "hh_pairs" if key == "reader" else "pairs"

    def pairs(**given: Any) -> Any:
        own = {"source": str(folder / f"{file}.jsonl"), **given}
        if own["source"] == OTHER:
            own["source"] = str(folder / "other_pairs.jsonl")
        own = {f"pairs.one.{name}": value for name, value in own.items()}
        limits = {f"evaluation.num_{use}_prompts": 2 for use in ("validation", "test")}
        estimator = {"estimator.name": "dpo", "rewards": {}, "evaluation.metrics": {}}
        return read(smoke(**estimator, **limits, **own))

    for value in RANKED[key]:
        assert has_effect(pairs, key, value)


@pytest.mark.parametrize("has_template", [False, True])
@pytest.mark.parametrize("key", names(PromptFormat))
def test_every_setting_of_the_prompts_format_has_an_effect(key, has_template):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    if has_template:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}{{ date_string }}"
        )

    def written(**given: Any) -> str:
        own = PromptFormat(**given)
        own.check(tokenizer)
        return format_prompt(Prompt("Hi"), tokenizer, own)

    for value in FORMAT[key]:
        assert has_effect(written, key, value) or (key, value, has_template) == (
            "name",
            "chat",
            True,
        )


@pytest.mark.parametrize("key", REWARD)
def test_every_setting_of_a_reward_function_has_an_effect(key):
    def scores(**given: Any) -> Any:
        own = RewardModelConfig(**{"name": "brevity", **given})
        judges = Judges(load_reward_models({"one": own}))
        replies, prompts = ["One two three.", "One."], [Prompt("a"), Prompt("b")]
        return scored(
            ScoringRequest(judges, ["one"], prompts, replies, [[1], [1]])
        )().scores.tolist()

    for value in REWARD[key]:
        assert has_effect(scores, key, value)


def test_the_settings_of_rewards_are_complete():
    # servers and conditions have tests of their own
    others = {"normalization", "batch_size", "device", "url", "only_if", "otherwise"}
    assert {*names(RewardModelConfig)} - others == REWARD.keys()


def test_the_name_of_another_reward_drops_settings_that_it_does_not_read():
    given = [("rewards.helpful.name", "brevity")]
    cfg = compose(AlignmentConfig, [str(ROOT / "configs/miniature.yaml")], given, source="test")
    assert cfg.rewards["helpful"] == RewardModelConfig(name="brevity", batch_size=64)
    with pytest.raises(UserError, match=r"rewards\.helpful: `path` is a setting of sequence class"):
        compose(
            AlignmentConfig,
            [str(ROOT / "configs/miniature.yaml")],
            [*given, ("rewards.helpful.path", "nofolder")],
            source="test",
        )


def test_the_spelling_of_a_special_token_is_no_stop_string():
    with pytest.raises(ValueError, match=r"set rollout\.end_tokens to \['<eos>'\] instead"):
        load(smoke(**{"rollout.stop_strings": ["<eos>"]}), Processes.join())


@pytest.mark.parametrize(
    ("key", "value"), [("cache", "static"), ("logprobs", "forward"), ("engine.name", "vllm")]
)
def test_settings_of_sampling_are_refused_with_pairs(folder, key, value):
    with pytest.raises(UserError, match=rf"rollout\.{key} must be left out with estimator dpo"):
        smoke(
            **{
                "estimator.name": "dpo",
                "rewards": {},
                "evaluation.metrics": {},
                "pairs.one.source": str(folder / "pairs.jsonl"),
                f"rollout.{key}": value,
            }
        )
