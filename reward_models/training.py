"""Training of a reward model from ranked pairs of replies, by TRL's trainer."""

import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, get_args

import datasets
import numpy as np
import torch
import yaml
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, PrinterCallback, TrainerCallback
from trl.trainer.reward_config import RewardConfig as TrainerConfig
from trl.trainer.reward_trainer import RewardTrainer

from firm.alignment.pairs import Pair
from firm.alignment.policy import checkpoint_errors, read_tokenizer, without_needless_warnings
from firm.alignment.prompt_data import loose_text
from firm.alignment.rewards import score
from firm.base.devices import dtype_name, named_device, prepare_attention
from firm.base.randomness import RandomStream
from firm.run.errors import UserError
from firm.run.progress import say
from reward_models.config import CallFormat, RewardModelConfig
from reward_models.registry import TRAINED_KEYS
from reward_models.sequence_classifier import SequenceClassifierReward, quiet_transformers
from reward_models.training_config import RewardConfig

GOLDEN = (
    ("\n\nHuman: Is it cold outside?\n\nAssistant:", " Yes, take a coat."),
    ("\n\nHuman: Can you help me with my homework?\n\nAssistant:", " No."),
)
"""Examples whose scores are written beside the model, to detect a wrong format later."""
FEW_STEPS = 30
"""Steps below which training is noted to be short: on the miniature's pairs, 2 and 10 steps ended
at chance, and 30 had begun to learn."""
QUIET_SECONDS = 15.0
"""Minimum seconds between two lines of progress."""


def score_differences(reward: Any, pairs: Sequence[Pair]) -> np.ndarray:
    """Returns the score of the chosen minus that of the rejected reply of each pair, shape [n].

    NaN where a reward function does not judge.
    """
    prompts = [pair.prompt for pair in pairs]
    chosen, rejected = (
        score({reward.name: reward}, prompts, replies)[0].double()
        for replies in ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs])
    )
    return (chosen - rejected).numpy()


def check_texts(pairs: Sequence[Pair]) -> None:
    """Raises `ValueError` if a reply is more than its text, which is all that is scored."""
    for pair in pairs:
        if names := pair.extra_fields:
            raise ValueError(
                f"{pair.prompt.place}: a reply has `{names[0]}`, and reward models are trained on "
                "texts alone: remove the field, or the row."
            )


def split_pairs(pairs: Sequence[Pair], cfg: RewardConfig) -> tuple[list[Pair], list[Pair]]:
    """Returns training and held-out pairs, which share no prompt, white space aside."""
    prompts = sorted({loose_text(pair.prompt.transcript) for pair in pairs})
    num = min(cfg.max_held_out, round(cfg.held_out * len(prompts)))
    if num < 2 or num >= len(prompts):
        raise ValueError(
            f"held_out {cfg.held_out} of {len(prompts)} prompts leaves too few pairs on one side: "
            "pass more pairs, or change it."
        )
    chosen = set(random.Random(cfg.seed).sample(prompts, num))
    is_held_out = [loose_text(pair.prompt.transcript) in chosen for pair in pairs]
    sides = [[p for p, held in zip(pairs, is_held_out, strict=True) if held == h] for h in (0, 1)]
    return sides[0], sides[1]


def new_reward(cfg: RewardConfig) -> SequenceClassifierReward:
    """Returns the base with a new head and adapter, as the reward model that it will be."""
    device = named_device(cfg.device)
    prepare_attention(device)
    tokenizer = read_tokenizer(cfg.base, key="base: ")
    with (
        checkpoint_errors("language model", cfg.base, key="base: "),
        quiet_transformers(),
        without_needless_warnings(),
        RandomStream(cfg.seed, "reward"),
    ):
        base = AutoModelForSequenceClassification.from_pretrained(
            cfg.base,
            num_labels=1,
            dtype=getattr(torch, dtype_name(cfg.dtype, cfg.device)),
            use_safetensors=True,
        )
        if cfg.rank > (width := base.config.get_text_config().hidden_size):
            raise ValueError(
                f"rank must be at most the hidden size of {cfg.base}, {width}, got {cfg.rank}."
            )
        lora = LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=cfg.rank,
            lora_alpha=2 * cfg.rank,
            target_modules="all-linear",
        )
        model: Any = get_peft_model(base, lora)
    if not isinstance(getattr(base, "score", None), torch.nn.Module):
        raise ValueError(
            f"base: {cfg.base} has no head at the last token: give a causal language model."
        )
    base.score.float()  # PEFT does this for its own matrices: bfloat16 would swallow small steps
    format = cfg.format
    if format == "auto":
        format = "chat_template" if tokenizer.chat_template else "plain"
    assert format in get_args(CallFormat)
    return SequenceClassifierReward(
        model.to(device),
        tokenizer,
        name=cfg.name,
        format=format,
        append_eos=format != "chat_template" and tokenizer.eos_token_id is not None,
        max_length=cfg.max_length,
        batch_size=4 * cfg.micro_batch_size,
    )


