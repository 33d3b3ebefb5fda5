"""What River Flow and QM9 share: standardised columns, one squared loss for each target."""

import numpy as np
import torch

from firm.fmoo.loaders.sources import Table
from firm.fmoo.loaders.splitting import to_splits
from firm.fmoo.task_data import Splits, TaskData


def regression(
    parts: dict[str, Table], inputs: str, targets: str, objectives: tuple[str, ...]
) -> Splits:
    """Returns splits with one squared loss per target.

    Args:
        parts: Tables of the splits.
        inputs: Column of the inputs.
        targets: Column of the targets, shape [N, M].
        objectives: Names of the M targets.
    """
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
    """Returns columns with mean 0 and standard deviation 1 on "train"; constant ones become 0.

    Args:
        values: Arrays [N, columns] by split.
    """
    mean = values["train"].mean(axis=0, dtype=np.float64)
    std = values["train"].std(axis=0, dtype=np.float64)
    return {split: (part - mean) / np.where(std > 0, std, 1) for split, part in values.items()}
