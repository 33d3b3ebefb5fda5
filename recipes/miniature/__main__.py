"""Builds a policy and its reward models: tokenizer, SFT, and one classifier per objective.

    python -m recipes.miniature --out runs/miniature                   # the checkpoints that ship
    python -m recipes.miniature --out runs/miniature --only "[helpful_other]"
    python -m recipes.miniature --config recipes/miniature/hh.yaml --out runs/hh \\
        --preferences "[helpful.jsonl.gz, harmless.jsonl.gz]"

The first learns from the generated world, the third from preference files (JSON lines with the
fields `prompt`, `chosen`, `rejected`, `kind`; one reward model per kind). Writes the checkpoint
folders `policy` and one per objective, the prompts of every split, and `build.json`. The generated
world has a second model of helpfulness, `helpful_other`, an encoder with a separate tokenizer,
texts and pairs; the second command builds it alone.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from firm.base.fields import NonNegativeFloat, PositiveInt, configuration
from firm.miniature.world import World
from firm.run import print_table, run_cli, to_dict
from firm.run.files import parse_object, read_text
from recipes.miniature.baselines import bag_of_words_margins, length_margins, pair_accuracy
from recipes.miniature.corpus import Corpus, generated_corpus, preference_corpus
from recipes.miniature.encoder import EncoderTraining, train_encoder
from recipes.miniature.preferences import Preference, load_preferences, truncate_prompt
from recipes.miniature.replies import ReplyWriter
from recipes.miniature.training import (
    PolicyTraining,
    RewardTraining,
    bits_per_byte,
    fit_pairs,
    quiet,
    reward_margins,
    reward_tokenizer,
    save_checkpoint,
    train_policy,
    train_reward_model,
    train_tokenizer,
)

OTHER = "helpful_other"


@configuration
class BuildConfig:
    """The models to build and their training data."""

    out: Path
    """Folder for the checkpoints, the prompts and `build.json`."""
    preferences: list[Path] = field(default_factory=list)
    """Preference files; none: the generated world."""
    seed: int = 0
    """Seed of all random numbers."""
    num_texts: PositiveInt = 20_000
    """Generated world: number of demonstrations for the policy."""
    num_pairs: PositiveInt = 50_000
    """Generated world: training pairs per objective."""
    num_held_out: PositiveInt = 1000
    """Generated world: pairs per objective and held-out split, and held-out texts."""
    noise: NonNegativeFloat = 0.1
    """Generated world: temperature of the training labels; held-out labels have no noise."""
    max_prompt_tokens: PositiveInt = 64
    """Maximum prompt length in scored texts and prompt files; earlier turns are dropped first."""
    only: list[str] = field(default_factory=list)
    """Checkpoints to build; []: all. Reward models start from the policy in `out`, except for
    `helpful_other`, which is trained from scratch."""
    policy: PolicyTraining = field(default_factory=PolicyTraining)
    """Training of the policy."""
    encoder: EncoderTraining = field(default_factory=EncoderTraining)
    """Generated world: training of the encoder from which `helpful_other` starts."""
    reward: RewardTraining = field(default_factory=RewardTraining)
    """Training of each reward model."""

    def __post_init__(self) -> None:
        longest = self.max_prompt_tokens + 3  # BOS, EOS and one token of a reply
        if self.reward.call_format == "plain" and self.reward.max_length < longest:
            raise ValueError(
                f"reward.max_length must be at least {longest} for prompts of "
                f"{self.max_prompt_tokens} tokens, got {self.reward.max_length}."
            )


def main(cfg: BuildConfig) -> dict[str, Any]:
    """Builds everything, or `only` some of it, prints the figures and returns `build.json`."""
    with quiet():
        report = build(cfg)
    if policy := report.get("policy"):
        print(
            f"policy: {policy['num_parameters']:,} parameters, {policy['tokens_seen']:,} tokens "
            f"seen, {policy['bits_per_byte']:.3f} bits per byte held out"
        )
    rows = [
        [f"{kind}, {split}", scores["model"]["num_pairs"], *map(_accuracy, scores.values())]
        for kind, figures in report["reward_models"].items()
        for split, scores in figures.items()
        if isinstance(scores, dict)
    ]
    print_table("Pair accuracy", ["", "pairs", "model", "length", "bag of words"], rows)
    times = [f"{stage} {s['wall']:.0f} ({s['cpu']:.0f})" for stage, s in report["seconds"].items()]
    print(f"seconds (of the processor): {', '.join(times)}")
    return report


def _accuracy(score: dict[str, float]) -> str:
    return f"{score['accuracy']:.3f} ± {score['standard_error']:.3f}"


def build(cfg: BuildConfig) -> dict[str, Any]:
    """Trains and saves the checkpoints; returns the content of `build.json`."""
    corpus = load_corpus(cfg)
    chosen = chosen_checkpoints(cfg, corpus)
    cfg.out.mkdir(parents=True, exist_ok=True)
    report = earlier_report(cfg) | {"config": to_dict(cfg)}

    if "policy" in chosen:
        with timed("policy", report):
            tokenizer = train_tokenizer(corpus.texts["train"], vocab_size=cfg.policy.vocab_size)
            policy = train_policy(corpus.texts["train"], tokenizer, cfg.policy, seed=cfg.seed)
            save_checkpoint(policy, tokenizer, cfg.out / "policy", dtype=torch.float16)
            report["policy"] = policy_figures(cfg, corpus.texts["test"])
            report["num_prompts"] = save_prompts(cfg, corpus, tokenizer)

    for kind, pairs_by_split in corpus.pairs.items():
        if kind in chosen:
            with timed(kind, report):
                tokenizer = AutoTokenizer.from_pretrained(cfg.out / "policy")
                report["reward_models"][kind] = build_reward_model(
                    cfg, kind, pairs_by_split, tokenizer, trunk=cfg.out / "policy", seed=cfg.seed
                )

    if OTHER in chosen:
        with timed(OTHER, report), tempfile.TemporaryDirectory() as trunk:
            seed = cfg.seed + 1
            texts, pairs_by_split = other_corpus(cfg, corpus)
            tokenizer = train_tokenizer(texts, vocab_size=cfg.encoder.vocab_size)
            framed = reward_tokenizer(tokenizer, cfg.reward)
            encoder = train_encoder(texts, framed, cfg.encoder, seed=seed)
            save_checkpoint(encoder, framed, trunk, dtype=torch.float32)
            report["reward_models"][OTHER] = build_reward_model(
                cfg, OTHER, pairs_by_split, tokenizer, trunk=Path(trunk), seed=seed
            )

    (cfg.out / "build.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def chosen_checkpoints(cfg: BuildConfig, corpus: Corpus) -> list[str]:
    """Returns the names of the checkpoints to build.

    Raises:
        ValueError: There is no such checkpoint, or no policy to start a reward model from.
    """
    names = ["policy", *corpus.pairs, *([] if cfg.preferences else [OTHER])]
    for name in cfg.only:
        if name not in names:
            raise ValueError(f"only must name some of {', '.join(names)}, got '{name}'.")
    chosen = cfg.only or names
    starting = [name for name in chosen if name in corpus.pairs]
    if starting and "policy" not in chosen and not (cfg.out / "policy").is_dir():
        raise ValueError(
            f"'{starting[0]}' starts from the policy, and {cfg.out} holds none: build it as well."
        )
    return chosen


def earlier_report(cfg: BuildConfig) -> dict[str, Any]:
    """Returns the entries of `build.json` on checkpoints that are not rebuilt."""
    path = cfg.out / "build.json"
    if cfg.only and path.is_file():
        remedy = "remove it, or build everything."
        return parse_object(read_text(path, remedy=remedy), where=str(path), remedy=remedy)
    return {"reward_models": {}, "seconds": {}}


def build_reward_model(
    cfg: BuildConfig,
    name: str,
    pairs_by_split: dict[str, list[Preference]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    trunk: Path,
    seed: int,
) -> dict[str, Any]:
    """Trains a reward model on a trunk of this tokenizer, saves it and returns its figures."""
    fitted = {
        split: fit_pairs(
            pairs,
            cfg.reward,
            shorten=shortener(cfg, tokenizer),
            num_tokens=token_counter(tokenizer),
        )
        for split, pairs in pairs_by_split.items()
    }
    framed = reward_tokenizer(tokenizer, cfg.reward)
    model = train_reward_model(trunk, framed, fitted["train"], cfg.reward, seed=seed)
    save_checkpoint(model, framed, cfg.out / name, dtype=torch.float16)
    return reward_figures(cfg, name, pairs_by_split, fitted)


def token_counter(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], int]:
    """Returns a function that counts a text's tokens, excluding special tokens."""
    return lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)


