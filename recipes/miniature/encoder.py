"""A small encoder trained from scratch, as the trunk of a reward model independent of the policy.

It is trained to detect replaced tokens. A step about another object than the requested one is such
a replacement, so the features it learns are the ones that helpfulness depends on.
"""

import tempfile
from collections.abc import Sequence
from typing import Annotated

import torch
import transformers
from annotated_types import Interval
from datasets import Dataset
from transformers import (
    ElectraConfig,
    ElectraForPreTraining,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from firm.base.fields import PositiveFloat, PositiveInt, configuration
from recipes.miniature.training import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    TransformerTraining,
    run_trainer,
    training_arguments,
)


@configuration
class EncoderTraining(TransformerTraining):
    """Size and training of a small ELECTRA."""

    vocab_size: PositiveInt = 640
    num_steps: PositiveInt = 2500
    learning_rate: PositiveFloat = 1e-3
    replaced_share: Annotated[float, Interval(gt=0, lt=1)] = 0.15
    """Share of the tokens that are replaced, in (0, 1)."""


def train_encoder(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, cfg: EncoderTraining, *, seed: int
) -> ElectraForPreTraining:
    """Returns an encoder trained from scratch to detect replaced tokens.

    The objective follows Clark et al. (2020), arXiv:2003.10555, except that replacements are drawn
    from the other tokens of the batch, not from a trained generator: detecting a random object in
    place of the requested one is hard enough here.

    Args:
        texts: Training documents, prompt and reply as one text.
        tokenizer: Tokenizer of the encoder, which adds special tokens and truncates
            (`reward_tokenizer`).
        cfg: Size and length of the training.
        seed: Seed of the initial parameters, of the order of the texts and of the replacements.
    """
    transformers.set_seed(seed)
    model = _new_encoder(tokenizer, cfg)
    generator = torch.Generator().manual_seed(seed)

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=PAD_ID
        )  # [B, T]
        replaced = replace_tokens(ids, share=cfg.replaced_share, generator=generator)
        return {
            "input_ids": replaced,
            "attention_mask": (ids != PAD_ID).long(),
            "labels": (replaced != ids).long(),
        }

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                max_steps=cfg.num_steps,
                per_device_train_batch_size=cfg.batch_size,
                **training_arguments(folder, cfg, seed=seed),
            ),
            train_dataset=Dataset.from_dict(
                {"input_ids": tokenizer(list(texts), truncation=True)["input_ids"]}
            ),
            data_collator=collate,
        )
        run_trainer(trainer)
    return model


def _new_encoder(tokenizer: PreTrainedTokenizerFast, cfg: EncoderTraining) -> ElectraForPreTraining:
    """Returns an encoder with random parameters, from torch's global generator."""
    return ElectraForPreTraining(
        ElectraConfig(
            vocab_size=len(tokenizer),
            embedding_size=cfg.hidden_size,
            hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            num_hidden_layers=cfg.num_layers,
            num_attention_heads=cfg.num_heads,
            initializer_range=cfg.initializer_range,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=tokenizer.model_max_length,
            type_vocab_size=1,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )
    )


def replace_tokens(ids: torch.Tensor, *, share: float, generator: torch.Generator) -> torch.Tensor:
    """Returns padded texts [B, T] with a share of their tokens replaced by tokens of the batch.

    Special tokens are neither replaced nor used as replacements. A token may replace itself.
    """
    ordinary = ids > max(PAD_ID, BOS_ID, EOS_ID)
    known = ids[ordinary]  # drawn with their frequency in the batch
    if not len(known):
        return ids.clone()
    drawn = known[torch.randint(len(known), ids.shape, generator=generator)]
    chosen = (torch.rand(ids.shape, generator=generator) < share) & ordinary
    return torch.where(chosen, drawn, ids)
