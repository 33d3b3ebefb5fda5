"""Fetches a language model that a command or a policy's path names, once."""

from collections.abc import Callable
from pathlib import Path

from firm.alignment import fetching
from firm.alignment.fetching import MODELS
from firm.jobs.configs import FetchConfig
from firm.run.errors import UserError
from firm.run.progress import say
from firm.run.shipped import FETCHED

MINIATURE = "firm/miniature/checkpoints/policy"
"""Path of the policy that ships."""


def fetch(name: str, folder: Path | None = None, *, say: Callable[[str], None] = say) -> Path:
    """Returns the folder of a model; see `fetching.fetch`.

    Raises:
        UserError: The folder holds something else, or no source can be reached.
        ModuleNotFoundError: The package gguf is needed and not installed.
    """
    try:
        return fetching.fetch(name, folder, say=say)
    except ValueError as error:
        raise UserError(str(error)) from error


def fetch_policy(path: str) -> None:
    """Fetches the model that a policy's path names as `firm/models/NAME`, if it is not there."""
    name = path.removeprefix(FETCHED)
    if path.startswith(FETCHED) and name in MODELS:
        fetch(name)


def about_policy(path: str) -> str:
    """Returns a sentence on the model that a policy's path names; empty if it is the user's own."""
    if path == MINIATURE:
        return (
            "The base model is the miniature, with 0.9 million parameters; it knows the small "
            "language that firm.miniature generates, and no other."
        )
    name = path.removeprefix(FETCHED)
    return MODELS[name].about if path.startswith(FETCHED) and name in MODELS else ""


def main_smollm2(cfg: FetchConfig) -> None:
    """Fetches SmolLM2-135M-Instruct, and prints its folder and how to use it."""
    print(fetch("smollm2", cfg.to))
