"""Samples and scores replies of a base model and of adapters on it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import transformers

from firm.alignment.adapter_files import load_adapters, refold_adapter_, select_adapter
from firm.alignment.evaluation import Replies, sample_replies
from firm.alignment.policy import check_vocabulary, load_tokenizer
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.rollout_config import RolloutConfig
from firm.base.fields import Hint, NumWorkers, Seed, configuration
from reward_models.config import RewardModelConfig
from reward_models.registry import load_reward_models

_TOKENIZER = "tokenizer_config.json"
"""File that every tokenizer's folder contains."""


@configuration
class SpeakersConfig:
    """Base model, and sampling and scoring of replies."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """Base model; adapters have their own `lora` settings."""
    check_base: bool = True
    """Refuse adapters whose base model is not policy.path. Turn it off if the same model was moved;
    names and shapes of all tensors are checked anyway."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Reward models by objective; may be empty."""
    allow_code: bool = False
    """Run the Python files of rewards that are named in a run's folder. Review them first if the
    folder is from someone else."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of replies."""
    seed: Seed = 0
    """Seed of the sampling; a model's replies do not depend on the other models."""
    num_threads: Annotated[NumWorkers | None, Hint("null leaves it to torch")] = None
    """CPU threads; null: torch's default."""

    def __post_init__(self) -> None:
        if not self.policy.path:
            raise ValueError(
                "policy.path must not be empty; pass the base model, or a finished run."
            )


class Speakers:
    """Loads the models to sample replies with and the reward models to score them.

    Args:
        cfg: The base model and its sampling settings.
        folders: Folders of the adapters.
        rewards: Reward models that score the replies.
        preference: Preference at which to fold the adapters, which must then be conditioned.

    Raises:
        UserError: Model, adapters or reward models cannot be loaded.
    """

    def __init__(
        self,
        cfg: SpeakersConfig,
        folders: Sequence[Path],
        rewards: Mapping[str, RewardModelConfig],
        *,
        preference: Sequence[float] | None = None,
    ) -> None:
        transformers.utils.logging.disable_progress_bar()
        if cfg.num_threads is not None:
            torch.set_num_threads(cfg.num_threads)
        self._policy = load_adapters(
            cfg.policy, folders, check_base=cfg.check_base, preference=preference
        )
        self._folders, self._base = folders, cfg.policy.path
        # The run's copy takes precedence: the base model's tokenizer may have changed since then,
        # or the run may have used another one.
        kept = next((folder for folder in folders if (folder / _TOKENIZER).is_file()), None)
        self.tokenizer = load_tokenizer(cfg.policy, kept)
        check_vocabulary(
            self._policy, self.tokenizer, f"policy.path: the tokenizer of {cfg.policy.path}"
        )
        self.reward_fns = load_reward_models(rewards)
        self._sample = partial(
            sample_replies,
            self._policy,
            tokenizer=self.tokenizer,
            prompt_format=cfg.policy.prompt,
            config=cfg.rollout,
        )

    def refold(self, index: int, preference: Sequence[float]) -> None:
        """Folds a conditioned adapter at another preference.

        Raises:
            UserError: The adapter is not conditioned, or has other objectives.
        """
        folder = self._folders[index]
        refold_adapter_(self._policy, index, folder, self._base, preference)

    @contextmanager
    def speaking(self, index: int | None) -> Iterator[partial[Replies]]:
        """Yields a function that samples replies of an adapter, or of the base model for None."""
        with select_adapter(self._policy, index) as reference:
            yield partial(self._sample, reference=reference)
