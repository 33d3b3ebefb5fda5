"""Reward models: Hugging Face sequence classifiers and plain Python functions, chosen by name.

A reward model is a callable with TRL's reward-function signature,
`f(prompts, completions, **kwargs) -> list[float]`. A function becomes one by the decorator:

    from reward_models import reward_model

    @reward_model("question_marks")
    def question_marks(completions, **kwargs):
        return [float(text.count("?")) for text in completions]

and a config names it, with the file that it stands in.
"""

from reward_models import miniature  # registers the miniature world's true scores
from reward_models.registry import (
    REWARD_MODELS,
    RewardModelConfig,
    load_reward_model,
    reward_model,
)
from reward_models.scripted import brevity, positivity
from reward_models.sequence_classifier import SequenceClassifierReward, load_sequence_classifier

__all__ = [
    "REWARD_MODELS",
    "RewardModelConfig",
    "SequenceClassifierReward",
    "brevity",
    "load_reward_model",
    "load_sequence_classifier",
    "miniature",
    "positivity",
    "reward_model",
]
