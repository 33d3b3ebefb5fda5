"""The shipped reward models, loaded as a run loads them."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from firm.miniature import CHECKPOINTS, World, checkpoint_path
from recipes.miniature.replies import ReplyWriter
from recipes.miniature.training import quiet
from reward_models import RewardModelConfig, load_reward_model

ROOT = Path(__file__).parents[2]
REWARD_MODELS = tuple(name for name in CHECKPOINTS if name != "policy")
NUM_PAIRS = 300


def section(name: str) -> RewardModelConfig:
    """What the shipped configurations say of a reward model."""
    is_other = name == "helpful_other"
    file = ROOT / "configs" / ("miniature_aligned.yaml" if is_other else "miniature.yaml")
    stated = yaml.safe_load(file.read_text())["rewards"][name]
    return RewardModelConfig(**{**stated, "path": str(ROOT / stated["path"])})


@pytest.fixture(scope="module")
def margins():
    """Each reward model's scores of the chosen minus the rejected replies, shape [n]."""

    def scored(name: str) -> torch.Tensor:
        kind = "harmless" if name == "harmless" else "helpful"
        pairs = ReplyWriter(World.conflict()).preference_pairs(
            kind, NUM_PAIRS, 9, 0.0, split="test"
        )
        reward = load_reward_model(section(name), name)
        prompts = [pair["prompt"] for pair in pairs]
        chosen, rejected = (
            torch.tensor(reward(prompts=prompts, completions=[pair[side] for pair in pairs]))
            for side in ("chosen", "rejected")
        )
        return chosen - rejected

    return {name: scored(name) for name in REWARD_MODELS}


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_shipped_reward_model_prefers_the_better_of_unseen_replies(margins, name):
    assert (margins[name] > 0).float().mean() > 0.72  # 0.5 untrained


def test_the_two_models_of_helpfulness_mostly_agree_and_are_not_one(margins):
    agree = (margins["helpful"] > 0) == (margins["helpful_other"] > 0)
    assert 0.72 < agree.float().mean() < 1


def test_the_two_models_of_helpfulness_share_neither_architecture_nor_tokenizer():
    one, other = (load_reward_model(section(name), name) for name in ("helpful", "helpful_other"))
    assert (one.model.config.model_type, other.model.config.model_type) == ("llama", "electra")
    assert one.tokenizer.get_vocab() != other.tokenizer.get_vocab()


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_shipped_reward_model_loads_in_silence_and_reads_any_text(name, capfd):
    with quiet():  # progress bars apart
        reward = load_reward_model(section(name), name)
    text = "Ça va? 你好 🙂\x00\t"
    (score,) = reward(prompts=["\n\nHuman: é?\n\nAssistant:"], completions=[text])
    assert math.isfinite(score)
    ids = reward.tokenizer(text, add_special_tokens=False).input_ids
    assert reward.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_shipped_reward_model_is_small(name):
    file = checkpoint_path(name) / "model.safetensors"
    assert file.stat().st_size <= 1.9e6


def test_the_aligned_world_is_the_conflict_world_with_another_second_reward_model():
    conflict, aligned = (
        yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
        for name in ("miniature", "miniature_aligned")
    )
    assert list(conflict.pop("rewards")) == ["helpful", "harmless"]
    assert list(aligned.pop("rewards")) == ["helpful", "helpful_other"]
    assert (conflict.pop("name"), aligned.pop("name")) == ("miniature", "miniature_aligned")
    assert conflict == aligned
