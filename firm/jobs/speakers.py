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
from firm.alignment.generation import RolloutConfig
from firm.alignment.policy import PolicyConfig, check_vocabulary, load_tokenizer
from firm.fields import Hint, NumWorkers, Seed, configuration
from reward_models.registry import RewardModelConfig, load_reward_models

_TOKENIZER = "tokenizer_config.json"
"""In every folder of a tokenizer."""


@configuration
class SpeakersConfig:
    """Who replies, and how replies are sampled and scored."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """The base model. Adapters bring their own `lora`."""
    check_base: bool = True
    """Refuses an adapter that names another base model than policy.path. Turn it off when it is
    the same model in another place; names and shapes of all tensors are compared anyway."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """What replies are scored by; there may be none."""
    allow_code: bool = False
    """Runs the Python files that a run's folder names for its rewards. Read them first if the
    folder is somebody else's."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    seed: Seed = 0
    """The same seed gives the same replies to the same prompts, whoever else replies."""
    num_threads: Annotated[NumWorkers | None, Hint("null leaves it to torch")] = None
    """CPU threads; by default as many as torch takes."""

    def __post_init__(self) -> None:
        if not self.policy.path:
            raise ValueError(
                "policy.path is empty: name the base model, or a finished run on the command line."
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
        # The run's copy takes precedence: the tokenizer beside the base model may have changed
        # since, or the run may have used another one.
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
