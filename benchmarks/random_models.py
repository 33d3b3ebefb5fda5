"""Random checkpoints in the shape of real ones, for what a shape costs."""

import os
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from firm.alignment import RolloutConfig

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Shape:
    """Sizes of the models, of the texts and of a client's batch."""

    policy: LlamaConfig
    reward: GPT2Config
    rollout: RolloutConfig
    batch: dict[str, Any]
    """Options of the estimator: replies of a client's local step, and how they are divided."""
    prompt_words: int
    """Words of a prompt; its tokens are a few more."""


def _of_layers(config: Any, num_layers: int) -> Any:
    """Returns a copy of a configuration with this number of layers."""
    copy = deepcopy(config)
    copy.num_hidden_layers = num_layers
    return copy


TINYLLAMA = LlamaConfig(
    vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
    num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048,
)  # fmt: skip
GPT2_LARGE = GPT2Config(vocab_size=50_257, n_embd=1280, n_layer=36, n_head=20)
_SHORT = RolloutConfig(max_new_tokens=8, max_prompt_tokens=32, stop_strings=[])
_FEW = {"batch_size": 4, "minibatch_size": 4, "num_epochs": 1}
SHAPES = {
    "tinyllama": Shape(
        TINYLLAMA,
        GPT2_LARGE,
        RolloutConfig(max_new_tokens=128, max_prompt_tokens=256, stop_strings=[]),
        {"batch_size": 16, "minibatch_size": 8, "num_epochs": 3},
        prompt_words=240,
    ),
    "tinyllama-short": Shape(TINYLLAMA, GPT2_LARGE, _SHORT, _FEW, prompt_words=24),
    "tinyllama-shallow": Shape(
        _of_layers(TINYLLAMA, 4), _of_layers(GPT2_LARGE, 6), _SHORT, _FEW, prompt_words=24
    ),
    "tiny": Shape(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        ),
        GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        ),
        _SHORT,
        _FEW,
        prompt_words=24,
    ),
}  # fmt: skip


def save_models(shape: Shape, folder: Path, device: torch.device) -> None:
    """Writes a policy and two reward models, reward and other, bfloat16: 4 GB in TinyLlama's shape.

    The two rewards have the same weights in one file, but runs load each on its own.
    """
    torch.manual_seed(0)
    save_model(LlamaForCausalLM, shape.policy, folder / "policy", device)
    save_model(GPT2ForSequenceClassification, shape.reward, folder / "reward", device)
    shutil.copytree(folder / "reward", folder / "other", copy_function=os.link)


def save_model(
    model_class: type[PreTrainedModel],
    config: transformers.PretrainedConfig,
    folder: Path,
    device: torch.device,
) -> None:
    """Writes a random model in bfloat16, and a tokenizer with one token per word."""
    words = [*SPECIAL.values(), *(f"w{i}" for i in range(config.vocab_size - len(SPECIAL)))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    config.num_labels = 1  # of the classifier
    with device:  # seconds on a GPU, a minute on a CPU
        model = model_class(config)
    model.bfloat16().save_pretrained(folder)


def prompts(shape: Shape, count: int) -> list[str]:
    """Returns dialogues of random words of the policy."""
    return dialogues(shape.policy.vocab_size, shape.prompt_words, count)


def dialogues(vocabulary: int, num_words: int, count: int) -> list[str]:
    """Returns dialogues of random words of a vocabulary."""
    generator = torch.Generator().manual_seed(0)
    size = (count, num_words)
    numbers = torch.randint(vocabulary - len(SPECIAL), size, generator=generator)
    texts = [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]
    return [f"\n\nHuman: {text}\n\nAssistant:" for text in texts]
