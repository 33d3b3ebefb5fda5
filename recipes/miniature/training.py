"""Trains small models from scratch: tokenizer, policy and reward models, as HF checkpoints.

The policy is trained with TRL's SFTTrainer, reward models with its RewardTrainer from the policy's
trunk. The sizes need minutes on two CPU cores; training always runs on the CPU in float32.
"""

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
)
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from firm.base.fields import PositiveFloat, PositiveInt, configuration
from recipes.miniature.preferences import Preference, truncate_reply

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2  # the first entries of the vocabulary

CallFormat = Literal["plain", "response"]


@configuration
class TransformerTraining:
    """Size and training of a small transformer."""

    vocab_size: PositiveInt
    """Size of the byte-level BPE vocabulary, including three special tokens and 256 bytes."""
    hidden_size: PositiveInt = 128
    """Width of the hidden states."""
    intermediate_size: PositiveInt = 352
    """Width of the feed-forward layers."""
    num_layers: PositiveInt = 4
    """Number of layers."""
    num_heads: PositiveInt = 4
    """Attention heads per layer."""
    initializer_range: PositiveFloat = 0.06
    """Standard deviation of the initial parameters."""
    batch_size: PositiveInt = 16
    """Texts or windows per optimizer step."""
    num_steps: PositiveInt = 1200
    """Optimizer steps; not a time limit, so that every machine builds the same model."""
    learning_rate: PositiveFloat = 3e-3
    """Peak of AdamW's learning rate, warmed up over 5 % of the steps, then a cosine to 0."""
    adam_beta2: PositiveFloat = 0.95
    """AdamW's decay of squared gradients; 0.999 is slow for runs of a thousand steps."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads ({self.num_heads}), "
                f"got {self.hidden_size}."
            )


@configuration
class PolicyTraining(TransformerTraining):
    """Size and training of a small Llama with tied embeddings."""

    vocab_size: PositiveInt = 1024
    initializer_range: PositiveFloat = 0.06
    """Standard deviation of the initial parameters. With the customary 0.02, policies of these
    widths fail on unusual phrasings of requests (p = 0.3 instead of 1.0)."""
    context_length: PositiveInt = 128
    """Tokens of a training window; documents are concatenated and cut into windows."""

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of twice num_heads ({2 * self.num_heads}), "
                f"got {self.hidden_size}."
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that training sees."""
        return self.num_steps * self.batch_size * self.context_length


@configuration
class RewardTraining:
    """Training of a sequence classifier on pairs, from a trained trunk."""

    call_format: CallFormat = "plain"
    """Scored text: "plain", prompt and reply as one text, or "response", only the reply."""
    max_length: PositiveInt = 128
    """Maximum tokens of a scored text, including BOS and EOS."""
    num_epochs: PositiveInt = 1
    """Passes over the pairs."""
    batch_size: PositiveInt = 16
    """Pairs per optimizer step."""
    learning_rate: PositiveFloat = 4e-4
    """Peak of AdamW's learning rate, warmed up over 5 % of the steps, then a cosine to 0."""
    adam_beta2: PositiveFloat = 0.95
    """AdamW's decay of squared gradients; 0.999 is slow for runs of a thousand steps."""


# Tokenizers


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer for a policy, which needs no unknown token.

    It prepends BOS, never appends EOS, and pads and truncates on the left. Its training texts must
    not contain held-out texts.
    """
    smallest = 256 + 3  # every byte, and the special tokens
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest}, got {vocab_size}.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _with_special_tokens(
        backend, f"{BOS} $A", f"{BOS} $A $B:1", padding_side="left", truncation_side="left"
    )


def reward_tokenizer(
    tokenizer: PreTrainedTokenizerFast, cfg: RewardTraining
) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a reward model that shares a policy's vocabulary.

    It adds BOS and EOS to every text, because the score is read at the last token (by an encoder at
    the first), pads on the right, and truncates to `max_length`: a reply at its end, a prompt with
    its reply at its start.
    """
    backend = tokenizer.backend_tokenizer
    assert isinstance(backend, Tokenizer)
    return _with_special_tokens(
        Tokenizer.from_str(backend.to_str()),
        f"{BOS} $A {EOS}",
        f"{BOS} $A $B:1 {EOS}:1",
        padding_side="right",
        truncation_side="left" if cfg.call_format == "plain" else "right",
        model_max_length=cfg.max_length,
    )


