"""Samples replies by the policy's own passes, from what a test has at hand."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment import RolloutConfig
from firm.alignment.rollout_engines import SampleRequest, transformers
from firm.alignment.sequences import Queries


def generate(
    model: Any,
    asked: Queries,
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    end_ids: Sequence[int],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and log-probabilities; options are further fields of `SampleRequest`."""
    request = SampleRequest(asked, config, end_ids, **options)
    return transformers.generate(model, request, tokenizer)
