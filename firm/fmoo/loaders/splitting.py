"""Splits sources into train, validation and test samples, and checks their arrays."""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from firm.base.randomness import derive_seed
from firm.fmoo.config import DatasetConfig
from firm.fmoo.loaders.sources import Table
from firm.fmoo.task_data import Splits, TaskData


def as_images(values: np.ndarray, *, channels: int, side: int | None) -> np.ndarray:
    """Returns images as uint8 [N, C, H, W], from [N, H, W], [N, H, W, C] or [N, C, H, W].

    ``side`` is the required H and W; None accepts any.
    """
    shape, expected = values.shape, "H, W" if side is None else f"{side}, {side}"
    if values.ndim == 3 and channels == 1:
        values = values[:, None]
    elif values.ndim == 4 and shape[3] == channels and shape[1] != channels:
        values = values.transpose(0, 3, 1, 2)
    fits = values.ndim == 4 and values.shape[1] == channels
    if not fits or (side is not None and values.shape[2:] != (side, side)):
        raise ValueError(
            f"images must have the shape [N, {channels}, {expected}] or [N, {expected}, "
            f"{channels}], got {list(shape)}."
        )
    if values.dtype != np.uint8:
        raise ValueError(f"images must be uint8 from 0 to 255, got {values.dtype}.")
    return np.ascontiguousarray(values)


def as_labels(values: np.ndarray, *, num_classes: int) -> np.ndarray:
    """Returns labels as int64 [N] after checking that they are in 0..num_classes - 1."""
    if values.ndim != 1 or values.dtype.kind not in "biu":
        raise ValueError(
            f"labels must be integers of shape [N], got {values.dtype} of {list(values.shape)}."
        )
    if len(values) and not 0 <= values.min() <= values.max() < num_classes:
        bad = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"labels must be in 0..{num_classes - 1}, got {bad}: repair the data.")
    return values.astype(np.int64)


def as_matrix(values: np.ndarray, name: str) -> np.ndarray:
    """Returns numeric columns as float32 [N, columns]."""
    if values.ndim != 2 or values.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} must be numbers of shape [N, columns], got {values.dtype} of shape "
            f"{list(values.shape)}."
        )
    return values.astype(np.float32)


def number_clients(tables: Mapping[str, Table], column: str) -> tuple[str, ...]:
    """Adds a column "client" with the natural client's index to all splits; returns the names."""
    names = np.unique(np.concatenate([table[column] for table in tables.values()]).astype(np.str_))
    for table in tables.values():
        table["client"] = np.searchsorted(names, table[column].astype(np.str_)).astype(np.int64)
    return tuple(names.tolist())


Order = Literal["random", "given", "within_clients", "within_clients_in_time"]
"""Order of the train split before validation and test are cut from its end: shuffled, as given, or
separately for each natural client, shuffled or as given."""


def complete_splits(
    tables: Mapping[str, Table],
    cfg: DatasetConfig,
    *,
    order: Order,
    default_validation: float = 0.2,
    gap: int = 0,
) -> dict[str, Table]:
    """Returns train, validation and test splits; missing ones are cut from the train split.

    The test split gets 0.2 of all samples, or 0.1 of each client's (not in the papers, whose data
    have a test split). The validation split gets its share of the remainder, or of each client's
    samples.

    Args:
        tables: Splits of the source; orders within clients require a column "client".
        cfg: Configuration with the seed and the validation share.
        order: How the train split is ordered before it is cut.
        default_validation: Validation share if the configuration does not set one.
        gap: Samples dropped before each cut.
    """
    train = tables["train"]
    by_client = order.startswith("within_clients")
    share = default_validation if cfg.validation_fraction is None else cfg.validation_fraction
    rows: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for piece in _pieces(train, order, cfg.seed):
        num = len(piece)
        num_test = 0 if "test" in tables else round(num * (0.1 if by_client else 0.2))
        num_shared = num if by_client else num - num_test
        num_validation = 0 if "validation" in tables else round(num_shared * share)
        first, second = num - num_test - num_validation, num - num_test
        rows["train"].append(piece[: _before(first, num, gap)])
        rows["validation"].append(piece[first : max(first, _before(second, num, gap))])
        rows["test"].append(piece[second:])
    parts = {split: take(train, np.sort(np.concatenate(rows[split]))) for split in rows}
    parts |= {split: table for split, table in tables.items() if split != "train"}
    if not len(next(iter(parts["train"].values()))):
        raise ValueError(
            f"no training samples are left of {len(next(iter(train.values())))}: add data, or "
            "lower validation_fraction."
        )
    return parts


def _before(cut: int, num: int, gap: int) -> int:
    """Returns the end of a part, which leaves a gap if another part follows."""
    return cut if cut == num else max(0, cut - gap)


def _pieces(train: Table, order: Order, seed: int) -> list[np.ndarray]:
    """Returns the rows in the order in which they are cut, in one piece or by natural client."""
    rows = np.arange(len(next(iter(train.values()))))
    if order in ("random", "within_clients"):
        rows = np.random.default_rng(derive_seed(seed, "splits")).permutation(rows)
    if order in ("random", "given"):
        return [rows]
    rows = rows[np.argsort(train["client"][rows], kind="stable")]
    _, starts = np.unique(train["client"][rows], return_index=True)
    return np.split(rows, starts[1:])


def take(table: Table, rows: np.ndarray) -> Table:
    """Returns the rows at these indices."""
    return {name: values[rows] for name, values in table.items()}


def to_splits(parts: Mapping[str, Table], to_data: Callable[[Table], TaskData]) -> Splits:
    """Converts the three tables to splits."""
    return Splits(to_data(parts["train"]), to_data(parts["validation"]), to_data(parts["test"]))
