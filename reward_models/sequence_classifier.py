"""A Hugging Face sequence classifier as a reward, with its own tokenizer and input format.

A reply's score does not depend on what else is in the batch. Padding is on the right; a causal
model's score is read at the last real token, found by length. (Transformers looks for the last id
that is not the pad id instead, and so misses an EOS at the end if the two are the same token.)
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, Self, cast
from weakref import WeakValueDictionary

import torch
from peft import PeftConfig, PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from firm.alignment.policy import (
    CHECKPOINT_ERRORS,
    check_vocabulary,
    checkpoint_errors,
    without_needless_warnings,
)
from firm.base.devices import named_device
from firm.base.sanitize import first_line
from reward_models.config import CallFormat, RewardModelConfig
from reward_models.formats import check_format, present

UNKNOWN_LENGTH = 10**9
"""Stands for an unknown maximum length; tokenizers without a limit report 10^30."""

_adapted: WeakValueDictionary[tuple[str, str, torch.device], PeftModel] = WeakValueDictionary()
"""Base models with adapters, by path, dtype and device: adapters of one base share its weights."""

Features = dict[str, list[int]]


class SequenceClassifierReward:
    """One logit of a sequence classifier as a reward function.

    The model is put into evaluation mode; `name` is the objective, and the other settings are as in
    `RewardModelConfig`. Inputs that are too long are truncated at the start, except for leading
    special tokens. `truncated` lists which inputs of the latest call were truncated. Of a
    `PeftModel`, the adapter named `adapter` is used.

    Raises:
        ValueError: The label does not exist, or none of several is selected; the tokenizer does
            not support the format; there is no EOS to append; or `max_length` is unknown or exceeds
            the model's positions.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        format: CallFormat = "hh_pair",
        output: int | None = None,
        append_eos: bool = False,
        max_length: int | None = None,
        batch_size: int = 32,
        adapter: str = "default",
    ) -> None:
        self.whole_model, self.adapter = model, adapter
        """The model as given, with all of its adapters."""
        self._settings: dict[str, Any] = {
            "name": name,
            "format": format,
            "output": output,
            "append_eos": append_eos,
            "max_length": max_length,
            "batch_size": batch_size,
            "adapter": adapter,
        }
        if isinstance(model, PeftModel):
            model.set_adapter(adapter)
            model = cast(PreTrainedModel, model.get_base_model())
        self._column = _column_of(output, model.config.num_labels)
        check_format(format, tokenizer)
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
        self.format: CallFormat = format
        self.output = output
        self.append_eos = append_eos
        self.batch_size = batch_size
        self.truncated: list[bool] = []
        self.max_length = _max_length_of(max_length, model, tokenizer)
        accepted = inspect.signature(model.forward).parameters
        has_segments = "token_type_ids" in {*tokenizer.model_input_names} & accepted.keys()
        self._inputs = ["input_ids"]
        if has_segments and self._score_layer is None:
            self._inputs.append("token_type_ids")
        self._num_opening = self._count_opening()
        # Padding is masked, so after a causal text it may be any id. An encoder may find padding by
        # its id, but not where that is EOS: BART counts the EOS of every text.
        pads = [model.config.get_text_config().pad_token_id, tokenizer.pad_token_id]
        is_causal = self._score_layer is not None
        others = [i for i in pads if i not in (None, tokenizer.eos_token_id)]
        self._pad_id: Any = 0 if is_causal or not others else others[0]
        self._end_id: Any = tokenizer.eos_token_id or 0

    reads_prompts = True
    """Has `firm.alignment.score` hand over prompts with their messages, and replies as texts."""

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **kwargs: Any
    ) -> list[float]:
        """Returns the raw score of each completion, unbounded; prompts as `present` takes them."""
        rows = self.encode(prompts, completions)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
        scores = torch.empty(len(rows))
        for start in range(0, len(rows), self.batch_size):
            batch = order[start : start + self.batch_size]
            scores[batch] = self._score([rows[index] for index in batch])
        return scores.tolist()

    def encode(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[Features]:
        """Returns the model's inputs for each completion, without padding."""
        self.truncated = []
        both = list(zip(prompts, completions, strict=True))
        if not both:
            return []
        encoded = self._tokenize([present(self.format, *pair, self.tokenizer) for pair in both])
        columns: list[list[list[int]]] = [encoded[key] for key in self._inputs]  # type: ignore[misc]
        rows = zip(*columns, strict=True)
        return [self._fit(dict(zip(self._inputs, row, strict=True))) for row in rows]

    def _tokenize(self, texts: Sequence[tuple[str, ...]]) -> BatchEncoding:
        """Returns token ids and segments; a chat template has written the special tokens itself."""
        columns = [list(column) for column in zip(*texts, strict=True)]
        is_whole = self.format == "chat_template"
        return self.tokenizer(*columns, add_special_tokens=not is_whole, verbose=False)

    def _count_opening(self) -> int:
        """Returns the number of leading special tokens, which truncation keeps."""
        if self.format == "chat_template":
            texts = [present(self.format, "a", "a", self.tokenizer)]
            (ids,) = self._tokenize(texts)["input_ids"]  # type: ignore[misc]
            return int(ids[:1] == [self.tokenizer.bos_token_id])
        special = self.tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
        return special.index(0) if 0 in special else 0  # type: ignore[union-attr]

    def _fit(self, row: Features) -> Features:
        """Returns the row with its EOS, cut at its beginning, and never empty."""
        ids = row["input_ids"]
        if not ids or (self.append_eos and ids[-1] != self._end_id):
            ids.append(self._end_id)
        excess = len(ids) - self.max_length
        self.truncated.append(excess > 0)
        if excess <= 0:
            return row
        start = self._num_opening
        return {key: values[:start] + values[start + excess :] for key, values in row.items()}

    @torch.inference_mode()
    def _score(self, rows: Sequence[Features]) -> torch.Tensor:
        """Returns the scores of some rows, shape [B], float32 on the CPU."""
        if isinstance(self.whole_model, PeftModel):
            self.whole_model.set_adapter(self.adapter)  # another reward may have used its own
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
            dtype = next(self._score_layer.parameters()).dtype  # an adapter's head is in float32
            logits = self._score_layer(last.to(dtype))
        return logits[:, self._column].float().cpu()

    def of(self, name: str, output: Any) -> "SequenceClassifierReward":
        """Returns the same model as the reward of another objective, with another label."""
        return self.replace(name=name, output=output)

    def replace(self, **settings: Any) -> Self:
        """Returns the same model with other settings.

        Raises:
            ValueError: The model or its tokenizer does not support them.
        """
        settings = {**self._settings, **settings}
        return type(self)(self.whole_model, self.tokenizer, **settings)


def settings_of(config: RewardModelConfig, objective: str) -> dict[str, Any]:
    """Returns the settings of the reward of an objective."""
    names = ("format", "output", "append_eos", "max_length", "batch_size")
    return {"name": objective, **{name: getattr(config, name) for name in names}}


def _column_of(output: int | None, num_labels: int | None) -> int:
    assert num_labels is not None  # a classifier's config has at least Transformers' default
    if output is None and num_labels != 1:
        raise ValueError(
            f"the classifier has {num_labels} labels, and a reward is one number: set `output` to "
            f"the label that counts, 0 to {num_labels - 1}."
        )
    column = output or 0
    if not 0 <= column < num_labels:
        labels = "one label" if num_labels == 1 else f"{num_labels} labels"
        remedy = "leave it out" if num_labels == 1 else f"choose from 0 to {num_labels - 1}"
        raise ValueError(f"the classifier has {labels}, got output {column}: {remedy}.")
    return column


def _max_length_of(
    max_length: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    positions = _num_positions(model)
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


def _num_positions(model: PreTrainedModel) -> int:
    """Returns the number of positions of a model, `UNKNOWN_LENGTH` if it does not state it."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or UNKNOWN_LENGTH
    for name, module in model.named_modules():
        if not (isinstance(module, torch.nn.Embedding) and name.endswith("position_embeddings")):
            continue
        if module.padding_idx is not None:  # RoBERTa and its kin count from there
            positions = min(positions, module.num_embeddings - module.padding_idx - 1)
    return positions


def load_sequence_classifier(
    path: str | Path, *, output: int | None = None, dtype: str = "float32", device: str = "auto"
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Returns a sequence classifier and its tokenizer; settings are those of `RewardModelConfig`.

    If `output` is None, the classifier must have one label, whether or not the checkpoint's config
    says so, since some omit it. A folder with a PEFT adapter gives a `PeftModel` with an adapter
    named by `adapter_name`, besides any others of its base that are in use.

    Raises:
        ValueError: There is no such device or checkpoint, it cannot be reached, it is no
            classifier, it has several labels and `output` picks none, or its tokenizer has tokens
            without an embedding.
    """
    place = named_device(device)
    is_folder = Path(path).expanduser().is_dir()
    location = str(Path(path).expanduser()) if is_folder else str(path)
    errors = partial(checkpoint_errors, "sequence classifier", str(path), key="")
    if is_folder and (Path(location) / CONFIG_NAME).is_file():
        adapted = _load_adapter(location, dtype, place)
        with errors(), quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(location)
        check_vocabulary(adapted, tokenizer, f"the tokenizer of {path}")
        return adapted, tokenizer
    with errors(), quiet_transformers():
        config = AutoConfig.from_pretrained(location)
        if output is None:
            config.num_labels = 1
        tokenizer = AutoTokenizer.from_pretrained(location)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            location,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,  # a pickle runs code when it is read
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    if report["mismatched_keys"]:
        name, shape, expected = sorted(report["mismatched_keys"])[0]
        what = f"{name} has shape {list(shape)}, its config wants {list(expected)}"
        raise ValueError(
            f"{path} has {shape[0]} labels, and a reward is one number ({what}): set `output` to "
            f"the label that counts, 0 to {shape[0] - 1}."
            if output is None and expected[0] == 1 < shape[0]
            else f"{path} contradicts itself ({what}): repair its config.json."
        )
    if report["missing_keys"]:
        raise ValueError(
            f"{path} is no trained classifier ({sorted(report['missing_keys'])[0]} is missing): "
            "use a reward model, not a language model."
        )
    check_vocabulary(model, tokenizer, f"the tokenizer of {path}")
    return model.to(place), tokenizer


def adapter_name(path: str | Path) -> str:
    """Returns the name that the adapter in a folder has in its model: a hash of the path."""
    return sha256(str(Path(path).expanduser().resolve()).encode()).hexdigest()[:16]


def adapter_base(path: str | Path) -> str | None:
    """Returns the path or name of the base model of the adapter in a folder; None without one."""
    folder = Path(path).expanduser()
    if not (folder / CONFIG_NAME).is_file():
        return None
    return str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path)


def adapter_sizes(path: str | Path) -> list[int]:
    """Returns the number of values of each tensor of the adapter in a folder."""
    with safe_open(Path(path).expanduser() / SAFETENSORS_WEIGHTS_NAME, "pt") as file:
        return [prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118


def _load_adapter(folder: str, dtype: str, device: torch.device) -> PeftModel:
    """Returns the base model of an adapter's folder with that adapter, which brings the head.

    Raises:
        ValueError: The base or the adapter cannot be loaded, or the adapter has no head.
    """
    name = adapter_name(folder)
    try:
        with quiet_transformers(), without_needless_warnings():
            settings = PeftConfig.from_pretrained(folder)
            path = str(settings.base_model_name_or_path)
            if not getattr(settings, "modules_to_save", None):  # the trained head
                raise ValueError("it is not an adapter of a sequence classifier")
            if not (Path(folder) / SAFETENSORS_WEIGHTS_NAME).is_file():  # PEFT would read a pickle
                raise ValueError(f"it has no {SAFETENSORS_WEIGHTS_NAME}")
            key = (str(Path(path).resolve()) if Path(path).is_dir() else path, dtype, device)
            if (model := _adapted.get(key)) is not None:
                if name not in model.peft_config:
                    model.load_adapter(folder, name, is_trainable=False)
                return model
            base = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, dtype=getattr(torch, dtype), use_safetensors=True
            )
            base.score.float()  # before the copy that the trained head fills, or it is rounded
            model = PeftModel.from_pretrained(base.to(device), folder, adapter_name=name)
    except CHECKPOINT_ERRORS as error:
        raise ValueError(
            f"no reward model could be loaded from the adapter in {folder} ({first_line(error)}): "
            "give the folder that `firm reward` wrote, and keep its base model where it was."
        ) from error
    _adapted[key] = model
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences the loading report; its content is raised as an error of one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
