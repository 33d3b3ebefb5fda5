"""A tokenizer of letters and tiny random policies: everything small enough to check by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from firm.alignment import KLConfig, MultiObjectiveTrainer, RolloutConfig, build_trainer
from firm.alignment import head as heads
from firm.alignment.estimator_config import ESTIMATORS
from firm.alignment.policy import without_needless_warnings

LETTERS = "abcdefghij "


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """One token per letter, ids 4 to 14 in the order of `LETTERS`; special tokens can be chosen."""

    def make(**special_tokens: str | None) -> PreTrainedTokenizerFast:
        vocabulary = {t: i for i, t in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        chosen = {
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            **special_tokens,
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            padding_side="left",
            **{name: token for name, token in chosen.items() if token is not None},
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def make_model(tokenizer) -> Callable[..., PreTrainedModel]:
    """A random language model of 15 tokens, "llama" (relative positions) or "gpt2" (absolute)."""

    def make(architecture: str = "llama", *, seed: int = 1, **changes) -> PreTrainedModel:
        torch.manual_seed(seed)
        ids = {
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "initializer_range": 0.3,
        }
        if architecture == "gpt2":
            sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
            return GPT2LMHeadModel(GPT2Config(**{**ids, **sizes, **changes})).eval()
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        }
        return LlamaForCausalLM(LlamaConfig(**{**ids, **sizes, **changes})).eval()

    return make


@pytest.fixture(scope="session")
def make_policy(make_model) -> Callable[..., PeftModel]:
    """A tiny Llama with an adapter that does something: B is random.

    A fresh adapter does nothing, and is in float32 as loading leaves it.
    """

    def make(
        *,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
        fresh: bool = False,
        target_modules: Sequence[str] = ("q_proj", "v_proj"),
    ) -> PeftModel:
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=8,
            lora_dropout=dropout,
            target_modules=list(target_modules),
            init_lora_weights=False,
        )
        with without_needless_warnings():
            policy = get_peft_model(make_model().to(dtype), config).eval()
        for name, parameter in policy.named_parameters() if fresh else ():
            if "lora_" in name:
                parameter.data = parameter.data.float() * ("lora_A" in name)
        return policy

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, make_model, tokenizer) -> Path:
    """A folder with a tiny Llama and its tokenizer, as `from_pretrained` reads them."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompt_dataset(tokenizer) -> Dataset:
    """32 prompts of 3 to 8 letters, tokenised."""
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(list(LETTERS), generator.integers(3, 9))) for _ in range(32)]
    return Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts]})


@pytest.fixture(scope="session")
def letter_count() -> Callable[[str], Callable]:
    """A reward on texts: the count of a letter in prompt and reply, in eighths, exact in floats."""

    def make(letter: str) -> Callable:
        def reward(prompts, completions, **_):
            return [(p + c).count(letter) / 8 for p, c in zip(prompts, completions, strict=True)]

        return reward

    return make


@pytest.fixture
def make_trainer(tokenizer, make_policy) -> Callable[..., MultiObjectiveTrainer]:
    """A trainer of the tiny policy: 3 rounds, local steps of 3 epochs and 2 minibatches."""

    def make(
        *,
        rewards,
        estimator="ppo",
        value_model=None,
        dropout=0.0,
        policy=None,
        num_rounds=3,
        build=build_trainer,
        **changes,
    ) -> MultiObjectiveTrainer:
        config = {
            "batch_size": 16,
            "minibatch_size": 8,
            "num_epochs": 3,
            "actor_learning_rate": 3e-3,
            "learning_rate_schedule": "linear",
            "missing_end_penalty": 0.5,
            "kl": KLConfig(controller="fixed", coefficient=0.1),
            **({"critic_learning_rate": 3e-3, "clip_range": 0.1} if estimator == "ppo" else {}),
            **changes,
        }
        trainer = build(
            ESTIMATORS[estimator](**config),
            rollout_config=RolloutConfig(max_new_tokens=10, temperature=0.8, stop_strings=[]),
            policy=policy or make_policy(dropout=dropout),
            tokenizer=tokenizer,
            reward_fns=rewards,
            num_rounds=num_rounds,
            value_model=value_model,
        )
        if not hasattr(trainer, "learner"):  # one for tests that call the stages themselves
            trainer.learner = trainer.new_learner()
        return trainer

    return make


@pytest.fixture
def vocabulary(request, monkeypatch) -> str:
    """Counts every vocabulary as large if the parameter says so, so that passes share prompts."""
    if request.param == "large":
        monkeypatch.setattr(heads, "LARGE_VOCABULARY", 0)
        monkeypatch.setattr(heads, "_formulas", WeakKeyDictionary())
    return request.param
