"""The miniature world: generated prompts, their ground truth, and small models trained on both.

`World.conflict()` makes prompts and scores any reply by parsing it. A policy and three reward
models of this world ship with the package as Hugging Face checkpoints; `checkpoint_path` returns
their folders. Two of the three judge helpfulness and share neither architecture nor tokenizer nor
training pairs. The recipe `recipes/miniature` builds them.
"""

from pathlib import Path

from firm.miniature.world import Act, SyntheticPrompt, World

__all__ = ["CHECKPOINTS", "Act", "SyntheticPrompt", "World", "checkpoint_path"]

CHECKPOINTS = ("policy", "helpful", "harmless", "helpful_other")


def checkpoint_path(name: str) -> Path:
    """Returns the folder of a shipped checkpoint, one of `CHECKPOINTS`.

    "helpful" and "harmless" are reward models, "helpful_other" an encoder that judges helpfulness.
    """
    if name not in CHECKPOINTS:
        raise ValueError(f"no shipped checkpoint {name!r}; choose one of {', '.join(CHECKPOINTS)}.")
    return Path(__file__).parent / "checkpoints" / name
