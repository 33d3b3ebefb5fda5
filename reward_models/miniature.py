"""The miniature world's ground truth as scores that a config can name: shown, not trained on."""

from collections.abc import Callable, Sequence
from typing import Any

from firm.miniature.world import World
from reward_models.registry import reward_model
from reward_models.scripted import Given, as_texts


def _of_texts(score: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """Returns a score of texts as one that takes messages too."""

    def of_texts(prompts: Sequence[Given], completions: Sequence[Given], **_: Any) -> list[float]:
        return score(as_texts(prompts), as_texts(completions))

    return of_texts


_WORLD = World.conflict()

reward_model("true_helpful")(_of_texts(_WORLD.true_helpful))
reward_model("true_harmless")(_of_texts(_WORLD.true_harmless))
reward_model("parse")(_of_texts(_WORLD.parses))
