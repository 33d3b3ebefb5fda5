"""Samples and scores replies of a base model and of adapters on it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import transformers

from firm.alignment.adapter_files import load_adapters, refold_adapter_, select_adapter
from firm.alignment.evaluation import Replies, sample_replies
from firm.alignment.policy import check_vocabulary, load_tokenizer
from firm.jobs.configs import SpeakersConfig
from reward_models.config import RewardModelConfig
from reward_models.registry import load_reward_models

_TOKENIZER = "tokenizer_config.json"
"""File that every tokenizer's folder contains."""


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
        if cfg.rollout.engine.samples_itself:
            print(
                f"note: replies are sampled by transformers, without {cfg.rollout.engine.name}, "
                "which samples in runs alone."
            )
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

    def refold(self, preference: Sequence[float]) -> None:
        """Folds the first adapter, which is conditioned, at another preference.

        Raises:
            UserError: The adapter is not conditioned, or has other objectives.
        """
        refold_adapter_(self._policy, 0, self._folders[0], self._base, preference)

    @contextmanager
    def speaking(self, index: int | None) -> Iterator[partial[Replies]]:
        """Yields a function that samples replies of an adapter, or of the base model for None."""
        with select_adapter(self._policy, index) as reference:
            yield partial(self._sample, reference=reference)
