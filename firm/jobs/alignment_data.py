"""Training and held-out data of an alignment run, by what its estimator learns from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from firm.alignment.attacks import attacked_pairs
from firm.alignment.client_config import AttackConfig
from firm.alignment.generation import end_token_ids
from firm.alignment.held_out import USES, held_out_pairs, hold_out, without
from firm.alignment.pair_tokens import EncodedPair, encode_pairs
from firm.alignment.pairs import Pair, load_pairs
from firm.alignment.prompt_data import PromptsConfig, load_prompts, overlap_notes
from firm.alignment.prompts import Prompt
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.federation.partition import dirichlet_partition, iid_partition
from firm.jobs.alignment_config import (
    DEFAULT_SPLITS,
    GIVEN,
    AlignmentConfig,
    PromptPartitionConfig,
    client_names,
    held_objectives,
    hold_out_seed,
)
from firm.run.comparison import FEW_PROMPTS
from firm.run.errors import UserError


def _digest(data: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for each in data:
        prompt, replies = (each.prompt, each.replies) if isinstance(each, Pair) else (each, ())
        digest.update(repr((prompt.transcript, *replies)).encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class DataSplits:
    """Prompts or pairs by use."""

    train: list[Any]
    """Data to train on."""
    validation: list[Any]
    """Data to evaluate on after every round; empty except on the server."""
    test: list[Any]
    """Data to evaluate on before and after training; empty except on the server."""

    @cached_property
    def digest(self) -> str:
        """A digest of the texts of the training data, in order."""
        return _digest(self.train)

    @cached_property
    def held_out_digest(self) -> str:
        """A digest of the texts of the validation and test data, in order."""
        return _digest([*self.validation, *self.test])

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of all data."""
        everything = (*self.train, *self.validation, *self.test)
        return [each.prompt if isinstance(each, Pair) else each for each in everything]


