"""Tabular data sets: Adult by domain, and River Flow with eight targets."""

import numpy as np
import torch

from firm.fmoo.config import DatasetConfig
from firm.fmoo.loaders.sources import Layout, Table, read_tables
from firm.fmoo.loaders.splitting import as_labels, as_matrix, complete_splits, to_splits
from firm.fmoo.task_data import Splits, TaskData

ADULT = Layout(("X", "y", "domain"))
RIVER_FLOW = Layout(("X", "Y"))

CLIP = 10.0
"""River Flow is clipped at this many standard deviations: of 72 columns only NASI2's exceed 6, by
one reading at 68, which alone would dominate every squared loss."""


def adult(cfg: DatasetConfig) -> Splits:
    """Returns Adult: income above 50K from binary features, with two clients, other and phd."""
    tables = read_tables(cfg.path, ADULT)
    for table in tables.values():
        table["X"] = as_matrix(table["X"], "X")
        for name in ("y", "domain"):
            table[name] = as_labels(table[name], num_classes=2)

    def data(part: Table) -> TaskData:
        return TaskData(
            inputs=torch.from_numpy(part["X"]),
            targets=torch.from_numpy(part["y"].astype(np.float32)[:, None]),
            objectives=("income",),
            losses=("binary",),
            groups=torch.from_numpy(part["y"]),
            natural=torch.from_numpy(part["domain"]),
            natural_names=("other", "phd"),
        )

    # no validation split by default: the PhD client has only 413 rows
    return to_splits(complete_splits(tables, cfg, order="random", default_validation=0.0), data)


def river_flow(cfg: DatasetConfig) -> Splits:
    """Returns River Flow: the flow at eight gauges, 48 hours ahead; tested on the last rows.

    Drops rows with NaN. Features and targets are standardised on the training split and clipped at
    ``CLIP``.
    """
    tables = read_tables(cfg.path, RIVER_FLOW)
    for table in tables.values():
        table["X"], table["Y"] = as_matrix(table["X"], "X"), as_matrix(table["Y"], "Y")
        is_whole = ~np.isnan(table["X"]).any(axis=1) & ~np.isnan(table["Y"]).any(axis=1)
        table["X"], table["Y"] = table["X"][is_whole], table["Y"][is_whole]
    parts = complete_splits(tables, cfg, order="given")
    for name in ("X", "Y"):
        scaled = standardise({split: part[name] for split, part in parts.items()})
        for split, values in scaled.items():
            parts[split][name] = np.clip(values, -CLIP, CLIP)
    gauges = ("CHSI2", "NASI2", "EADM7", "SCLM7", "CLKM7", "VALI2", "NAPM7", "DLDI4")
    num_targets = parts["train"]["Y"].shape[1]
    if num_targets != len(gauges):
        raise ValueError(f"River Flow has 8 targets, got Y with {num_targets} columns.")
    return regression(parts, "X", "Y", gauges)


def regression(
    parts: dict[str, Table], inputs: str, targets: str, objectives: tuple[str, ...]
) -> Splits:
    """Returns splits with these columns and one squared loss per target."""
    return to_splits(
        parts,
        lambda part: TaskData(
            inputs=torch.from_numpy(part[inputs].astype(np.float32)),
            targets=torch.from_numpy(part[targets].astype(np.float32)),
            objectives=objectives,
            losses=("squared",) * len(objectives),
        ),
    )


def standardise(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scales columns to mean 0 and standard deviation 1 on "train"; constant columns become 0."""
    mean = values["train"].mean(axis=0, dtype=np.float64)
    std = values["train"].std(axis=0, dtype=np.float64)
    return {split: (part - mean) / np.where(std > 0, std, 1) for split, part in values.items()}
