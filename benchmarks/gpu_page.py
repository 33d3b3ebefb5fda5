"""The page of `benchmarks/gpu.py`, and what its rows hold."""

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
import trl

from benchmarks.random_models import SHAPES, Shape
from firm.base.devices import device_title

STAGES = {
    "rollout": ("rollout",),
    "rewards": ("reward",),
    "values": ("values", "advantages"),
    "forward": ("forward",),
    "backward": ("backward", "critic", "reduce"),
    "solve, step": ("gram", "solve", "step"),
}
"""Columns of the page, and the stages of a local step in them."""


STATIC = "local, static cache"
"""The engine local with ``rollout.cache`` static, as a row names it."""

COMPILED = "stacked, compiled"
"""The engine stacked with ``rollout.compile`` true, as a row names it."""

WHOLE = "stacked, whole prompts"
"""The engine stacked, which passes a prompt for each of its replies, as a row names it."""

DECODING = "decoding"
"""The estimator of rows about a sampled token, whose engine is the sampler."""


@dataclass(frozen=True)
class Case:
    """What a row of the page is about."""

    estimator: str
    engine: str
    num_clients: int

    @property
    def is_decoding(self) -> bool:
        """Whether tokens are sampled, of as many replies as the row has clients."""
        return self.estimator == DECODING

    @property
    def needs_vllm(self) -> bool:
        """Whether vLLM samples the replies."""
        return self.engine.endswith("vLLM")

    @property
    def is_peer(self) -> bool:
        """Whether TRL trains one adapter on the replies of so many clients."""
        return self.engine.startswith("trl")


@dataclass
class Row:
    """What it took."""

    case: Case
    note: str = ""
    """Why there are no figures."""
    seconds: float = 0.0
    """Of a round; of a token in rows about decoding."""
    stages: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    """Sampled, in rollouts."""
    flops: float | None = None
    """A second, in forward and backward passes of updates."""
    rows: int = 0
    """In a forward and backward pass."""
    peak: int = 0
    """Bytes."""
    planned: int | None = None
    bytes_up: int | None = None
    """Of a client; and as planned."""
    planned_up: int | None = None


@dataclass(frozen=True)
class Setting:
    """Where and with what all rows are measured."""

    shape_name: str
    device: str
    folder: str
    checkpointing: bool
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of all base models; the page is of bfloat16."""

    @property
    def shape(self) -> Shape:
        """Sizes."""
        return SHAPES[self.shape_name]


def page_of(setting: Setting, rows: Sequence[Row], *, tests: str, peak_flops: float) -> str:
    """Returns the page in Markdown."""
    shape = setting.shape
    own = [row for row in rows if not (row.case.is_peer or row.case.is_decoding)]
    tokens = _table(
        ["sampler", "replies", "ms"],
        (
            [row.case.engine, str(row.case.num_clients), row.note or f"{1e3 * row.seconds:.3g}"]
            for row in rows
            if row.case.is_decoding
        ),
    )
    name = device_title(torch.device(setting.device)) or setting.device
    if setting.device == "cpu":
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    batch = shape.batch
    checkpointing = "with" if setting.checkpointing else "without"
    rounds = _table(
        ["estimator", "clients", "engine", "seconds", "ratio to local", *STAGES],
        map(_round_cells(own), own),
    )
    memory = _table(
        [
            *("estimator", "clients", "engine", "tokens/s in rollouts", "of the product"),
            *("rows in a pass", "peak GB", "planned GB", "bytes up", "planned"),
        ],
        (_memory_cells(row, peak_flops) for row in own),
    )
    peers = _table(
        [
            *("replies", "peer", "its seconds", "stacked, critic-free", "ratio"),
            *("its peak GB", "stacked"),
        ],
        _peer_cells(rows, batch["batch_size"]),
    )
    return f"""# Costs of a round on an accelerator

Written by `{command_of(setting)}`
on {name}; torch {torch.__version__}, transformers {transformers.__version__},
TRL {trl.__version__}, Python {platform.python_version()}. Random bfloat16 weights in the shape
{setting.shape_name}, LoRA of rank 16, two reward models; for each client {batch["batch_size"]}
replies of up to {shape.rollout.max_new_tokens} tokens to prompts of
{shape.rollout.max_prompt_tokens}, minibatches of {batch["minibatch_size"]}, {batch["num_epochs"]}
epochs, {checkpointing} gradient checkpointing. Every figure is from one round.

Tests that need an accelerator: {tests}

## Milliseconds of a token

Of all replies, after the prompts, without end tokens; the adapter of `generate` is PEFT's.
Compiling is left out. vLLM has a copy of the model in a process of its own.

{tokens}

## Seconds by stage

Replies to a prompt share the passes over it, but where the engine says "whole prompts".

{rounds}

## Throughput and memory

A product of large bfloat16 matrices reaches {peak_flops / 1e12:.3g} TFLOP/s here. "Of the product"
is the share of it that the forward and backward passes of updates reach.

{memory}

## Beside TRL

TRL's `GRPOTrainer` trains one adapter on the replies of all clients, with the sum of the rewards
and a KL penalty; the engine stacked trains an adapter for each client and solves for weights.

{peers}
"""


def command_of(setting: Setting) -> str:
    """Returns the command that writes such a page."""
    command = f"python benchmarks/gpu.py --shape {setting.shape_name} --device {setting.device}"
    return command + " --gradient-checkpointing" * setting.checkpointing


def _table(headings: Sequence[str], rows: Any) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _round_cells(rows: Sequence[Row]) -> Callable[[Row], list[str]]:
    seconds = {row.case: row.seconds for row in rows}

    def cells(row: Row) -> list[str]:
        case = row.case
        first = [case.estimator, str(case.num_clients), case.engine]
        if row.note:
            return [*first, row.note, *[""] * (1 + len(STAGES))]
        local = seconds.get(Case(case.estimator, "local", case.num_clients))
        ratio = f"{row.seconds / local:.2f}" if case.engine != "local" and local else ""
        return [*first, f"{row.seconds:.3g}", ratio, *(f"{row.stages[s]:.3g}" for s in STAGES)]

    return cells


def _memory_cells(row: Row, peak_flops: float) -> list[str]:
    case = row.case
    first = [case.estimator, str(case.num_clients), case.engine]
    if row.note:
        return [*first, row.note, *[""] * 6]
    return [
        *first,
        f"{row.tokens_per_second:.3g}",
        f"{100 * (row.flops or 0) / peak_flops:.2g} %",
        str(row.rows),
        f"{row.peak / 1e9:.3g}",
        f"{(row.planned or 0) / 1e9:.3g}",
        f"{row.bytes_up:,}",
        f"{row.planned_up:,}",
    ]


def _peer_cells(rows: Sequence[Row], batch_size: int) -> Iterator[list[str]]:
    own = {row.case: row for row in rows}
    for row in rows:
        if not row.case.is_peer:
            continue
        count = row.case.num_clients
        stacked = own[Case("critic_free", "stacked", count)]
        first = [str(count * batch_size), row.case.engine]
        if row.note or stacked.note:
            yield [*first, row.note or stacked.note, "", "", "", ""]
            continue
        yield [
            *first,
            f"{row.seconds:.3g}",
            f"{stacked.seconds:.3g}",
            f"{stacked.seconds / row.seconds:.2f}",
            f"{row.peak / 1e9:.3g}",
            f"{stacked.peak / 1e9:.3g}",
        ]