def _with_special_tokens(
    backend: Tokenizer, single: str, pair: str, **kwargs: Any
) -> PreTrainedTokenizerFast:
    ids = [(BOS, BOS_ID), (EOS, EOS_ID)]
    backend.post_processor = processors.TemplateProcessing(single, pair, ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_input_names=["input_ids", "attention_mask"],
        **kwargs,
    )


# Policy


def train_policy(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, cfg: PolicyTraining, *, seed: int
) -> LlamaForCausalLM:
    """Returns a language model trained from scratch by TRL's SFTTrainer; every text ends with EOS.

    Each text is a prompt with its reply; the tokenizer prepends BOS.
    """
    transformers.set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            num_hidden_layers=cfg.num_layers,
            num_attention_heads=cfg.num_heads,
            initializer_range=cfg.initializer_range,
            max_position_embeddings=4 * cfg.context_length,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                max_steps=cfg.num_steps,
                per_device_train_batch_size=cfg.batch_size,
                packing=True,
                packing_strategy="wrapped",  # fills every window, whatever the texts' lengths
                max_length=cfg.context_length,
                shuffle_dataset=True,
                loss_type="nll",
                **training_arguments(folder, cfg, seed=seed),
            ),
            train_dataset=Dataset.from_dict({"input_ids": _documents(texts, tokenizer)}),
            processing_class=tokenizer,
        )
        run_trainer(trainer)
    model.config.use_cache = True  # SFTTrainer turns it off, and it would be saved so
    return model


def bits_per_byte(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    *,
    context_length: int,
) -> float:
    """Returns the model's code length of held-out texts per UTF-8 byte.

    Texts are concatenated as in training; BOS and EOS count as tokens but not as bytes. Every token
    is predicted from the preceding ones in its window of `context_length` tokens.
    """
    stream = [token for document in _documents(texts, tokenizer) for token in document]
    windows = [  # each opens with the last token of the one before, so that all but one count
        torch.tensor(stream[start : start + context_length + 1])
        for start in range(0, len(stream) - 1, context_length)
    ]
    nats = 0.0
    with torch.inference_mode():
        for start in range(0, len(windows), 16):
            batch = torch.nn.utils.rnn.pad_sequence(
                windows[start : start + 16], batch_first=True, padding_value=-100
            )  # [B, L + 1]
            logits = model(batch[:, :-1].clamp(min=0)).logits.float()  # [B, L, V]
            nats += torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), batch[:, 1:], reduction="sum"
            ).item()
    num_bytes = sum(len(text.encode()) for text in texts)
    return nats / torch.log(torch.tensor(2.0)).item() / num_bytes