def fit(reward: SequenceClassifierReward, pairs: Sequence[Pair], cfg: RewardConfig) -> list[float]:
    """Trains a reward model on pairs in place, and returns the loss of each step."""
    prompts = [pair.prompt for pair in pairs]
    columns = {}
    for side in ("chosen", "rejected"):
        rows = reward.encode(prompts, [getattr(pair, side) for pair in pairs])
        columns[f"{side}_ids"] = [row["input_ids"] for row in rows]
    rows = zip(columns["chosen_ids"], columns["rejected_ids"], strict=True)
    differ = [chosen != rejected for chosen, rejected in rows]
    if not any(differ):
        raise UserError(
            f"max_length: the replies of all {len(pairs)} training pairs are equal in the last "
            f"{reward.max_length} tokens; raise max_length."
        )
    columns = {name: list(compress(own, differ)) for name, own in columns.items()}
    if num_equal := len(pairs) - sum(differ):
        say(
            f"note: {num_equal} of {len(pairs)} training pairs are dropped, since their replies "
            f"are equal after truncation to {reward.max_length} tokens."
        )
    num_steps = cfg.num_epochs * math.ceil(sum(differ) / cfg.batch_size)
    if num_steps < FEW_STEPS:
        say(
            f"note: training has only {num_steps} step{'s' * (num_steps > 1)}, after which a model "
            "may still be at chance: pass more pairs, more --num_epochs or a smaller --batch_size."
        )
    losses: list[float] = []

    class Lines(TrainerCallback):
        """Prints a line from time to time, and keeps the losses."""

        said = began = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if not logs or "loss" not in logs:
                return
            losses.append(float(logs["loss"]))
            now = time.monotonic()
            if now - self.said < QUIET_SECONDS and len(losses) not in (1, num_steps):
                return
            self.said = now
            left = (now - self.began) / len(losses) * (num_steps - len(losses))
            say(
                f"step {len(losses)}/{num_steps}  loss {losses[-1]:.3f}  accuracy "
                f"{logs.get('accuracy', math.nan):.2f}  {left:.0f} s left"
            )

    padding = reward.tokenizer.convert_ids_to_tokens(_padding(columns, reward))
    reward.tokenizer.pad_token = str(padding)
    reward.whole_model.train()
    for name, parameter in reward.whole_model.named_parameters():
        parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
    with without_needless_warnings(), tempfile.TemporaryDirectory() as folder:
        settings = TrainerConfig(
            output_dir=folder,  # TRL creates it
            num_train_epochs=cfg.num_epochs,
            per_device_train_batch_size=cfg.micro_batch_size,
            gradient_accumulation_steps=cfg.batch_size // cfg.micro_batch_size,
            learning_rate=cfg.learning_rate,
            warmup_steps=math.ceil(0.05 * num_steps),
            lr_scheduler_type="linear",
            bf16=next(reward.whole_model.parameters()).dtype == torch.bfloat16,
            use_cpu=reward.model.device.type == "cpu",
            gradient_checkpointing=False,
            max_length=None,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=cfg.seed % 2**32,
        )
        trainer = RewardTrainer(
            model=reward.whole_model,
            args=settings,
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=reward.tokenizer,
            callbacks=[Lines()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    reward.whole_model.eval().requires_grad_(False)
    return losses


def _padding(columns: Mapping[str, Sequence[Sequence[int]]], reward: Any) -> int:
    """Returns a token to pad with that ends no text.

    Transformers reads a score at the last token that is not the padding.
    """
    ends = {row[-1] for rows in columns.values() for row in rows}
    own = reward.tokenizer.pad_token_id
    candidates = [own] if own is not None else []
    candidates += reward.tokenizer.all_special_ids
    candidates += range(len(reward.tokenizer))
    return next(each for each in candidates if each not in ends)


def reward_yaml(name: str, settings: RewardModelConfig, reward: SequenceClassifierReward) -> str:
    """Returns the lines of a configuration that use the reward model."""
    golden = [
        {"prompt": prompt, "completion": completion, "score": round(score, 4), "tolerance": 0.05}
        for (prompt, completion), score in zip(
            GOLDEN, reward([p for p, _ in GOLDEN], [c for _, c in GOLDEN]), strict=True
        )
    ]
    own = {key: getattr(settings, key) for key in ("path", *TRAINED_KEYS)}
    return yaml.safe_dump(
        {"rewards": {name: {**own, "golden": golden}}}, sort_keys=False, allow_unicode=True
    )
