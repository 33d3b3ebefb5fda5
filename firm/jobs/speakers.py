"""A base model and adapters on it, of which each replies in turn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import transformers

from firm.alignment import (
    PolicyConfig,
    Replies,
    RolloutConfig,
    check_vocabulary,
    load_adapters,
    load_tokenizer,
    sample_replies,
    select_adapter,
)
from reward_models import RewardModelConfig, load_reward_model


class Speakers:
    """Loads all that replies are sampled with and scored by.

    Args:
        policy: The base model; adapters bring their own `lora`.
        folders: The adapters.
        check_base: Whether an adapter that names another base model is refused.
        rollout: How replies are sampled.
        rewards: What they are scored by.
        num_threads: CPU threads; None leaves them to torch.

    Raises:
        UserError: Model, adapters or reward models cannot be loaded.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        folders: Sequence[Path],
        *,
        check_base: bool,
        rollout: RolloutConfig,
        rewards: Mapping[str, RewardModelConfig],
        num_threads: int | None,
    ) -> None:
        transformers.utils.logging.disable_progress_bar()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._policy = load_adapters(policy, folders, check_base=check_base)
        self.tokenizer = load_tokenizer(policy)
        check_vocabulary(self._policy, self.tokenizer, policy.path)
        self.reward_fns = {name: load_reward_model(own, name) for name, own in rewards.items()}
        self._sample = partial(
            sample_replies,
            self._policy,
            tokenizer=self.tokenizer,
            prompt_format=policy.prompt,
            config=rollout,
        )

    @contextmanager
    def speaking(self, index: int | None) -> Iterator[partial[Replies]]:
        """Gives the function from prompts to the replies of an adapter; None: the base model."""
        with select_adapter(self._policy, index) as reference:
            yield partial(self._sample, reference=reference)