def shortener(cfg: BuildConfig, tokenizer: PreTrainedTokenizerFast) -> Callable[[str], str]:
    """Returns a function that truncates a prompt to `max_prompt_tokens`."""
    return partial(
        truncate_prompt, max_tokens=cfg.max_prompt_tokens, num_tokens=token_counter(tokenizer)
    )


def save_prompts(
    cfg: BuildConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerFast
) -> dict[str, int]:
    """Writes the prompts of every split, cut to size, and returns their numbers."""
    shorten = shortener(cfg, tokenizer)
    for split, prompts in corpus.prompts.items():
        with open(cfg.out / f"prompts_{split}.jsonl", "w", encoding="utf-8") as file:
            for row in prompts:
                file.write(json.dumps({**row, "prompt": shorten(row["prompt"])}) + "\n")
    return {split: len(prompts) for split, prompts in corpus.prompts.items()}


def load_corpus(cfg: BuildConfig) -> Corpus:
    """Returns the corpus of the preference files or, without any, of the generated world."""
    if cfg.preferences:
        corpus = preference_corpus(
            pair for path in cfg.preferences for pair in load_preferences(path)
        )
        if "policy" in corpus.pairs:
            raise ValueError("kind 'policy' would take the policy's folder; rename that kind.")
        return corpus
    return generated_corpus(
        World.conflict(),
        num_texts=cfg.num_texts,
        num_pairs=cfg.num_pairs,
        num_held_out=cfg.num_held_out,
        noise=cfg.noise,
        seed=cfg.seed,
    )


