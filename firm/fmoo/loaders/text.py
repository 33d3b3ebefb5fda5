"""Shakespeare by role: next-character prediction."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firm.fmoo.config import DatasetConfig
from firm.fmoo.loaders.sources import Layout, Table, find_file, read_tables
from firm.fmoo.loaders.splitting import complete_splits, number_clients, to_splits
from firm.fmoo.task_data import Splits, TaskData

SHAKESPEARE = Layout(
    ("x", "y", "character_id"),
    {"x": ("x",), "y": ("y",), "character_id": ("character_id",)},
    "flwrlabs/shakespeare",
)

SEQUENCE_LENGTH = 80
"""Length of the context in characters (FedMGDA+, Section 6.1.3)."""


def shakespeare(cfg: DatasetConfig) -> Splits:
    """Returns Shakespeare by role: the next character after a context of 80.

    The first 80 % of a role's text are for training, then 10 % each for validation and test; no
    character is in two splits. Roles too short for one training sample are dropped.
    """
    file = find_file(cfg.path, "*.jsonl*")
    windows = _hub_windows(cfg) if file is None else _role_windows(file, cfg)
    texts = np.concatenate([table["text"].ravel() for table in windows.values()])
    vocabulary = np.unique(texts)
    names = number_clients(windows, "role")

    def data(part: Table) -> TaskData:
        tokens = np.searchsorted(vocabulary, part["text"]).astype(np.int64)  # [N, 81]
        return TaskData(
            inputs=torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
            targets=torch.from_numpy(np.ascontiguousarray(tokens[:, -1:])),
            objectives=("next_character",),
            losses=("cross_entropy",),
            groups=torch.from_numpy(part["client"]),
            natural=torch.from_numpy(part["client"]),
            natural_names=names,
            num_outputs=(len(vocabulary),),
            num_tokens=len(vocabulary),
        )

    return to_splits(windows, data)


def _role_windows(file: Path, cfg: DatasetConfig) -> dict[str, Table]:
    rows: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
    for role, text in _read_roles(file):
        for split, (start, stop) in _segments(len(text), cfg).items():
            segment = _code_points(text[start:stop])
            if len(segment) <= SEQUENCE_LENGTH:
                if split == "train":
                    break
                continue
            pieces = np.lib.stride_tricks.sliding_window_view(segment, SEQUENCE_LENGTH + 1)
            pieces = pieces[:: cfg.window_stride]
            rows[split].append((np.full(len(pieces), role), pieces))
    if not rows["train"]:
        raise ValueError(
            f"no role in {file} has the {SEQUENCE_LENGTH + 1} characters of a training sample: "
            "add longer texts."
        )
    empty = (np.zeros(0, dtype=np.str_), np.zeros((0, SEQUENCE_LENGTH + 1), dtype=np.uint32))
    columns = {split: zip(*pieces, empty, strict=True) for split, pieces in rows.items()}
    return {
        split: dict(zip(("role", "text"), map(np.concatenate, pair), strict=True))
        for split, pair in columns.items()
    }


def _segments(length: int, cfg: DatasetConfig) -> dict[str, tuple[int, int]]:
    validation = 0.1 if cfg.validation_fraction is None else cfg.validation_fraction
    first, second = round(length * (0.9 - validation)), round(length * 0.9)
    return {"train": (0, first), "validation": (first, second), "test": (second, length)}


def _read_roles(file: Path) -> Iterable[tuple[str, str]]:
    open_text: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with open_text(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                row = json.loads(line)
                yield str(row["role"]), "\n".join(row["utterances"])
    except (
        ValueError,
        KeyError,
        TypeError,
        gzip.BadGzipFile,
    ) as error:  # invalid JSON or UTF-8 too
        raise ValueError(
            f"{file}, line {number}: not a role with its utterances ({type(error).__name__}): "
            'every line must be {"role": ..., "utterances": [...]}.'
        ) from None


def _hub_windows(cfg: DatasetConfig) -> dict[str, Table]:
    """Reads every ``window_stride``-th sample of LEAF; a role's samples are in text order."""
    tables = read_tables(cfg.path, SHAKESPEARE, stride=cfg.window_stride)
    for table in tables.values():
        texts = [x + y for x, y in zip(table.pop("x"), table.pop("y"), strict=True)]
        if any(len(text) != SEQUENCE_LENGTH + 1 for text in texts):
            raise ValueError(
                f"every x must have {SEQUENCE_LENGTH} characters and every y 1: shorten them."
            )
        table["text"] = np.stack([_code_points(text) for text in texts])
        table["role"] = table.pop("character_id").astype(np.str_)
    number_clients(tables, "role")
    gap = -(-SEQUENCE_LENGTH // cfg.window_stride)
    return complete_splits(
        tables, cfg, order="within_clients_in_time", default_validation=0.1, gap=gap
    )


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