class Data(ABC):
    """Data of one kind."""

    @abstractmethod
    def load(
        self,
        cfg: AlignmentConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        given: Mapping[str, Sequence[Prompt]],
        *,
        measures: bool,
        holds_out: bool = True,
        objectives: Collection[str] | None = None,
        on_note: Callable[[str], None],
    ) -> DataSplits:
        """Returns the data of a run.

        Args:
            cfg: The run.
            tokenizer: The policy's tokenizer; needed only for limits on tokens.
            given: Rows that a Python program passed as objects, by name.
            measures: Whether to load held-out data.
            holds_out: Whether to leave held-out data out of the training data; false for data that
                nothing measures.
            objectives: Objectives to load pairs of; None: all.
            on_note: Receives notes for the user.
        """

    def shards(
        self,
        train: list[Any],
        cfg: AlignmentConfig,
        *,
        names: Sequence[str] | None = None,
        partition: PromptPartitionConfig | None = None,
    ) -> dict[str, list[Any]]:
        """Returns the clients' shards, each large enough for a batch of distinct examples.

        Args:
            train: Data to divide.
            cfg: The run.
            names: Names of the clients; by default, of all.
            partition: Form of the division; by default, the configured one.
        """
        return self._divide(train, cfg, names or client_names(cfg), partition or cfg.partition)

    @abstractmethod
    def _divide(
        self,
        train: list[Any],
        cfg: AlignmentConfig,
        names: Sequence[str],
        partition: PromptPartitionConfig,
    ) -> dict[str, list[Any]]: ...

    def examples(
        self,
        trainer: MultiObjectiveTrainer,
        shard: list[Any],
        attack: AttackConfig | None = None,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> Sequence[Any]:
        """Returns the examples of a client, an attacker if there is an `attack`.

        `on_progress` is called with the number of replies that passed through the model so far.
        """
        return shard


class PromptData(Data):
    """Prompts to sample replies to."""

    def load(
        self,
        cfg: AlignmentConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        given: Mapping[str, Sequence[Prompt]],
        *,
        measures: bool,
        holds_out: bool = True,
        objectives: Collection[str] | None = None,
        on_note: Callable[[str], None],
    ) -> DataSplits:
        """Returns the prompts of `data`; see `Data`."""

        def prompts_of(use: str) -> list[Prompt]:
            config, own = getattr(cfg.data, use), given.get(use)
            if own is None and config.source == GIVEN:
                other = "" if cfg.resume else f", or pass --data.{use}.source"
                raise UserError(
                    f"data.{use}.source: the prompts were passed to firm.align as objects; call it "
                    f"again with them and resume=True{other}."
                )
            default = PromptsConfig().source
            if own is None and config.source == default != cfg.data.train.source:
                on_note(
                    f"data.{use} has the prompts of {default}: set data.{use}.source to others."
                )
            return load_prompts(
                config,
                tokenizer,
                given=own,
                prompt_format=cfg.policy.prompt,
                default_split=DEFAULT_SPLITS[use],
                on_note=lambda text: on_note(f"data.{use}: {text}"),
            )

        prompts = prompts_of("train")
        validation, test = [], []
        if holds_out and (share := cfg.data.hold_out):
            parts = hold_out(prompts, USES, share, seed=hold_out_seed(cfg), key="data.train")
            prompts = parts["train"]
            if not (num_validation := cfg.evaluation.num_validation_prompts):
                prompts = prompts + parts.pop("validation")
            if measures:
                validation = parts.get("validation", [])[:num_validation]
                test = parts["test"][: cfg.evaluation.num_test_prompts]
                self._note_held_out(parts, cfg, on_note)
        elif measures:
            if num_validation := cfg.evaluation.num_validation_prompts:
                validation = prompts_of("validation")[:num_validation]
            test = prompts_of("test")[: cfg.evaluation.num_test_prompts]
            for note in overlap_notes(prompts, {"validation": validation, "test": test}):
                on_note(note)
        return DataSplits(prompts, validation, test)

    def _note_held_out(
        self,
        parts: Mapping[str, list[Prompt]],
        cfg: AlignmentConfig,
        on_note: Callable[[str], None],
    ) -> None:
        """Notes what is not read, and what is too little to measure."""
        default = PromptsConfig(split=None)
        if (cfg.data.validation, cfg.data.test) != (default, default):
            on_note("data.hold_out takes the place of data.validation and data.test.")
        for use in [use for use in USES if use in parts]:
            key, held_out = f"num_{use}_prompts", len(parts[use])
            limit = getattr(cfg.evaluation, key)
            if min(held_out, limit) >= FEW_PROMPTS:
                continue
            more = ["add prompts, or hold out a larger share"] if held_out < FEW_PROMPTS else []
            more += [f"raise evaluation.{key} ({limit})"] if limit < FEW_PROMPTS else []
            on_note(
                f"data.hold_out: {min(held_out, limit)} prompts are held out for {use}, too few to "
                f"measure most changes: {', and '.join(more)}."
            )

    def _divide(
        self,
        train: list[Prompt],
        cfg: AlignmentConfig,
        names: Sequence[str],
        partition: PromptPartitionConfig,
    ) -> dict[str, list[Prompt]]:
        kinds, size = [prompt.kind for prompt in train], cfg.estimator.num_prompts
        return _shards(train, kinds, names, cfg, partition, min_examples=size)


class PairData(Data):
    """Pairs of replies that people ranked, by objective."""

    def load(
        self,
        cfg: AlignmentConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        given: Mapping[str, Sequence[Prompt]],
        *,
        measures: bool,
        holds_out: bool = True,
        objectives: Collection[str] | None = None,
        on_note: Callable[[str], None],
    ) -> DataSplits:
        """Returns the pairs of all objectives; see `Data`.

        Prompts that are held out for one objective are trained on for none.
        """
        evaluation = cfg.evaluation
        limits = {
            "validation": evaluation.num_validation_prompts,
            "test": evaluation.num_test_prompts,
        }
        train: list[Pair] = []
        held_out: dict[str, list[Pair]] = {use: [] for use in limits}
        served = [name for name in cfg.pairs if objectives is None or name in objectives]
        for name, config in ((name, cfg.pairs[name]) for name in served):
            if name not in given and config.source == GIVEN:
                other = "" if cfg.resume else f", or pass --pairs.{name}.source"
                raise UserError(
                    f"pairs.{name}.source: the pairs were passed to firm.align as objects; call it "
                    f"again with them and resume=True{other}."
                )

            def pairs_of(
                split: str | None, key: str, name: str = name, config: Any = config
            ) -> list[Pair]:
                def note(text: str) -> None:
                    on_note(f"pairs.{name}: {text}")

                try:
                    pairs = load_pairs(
                        replace(config, split=split),
                        tokenizer,
                        objective=name,
                        given=given.get(key),
                        prompt_format=cfg.policy.prompt,
                        on_note=note,
                    )
                    return _distinct(pairs, cfg, tokenizer, note)
                except ValueError as error:
                    raise ValueError(f"pairs.{name}: {error}") from error

            own = pairs_of(config.split, name)
            for use, limit in limits.items() if holds_out else ():
                split = getattr(config, use)
                if split is not None:
                    held_out[use] += pairs_of(split, f"{name}/{use}")[:limit] if limit else []
                    continue
                taken = held_out_pairs(own, seed=hold_out_seed(cfg), limit=limit)
                held_out[use] += taken
                own = without(own, taken)
            train += own
        num_all = len(train)
        train = without(train, [pair for pairs in held_out.values() for pair in pairs])
        if num_all > len(train):
            on_note(
                f"{num_all - len(train)} of {num_all} training pairs are dropped, since their "
                "prompts are held out."
            )
        for name in served:
            if not any(pair.objective == name for pair in train):
                raise UserError(
                    f"pairs.{name}: no pair is left to train on after holding out "
                    f"{evaluation.num_validation_prompts} validation and "
                    f"{evaluation.num_test_prompts} test pairs; pass more pairs, or lower "
                    "evaluation.num_validation_prompts and num_test_prompts."
                )
        return DataSplits(train, **(held_out if measures else {use: [] for use in held_out}))

    def _divide(
        self,
        train: list[Pair],
        cfg: AlignmentConfig,
        names: Sequence[str],
        partition: PromptPartitionConfig,
    ) -> dict[str, list[Pair]]:
        """Divides the pairs of each objective among its clients."""
        own: dict[str, list[Pair]] = {name: [] for name in names}
        objectives = held_objectives(cfg)
        for objective in cfg.pairs:
            pairs = [pair for pair in train if pair.objective == objective]
            kinds = [objective] * len(pairs)
            holders = [name for name in names if objective in objectives[name]]
            if not holders:
                continue
            size = max(-(-cfg.estimator.batch_size // len(objectives[name])) for name in holders)
            try:
                shards = _shards(pairs, kinds, holders, cfg, partition, min_examples=size)
            except ValueError as error:
                raise ValueError(f"pairs.{objective}: {error}") from error
            for name, shard in shards.items():
                own[name] += shard
        return own

    def examples(
        self,
        trainer: MultiObjectiveTrainer,
        shard: list[Pair],
        attack: AttackConfig | None = None,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> list[EncodedPair]:
        """Returns the pairs in tokens, with the reference's log-probabilities."""
        return trainer.encode_pairs(attacked_pairs(shard, attack), on_progress=on_progress)


DATA: Mapping[str, Data] = {"prompts": PromptData(), "pairs": PairData()}
"""Data by the value of `EstimatorConfig.learns_from`."""


def data_of(cfg: AlignmentConfig) -> Data:
    """Returns the kind of data that a run's estimator learns from."""
    return DATA[cfg.estimator.learns_from]


def _shards(
    examples: Sequence[Any],
    kinds: Sequence[str],
    names: Sequence[str],
    cfg: AlignmentConfig,
    partition: PromptPartitionConfig,
    *,
    min_examples: int,
) -> dict[str, list[Any]]:
    """Returns the examples of each client, divided at random or by their kind."""
    options = {"seed": cfg.seed, "min_examples": min_examples}
    if partition.kind == "iid":
        shards = iid_partition(len(examples), len(names), **options)
    else:
        shards = dirichlet_partition(kinds, len(names), alpha=partition.alpha, **options)
    rows = ([examples[index] for index in shard] for shard in shards)
    return dict(zip(names, rows, strict=True))


def _distinct(
    pairs: list[Pair],
    cfg: AlignmentConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    on_note: Callable[[str], None],
) -> list[Pair]:
    """Returns the pairs whose replies differ after truncation, as the policy reads them."""
    if tokenizer is None:
        return pairs
    encoded = encode_pairs(
        pairs,
        cfg.objectives,
        tokenizer,
        prompt_format=cfg.policy.prompt,
        end_ids=end_token_ids(tokenizer, cfg.rollout),
        max_prompt_tokens=cfg.rollout.max_prompt_tokens,
        max_reply_tokens=cfg.rollout.max_new_tokens,
        on_note=on_note,
    )
    if not encoded:
        raise ValueError(
            f"no pair is left of {len(pairs)}: set rollout.max_new_tokens, now "
            f"{cfg.rollout.max_new_tokens}, to the length of the replies."
        )
    return [each.pair for each in encoded]
