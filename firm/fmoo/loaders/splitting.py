"""Makes train, validation and test splits of a source, and checks that its arrays fit."""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from firm.federation.randomness import derive_seed
from firm.fmoo.config import DatasetConfig
from firm.fmoo.loaders.sources import Table
from firm.fmoo.task_data import Splits, TaskData


def as_images(values: np.ndarray, *, channels: int, side: int | None) -> np.ndarray:
    """Returns images as uint8 [N, C, H, W], from [N, H, W], [N, H, W, C] or [N, C, H, W].

    ``side`` is H and W; any when None.
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
    """Returns labels as int64 [N], checked to be in 0..num_classes - 1."""
    if values.ndim != 1 or values.dtype.kind not in "biu":
        raise ValueError(
            f"labels must be integers of shape [N], got {values.dtype} of {list(values.shape)}."
        )
    if len(values) and not 0 <= values.min() <= values.max() < num_classes:
        bad = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"labels must lie in 0..{num_classes - 1}, got {bad}: repair the data.")
    return values.astype(np.int64)


def as_matrix(values: np.ndarray, name: str) -> np.ndarray:
    """Returns columns of numbers as float32 [N, columns]."""
    if values.ndim != 2 or values.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} must be numbers of shape [N, columns], got {values.dtype} of shape "
            f"{list(values.shape)}."
        )
    return values.astype(np.float32)


def number_clients(tables: Mapping[str, Table], column: str) -> tuple[str, ...]:
    """Numbers the natural clients of all splits into a column "client"; returns their names."""
    names = np.unique(np.concatenate([table[column] for table in tables.values()]).astype(np.str_))
    for table in tables.values():
        table["client"] = np.searchsorted(names, table[column].astype(np.str_)).astype(np.int64)
    return tuple(names.tolist())


Order = Literal["random", "given", "within_clients", "within_clients_in_time"]
"""How a train split is laid out before validation and test are cut from its end: shuffled, as it
is, or each natural client's samples by themselves, shuffled or as they are."""


def complete_splits(
    tables: Mapping[str, Table],
    cfg: DatasetConfig,
    *,
    order: Order,
    default_validation: float = 0.2,
    gap: int = 0,
) -> dict[str, Table]:
    """Returns train, validation and test; missing splits are cut from the train split.

    A test split takes 0.2 of all samples, or 0.1 within clients (not in the papers, which use data
    with a test split); validation takes its share of the rest, or of a client's samples.

    Args:
        tables: The source's splits; within clients with a column "client".
        cfg: Gives the seed and the validation share.
        order: How the train split is ordered before it is cut.
        default_validation: The validation share if the configuration gives none.
        gap: Samples left out before each cut.
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
            f"no training sample is left of {len(next(iter(train.values())))}: give more data, or "
            "lower validation_fraction."
        )
    return parts


def _before(cut: int, num: int, gap: int) -> int:
    """Returns the end of a part, with a gap before the next one if there is one."""
    return cut if cut == num else max(0, cut - gap)


def _pieces(train: Table, order: Order, seed: int) -> list[np.ndarray]:
    """Returns rows in the order in which they are cut: all together, or by natural client."""
    rows = np.arange(len(next(iter(train.values()))))
    if order in ("random", "within_clients"):
        rows = np.random.default_rng(derive_seed(seed, "splits")).permutation(rows)
    if order in ("random", "given"):
        return [rows]
    rows = rows[np.argsort(train["client"][rows], kind="stable")]
    _, starts = np.unique(train["client"][rows], return_index=True)
    return np.split(rows, starts[1:])


def take(table: Table, rows: np.ndarray) -> Table:
    """Returns the rows with these indices."""
    return {name: values[rows] for name, values in table.items()}


def to_splits(parts: Mapping[str, Table], to_data: Callable[[Table], TaskData]) -> Splits:
    """Returns the three splits, each made of its table in the same way."""
    return Splits(to_data(parts["train"]), to_data(parts["validation"]), to_data(parts["test"]))