def _documents(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [[*ids, EOS_ID] for ids in tokenizer(list(texts))["input_ids"]]


# Reward models


def train_reward_model(
    trunk: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[Preference],
    cfg: RewardTraining,
    *,
    seed: int,
) -> PreTrainedModel:
    """Returns a one-label sequence classifier trained on pairs by TRL's RewardTrainer.

    Args:
        trunk: Folder of the policy or encoder that provides the initial trunk.
        tokenizer: The reward model's tokenizer (`reward_tokenizer`).
        pairs: Training pairs. All are used: texts are truncated first, as RewardTrainer drops
            pairs that are too long.
        cfg: Scored text and length of the training.
        seed: Seed of the score head and of the order of the pairs.
    """
    columns = {
        f"{side}_ids": tokenizer(_scored_texts(pairs, side, cfg), truncation=True)["input_ids"]
        for side in ("chosen", "rejected")
    }
    columns["length"] = [
        max(len(chosen), len(rejected))
        for chosen, rejected in zip(columns["chosen_ids"], columns["rejected_ids"], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=str(trunk),
            args=RewardConfig(
                model_init_kwargs={"dtype": "float32"},
                num_train_epochs=cfg.num_epochs,
                per_device_train_batch_size=cfg.batch_size,
                max_length=cfg.max_length,
                train_sampling_strategy="group_by_length",
                remove_unused_columns=False,  # the sampler reads `length`
                **training_arguments(folder, cfg, seed=seed),
            ),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
        )
        kept, model = trainer.train_dataset, trainer.model
        assert isinstance(kept, Dataset)
        assert len(kept) == len(pairs), "RewardTrainer dropped pairs"
        run_trainer(trainer)
    assert isinstance(model, PreTrainedModel)
    model.config.call_format = cfg.call_format
    return model


def fit_pairs(
    pairs: Sequence[Preference],
    cfg: RewardTraining,
    *,
    shorten: Callable[[str], str],
    num_tokens: Callable[[str], int],
) -> list[Preference]:
    """Returns pairs truncated for a reward model: prompts at the start, replies at the end.

    ``shorten`` truncates a prompt; ``num_tokens`` counts tokens, excluding special tokens.
    """
    fitted = []
    for pair in pairs:
        prompt = shorten(pair.prompt)
        room = cfg.max_length - 2 - (num_tokens(prompt) if cfg.call_format == "plain" else 0)
        chosen, rejected = (
            truncate_reply(reply, max_tokens=room, num_tokens=num_tokens)
            for reply in (pair.chosen, pair.rejected)
        )
        fitted.append(Preference(prompt, chosen, rejected, pair.kind))
    return fitted


def reward_margins(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[Preference],
    cfg: RewardTraining,
) -> torch.Tensor:
    """Returns the chosen replies' scores minus the rejected ones', shape [n], float32."""
    chosen, rejected = (
        _scores(model, tokenizer, _scored_texts(pairs, side, cfg))
        for side in ("chosen", "rejected")
    )
    return chosen - rejected


def _scored_texts(pairs: Sequence[Preference], side: str, cfg: RewardTraining) -> list[str]:
    replies = [getattr(pair, side) for pair in pairs]
    if cfg.call_format == "response":
        return replies
    return [pair.prompt + reply for pair, reply in zip(pairs, replies, strict=True)]


def _scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> torch.Tensor:
    scores = torch.empty(len(texts))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding per batch
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            batch = tokenizer(
                [texts[i] for i in rows], truncation=True, padding=True, return_tensors="pt"
            )
            scores[rows] = model(**batch).logits[:, 0].float()
    return scores


# Both


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    *,
    dtype: torch.dtype,
) -> None:
    """Writes a checkpoint folder that the Auto classes load; the model itself is not modified."""
    copy.deepcopy(model).to(dtype).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(folder)


def training_arguments(folder: str, cfg: Any, *, seed: int) -> dict[str, Any]:
    """Returns the arguments of all trainers: on the CPU, in float32, without files or reports."""
    return {
        "output_dir": folder,
        "learning_rate": cfg.learning_rate,
        "adam_beta2": cfg.adam_beta2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,  # below 1: a share of the steps
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": None,  # off; transformers 5.23 warns about False
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def run_trainer(trainer: Trainer) -> None:
    """Runs a trainer without its printed summary."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the progress bars of datasets and transformers; a context or a decorator."""
    datasets_bars = datasets.are_progress_bars_disabled()
    transformers_bars = transformers.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if not datasets_bars:
            datasets.enable_progress_bars()
        if transformers_bars:
            transformers.utils.logging.enable_progress_bar()
