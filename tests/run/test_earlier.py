from dataclasses import dataclass, field

import pytest
import yaml

from firm.alignment import EstimatorConfig, PPOConfig
from firm.run import Run, to_dict
from firm.run.config import compose
from firm.run.earlier import translated_figures, translated_run, translated_settings


@dataclass(frozen=True)
class Config:
    """A run."""

    seed: int = 0
    """Seed."""
    estimator: EstimatorConfig = field(default_factory=PPOConfig)
    """A local step."""


@pytest.fixture
def config() -> Config:
    return Config(3, PPOConfig(batch_size=32, clip_range=0.1))


@pytest.fixture
def earlier(config) -> dict:
    """What an earlier version wrote of the same run."""
    settings = to_dict(config)
    section = settings.pop("estimator")
    del section["name"]
    section["kl"]["estimator"] = section["kl"].pop("form")
    return {"ppo": section, **settings}


def test_the_section_of_ppo_is_the_estimator_of_that_name(config, earlier):
    assert translated_settings(earlier) == to_dict(config)
    assert translated_settings({"ppo": None}) == {"estimator": {"name": "ppo"}}
    assert translated_settings({"policy": {"path": "a", "pad_token": "<s>"}}) == {
        "policy": {"path": "a"}
    }
    site = {"policy": {"metrics": ["kl", "reward", "reward_raw"], "reasons": False}}
    today = {"policy": {"metrics": ["kl", "rewards", "scores"], "reasons": False}}
    assert translated_settings(site) == today
    for untouched in (
        {"seed": 3},
        today,
        {"estimator": None},
        {"estimator": {"kl": None}},
        None,
        [1],
    ):
        assert translated_settings(untouched) == untouched


@pytest.mark.parametrize(
    ("source", "split", "expected"),
    [
        ("held_out.jsonl", "test[50%:]", None),
        (["a.json", "b.jsonl.gz"], "test[:50%]", None),
        ("held_out.jsonl", "[50%:]", "[50%:]"),
        ("held_out.jsonl", "train", "train"),
        ("Anthropic/hh-rlhf", "test[50%:]", "test[50%:]"),
        (["a.jsonl", "Anthropic/hh-rlhf"], "test[50%:]", "test[50%:]"),
        (None, "test[50%:]", "test[50%:]"),
    ],
)
def test_a_file_that_was_taken_whole_still_is(source, split, expected):
    data = {"train": None, "test": {"source": source, "split": split, "min_tokens": 0}}
    translated = translated_run({"seed": 3, "data": data})
    new = {"reader": "auto", "drop_duplicates": False}  # keys with their defaults
    own = {"source": source, "split": expected, "min_tokens": 0}
    assert translated["data"]["test"] == {**own, **new}
    assert translated["data"]["train"] is None
    for untouched in ({"seed": 3}, {"data": None}, None, [1]):
        assert translated_run(untouched) == untouched


def test_raw_scores_and_calibrated_rewards_have_the_same_names_in_all_figures():
    client = {"reward_raw": {"a": 2.0}, "reward_raw_std": {"a": 1.0}, "reward": {"a": 0.5}, "kl": 1}
    today = {"scores": {"a": 2.0}, "scores_std": {"a": 1.0}, "rewards": {"a": 0.5}, "kl": 1}
    assert translated_figures(client) == today
    assert translated_figures({"by_objective": {"a": client}}) == {"by_objective": {"a": today}}
    assert translated_figures({"scores": 1, "normalized": 2}) == {"scores": 1, "rewards": 2}
    assert translated_figures({"normalized/a": 2}) == {"rewards/a": 2}
    for untouched in (today, {"weights": [[1.0]]}, None, "text"):
        assert translated_figures(untouched) == untouched


def test_a_run_of_an_earlier_version_is_read_and_resumed(config, earlier, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(earlier))
    assert compose(Config, [file], []) == config
    run = Run.create(tmp_path / "run", earlier)
    run.close()
    Run.resume(run.path, to_dict(config)).close()