def other_corpus(cfg: BuildConfig, corpus: Corpus) -> tuple[list[str], dict[str, list[Preference]]]:
    """Returns texts and pairs by split for `helpful_other`; only the held-out pairs are shared."""
    writer = ReplyWriter(World.conflict())
    seed = cfg.seed + 2  # `seed` drew what the others learn from, `seed + 1` the held-out texts
    texts = [
        row["prompt"] + row["completion"] for row in writer.demonstrations(cfg.num_texts, seed)
    ]
    train = writer.preference_pairs("helpful", cfg.num_pairs, seed, cfg.noise)
    return texts, {**corpus.pairs["helpful"], "train": [Preference(**row) for row in train]}


def policy_figures(cfg: BuildConfig, held_out: list[str]) -> dict[str, Any]:
    """Returns size and held-out code length of the saved policy."""
    policy = AutoModelForCausalLM.from_pretrained(cfg.out / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(cfg.out / "policy")
    return {
        "num_parameters": policy.num_parameters(),
        "tokens_seen": cfg.policy.num_tokens,
        "held_out_bytes": sum(len(text.encode()) for text in held_out),
        "bits_per_byte": bits_per_byte(
            policy, tokenizer, held_out, context_length=cfg.policy.context_length
        ),
    }


def reward_figures(
    cfg: BuildConfig,
    kind: str,
    pairs_by_split: dict[str, list[Preference]],
    fitted: dict[str, list[Preference]],
) -> dict[str, Any]:
    """Returns the pair accuracies of a saved reward model and of two baselines."""
    model = AutoModelForSequenceClassification.from_pretrained(
        cfg.out / kind, num_labels=1, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(cfg.out / kind)
    train = pairs_by_split["train"]
    figures: dict[str, Any] = {"num_train_pairs": len(train), "call_format": cfg.reward.call_format}
    for split, pairs in pairs_by_split.items():
        if pairs:
            margins = {
                "model": reward_margins(model, tokenizer, fitted[split], cfg.reward).numpy(),
                "length": length_margins(train, pairs),
                "bag_of_words": bag_of_words_margins(train, pairs),
            }
            figures[split] = {name: asdict(pair_accuracy(m)) for name, m in margins.items()}
    return figures


@contextmanager
def timed(stage: str, report: dict[str, Any]) -> Iterator[None]:
    """Prints the name of a stage and records its wall-clock and processor seconds."""
    print(f"{stage} ...", flush=True)
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    report["seconds"][stage] = {"wall": round(wall, 1), "cpu": round(cpu, 1)}


if __name__ == "__main__":
    run_cli(main, BuildConfig, description=__doc__ or "")
