"""A Hugging Face sequence classifier as a reward: its own tokenizer, its own way to be asked.

A reply's score does not depend on what else is in the batch. Padding stands on the right; a causal
model's score is read at the last real token, found by length. (Transformers looks for the last id
that is not the pad id instead, and so misses an EOS at the end where the two are one token.)
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

CallFormat = Literal["hh_pair", "plain", "response"]

ASSISTANT = "\n\nAssistant:"

UNKNOWN_LENGTH = 10**9
"""Longer than any model reads; tokenizers without a limit say 10^30."""

Features = dict[str, list[int]]


class SequenceClassifierReward:
    """The one logit of a sequence classifier as a reward function.

    Args:
        model: A sequence classifier with one label; it is put into evaluation mode.
        tokenizer: The model's own.
        name: The objective.
        format: How a reply is presented; see `RewardModelConfig.format`.
        append_eos: Whether every text ends with EOS.
        max_length: Longest input in tokens; longer ones lose their beginning, but not the special
            tokens that the tokenizer opens with. By default what the model has positions for.
        batch_size: Replies that are scored at once.

    Attributes:
        num_truncated: How many inputs have been cut so far.

    Raises:
        ValueError: The model has not one label, there is no EOS to append, or `max_length` is
            unknown or beyond the model's positions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        format: CallFormat = "hh_pair",
        append_eos: bool = False,
        max_length: int | None = None,
        batch_size: int = 32,
    ) -> None:
        if model.config.num_labels != 1:
            raise ValueError(
                f"the classifier has {model.config.num_labels} labels, expected 1: "
                "use a checkpoint that gives one score."
            )
        # A causal classifier has one linear layer `score` on every position; the last one counts.
        score = getattr(model, "score", None)
        self._score_layer = score if isinstance(score, torch.nn.Module) else None
        if append_eos and (self._score_layer is None or tokenizer.eos_token_id is None):
            raise ValueError(
                "append_eos is for causal classifiers with an EOS token, got "
                f"{type(model).__name__} and {tokenizer.eos_token!r}: leave it off."
            )
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.format = format
        self.append_eos = append_eos
        self.batch_size = batch_size
        self.num_truncated = 0
        self.max_length = _checked_max_length(max_length, model, tokenizer)
        accepted = inspect.signature(model.forward).parameters
        self._inputs = ["input_ids"] + [
            key
            for key in tokenizer.model_input_names
            if key == "token_type_ids" and key in accepted and self._score_layer is None
        ]
        special = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
        self._num_opening = special.index(0) if 0 in special else 0
        # Masked padding after a causal text may be any id; an encoder may find padding by its id.
        self._pad_id: Any = 0 if self._score_layer is not None else tokenizer.pad_token_id or 0
        self._end_id: Any = tokenizer.eos_token_id or 0

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        """The raw score of each completion, unbounded.

        Args:
            prompts: Dialogues that end with the assistant's tag.
            completions: Replies, one per dialogue.
            kwargs: Not looked at.
        """
        rows = self._encode(prompts, completions)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
        scores = torch.empty(len(rows))
        for start in range(0, len(rows), self.batch_size):
            batch = order[start : start + self.batch_size]
            scores[batch] = self._score([rows[index] for index in batch])
        return scores.tolist()

    def _encode(self, prompts: Sequence[str], completions: Sequence[str]) -> list[Features]:
        both = list(zip(prompts, completions, strict=True))
        if not both:
            return []
        if self.format == "hh_pair":
            questions = [_hh_question(prompt) for prompt in prompts]
            answers = [completion.lstrip(" ") for completion in completions]
            encoded = self.tokenizer(questions, answers, verbose=False)
        elif self.format == "plain":
            encoded = self.tokenizer([_joined(*pair) for pair in both], verbose=False)
        else:
            encoded = self.tokenizer(list(completions), verbose=False)
        columns: list[list[list[int]]] = [encoded[key] for key in self._inputs]  # type: ignore[misc]
        return [
            self._fit(dict(zip(self._inputs, row, strict=True)))
            for row in zip(*columns, strict=True)
        ]

    def _fit(self, row: Features) -> Features:
        """The row with its EOS, without what is too much at its beginning, and never empty."""
        ids = row["input_ids"]
        if not ids or (self.append_eos and ids[-1] != self._end_id):
            ids.append(self._end_id)
        excess = len(ids) - self.max_length
        if excess <= 0:
            return row
        self.num_truncated += 1
        start = self._num_opening
        return {key: values[:start] + values[start + excess :] for key, values in row.items()}

    @torch.inference_mode()
    def _score(self, rows: Sequence[Features]) -> torch.Tensor:
        """Scores of some rows, shape [B], float32 on the CPU."""
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        length = int(lengths.max())
        fills = {"input_ids": self._pad_id, "token_type_ids": 0}
        inputs = {
            key: torch.tensor([row[key] + [fills[key]] * (length - len(row[key])) for row in rows])
            for key in self._inputs
        }  # [B, T]
        inputs["attention_mask"] = (torch.arange(length) < lengths.unsqueeze(1)).long()
        inputs = {key: values.to(self.model.device) for key, values in inputs.items()}
        if self._score_layer is None:
            logits = self.model(**inputs).logits
        else:
            hidden_states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            last = hidden_states[torch.arange(len(rows)), lengths - 1]  # [B, H]
            logits = self._score_layer(last)
        return logits.squeeze(1).float().cpu()


