"""Reward models: Hugging Face sequence classifiers and plain Python functions, chosen by name.

A reward model is a callable with TRL's reward-function signature,
`f(prompts, completions, **kwargs) -> list[float]`. A function becomes one by the decorator::

    from reward_models import reward_model

    @reward_model("question_marks")
    def question_marks(completions, **kwargs):
        return [float(text.count("?")) for text in completions]

and a config selects it by name, with the file that defines it. A package provides one through an
entry point in the group "firm.reward_models"::

    [project.entry-points."firm.reward_models"]
    question_marks = "my_package.rewards:question_marks"
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from reward_models.config import GoldenScore, RewardModelConfig
    from reward_models.golden import check_golden_scores
    from reward_models.language import reading_ease, sentiment, vocabulary
    from reward_models.registry import (
        REWARD_MODELS,
        load_reward_model,
        load_reward_models,
        reward_model,
    )
    from reward_models.scripted import as_texts, brevity, length, matches, politeness, positivity
    from reward_models.sequence_classifier import SequenceClassifierReward, load_sequence_classifier

__all__ = [
    "REWARD_MODELS",
    "GoldenScore",
    "RewardModelConfig",
    "SequenceClassifierReward",
    "as_texts",
    "brevity",
    "check_golden_scores",
    "length",
    "load_reward_model",
    "load_reward_models",
    "load_sequence_classifier",
    "matches",
    "politeness",
    "positivity",
    "reading_ease",
    "reward_model",
    "sentiment",
    "vocabulary",
]

__getattr__, __dir__ = lazy(__name__)
