"""A sequence classifier whose weights are on a server of vLLM, as a reward.

Texts are formatted, tokenized and truncated here, as for a classifier of this process, so that only
token ids are sent and raw logits come back.
"""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from firm.alignment.policy import CHECKPOINT_ERRORS
from firm.base.sanitize import first_line
from firm.base.servers import JsonServer
from reward_models.config import RewardModelConfig
from reward_models.sequence_classifier import (
    Features,
    SequenceClassifierReward,
    adapter_base,
    quiet_transformers,
    settings_of,
)


class ServedClassifierReward(SequenceClassifierReward):
    """One logit of a classifier on a server; other settings are those of the base class.

    Args:
        model: The classifier without weights, for its number of positions and labels.
        tokenizer: Its tokenizer.
        server: The server.
        settings: Further arguments of `SequenceClassifierReward`.

    Raises:
        ValueError: As the base class, and when the classifier tells pairs of texts apart by
            segments, which servers do not take.
    """

    def __init__(self, model: Any, tokenizer: Any, *, server: JsonServer, **settings: Any) -> None:
        super().__init__(model, tokenizer, **settings)
        self._settings["server"] = self._server = server
        if "token_type_ids" in self._inputs and self.format in ("hh_pair", "question_answer"):
            raise ValueError(
                f"the classifier reads the format {self.format!r} in segments, which servers do "
                "not take: leave out url, so that it is loaded here."
            )

    def __call__(  # type: ignore[override]  # a coroutine is a result, too
        self, prompts: Sequence[Any], completions: Sequence[str], **kwargs: Any
    ) -> Coroutine[Any, Any, list[float]]:
        """Returns the raw score of each completion, while the policy's passes go on."""
        return asyncio.to_thread(self._scores, self.encode(prompts, completions))

    def _scores(self, rows: Sequence[Features]) -> list[float]:
        batches = [
            rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)
        ]
        parts = self._server.map(self._score, batches)
        return torch.cat(parts).tolist() if parts else []

    def _score(self, rows: Sequence[Features]) -> torch.Tensor:
        content = {
            "input": [row["input_ids"] for row in rows],
            "add_special_tokens": False,
            "use_activation": False,  # logits, not probabilities
        }
        answer = self._server.post("/classify", content)
        num_labels = self.model.config.num_labels
        try:
            found = sorted(answer["data"], key=lambda each: each["index"])
            logits = [each["probs"] for each in found]
            numbers = [number for row in logits for number in row]
            is_whole = [len(row) for row in logits] == [num_labels] * len(rows)
            is_whole &= all(math.isfinite(number) for number in numbers)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self._server.url} does not answer as vLLM does: {error!r}."
            ) from error
        if not is_whole:
            shape = [len(logits), *{len(row) for row in logits}]
            raise ValueError(
                f"{self._server.url} must answer with [{len(rows)}, {num_labels}] finite logits, "
                f"got {shape}: serve the classifier in `path`, with --runner pooling."
            )
        return torch.tensor([row[self._column] for row in logits], dtype=torch.float32)


def load_served_classifier(config: RewardModelConfig, objective: str) -> ServedClassifierReward:
    """Returns the classifier of a configuration with a `url`; reads no weights.

    Raises:
        ValueError: There is no such checkpoint, or it is an adapter.
    """
    if adapter_base(config.path) is not None:
        raise ValueError(
            f"url serves whole classifiers, got the adapter {config.path}: merge it into its base, "
            "or leave out url."
        )
    try:
        with quiet_transformers():
            architecture = AutoConfig.from_pretrained(config.path)
            if config.output is None:
                architecture.num_labels = 1
            tokenizer = AutoTokenizer.from_pretrained(config.path)
    except CHECKPOINT_ERRORS as error:
        raise ValueError(
            f"no config.json and tokenizer of a classifier could be read from {config.path} "
            f"({first_line(error)}): give its folder or hub name beside the url."
        ) from error
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(architecture)
    return ServedClassifierReward(
        model,
        tokenizer,
        server=JsonServer(config.url),
        **settings_of(config, objective),
    )