def _hh_question(prompt: str) -> str:
    """The dialogue as the Ray2333 model cards spell it: a space before the last assistant tag."""
    question = prompt.removesuffix(ASSISTANT)
    return prompt if question == prompt else question.rstrip(" ") + " " + ASSISTANT


def _joined(prompt: str, completion: str) -> str:
    """One text; a reply from a chat template lacks the space that follows a tag in HH-RLHF."""
    is_glued = prompt.endswith(ASSISTANT) and completion and not completion[0].isspace()
    return prompt + (" " if is_glued else "") + completion


def _checked_max_length(
    max_length: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    positions = getattr(model.config, "max_position_embeddings", None) or UNKNOWN_LENGTH
    if max_length is None:
        positions = min(positions, tokenizer.model_max_length)
        if positions >= UNKNOWN_LENGTH:
            raise ValueError("the classifier does not say how long a text may be: set max_length.")
        return positions
    if max_length > positions:
        raise ValueError(
            f"max_length {max_length} exceeds the classifier's {positions} positions: lower it."
        )
    return max_length


def load_sequence_classifier(
    path: str | Path, *, dtype: str = "float32", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classifier with one label and its tokenizer.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        dtype: Type of the parameters, as torch names it.
        device: Where the model goes; "auto" takes the accelerator when there is one.

    Raises:
        ValueError: There is no such checkpoint, it cannot be reached, or it is no classifier with
            one label.
    """
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator()
        device = str(accelerator) if accelerator and torch.accelerator.is_available() else "cpu"
    is_folder = Path(path).expanduser().is_dir()
    location = str(Path(path).expanduser()) if is_folder else str(path)
    try:
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(location)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                location,
                num_labels=1,
                dtype=getattr(torch, dtype),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"no sequence classifier could be loaded from the folder {path} ({reason}): "
            "give the folder of a whole checkpoint, tokenizer included."
            if is_folder
            else f"there is no folder {path}, and no such model could be had from the Hugging Face "
            f"hub ({reason}): give the path of a local checkpoint, or download it first."
        ) from error
    if report["mismatched_keys"]:
        name, shape, _ = sorted(report["mismatched_keys"])[0]
        raise ValueError(
            f"{path} does not fit a classifier with one label ({name} has shape {list(shape)}): "
            "use a checkpoint that gives one score."
        )
    if report["missing_keys"]:
        raise ValueError(
            f"{path} is no trained classifier ({sorted(report['missing_keys'])[0]} is missing): "
            "use a reward model, not a language model."
        )
    return model.to(device), tokenizer


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the loading report, whose content comes back as an error of one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
