"""Loads data sets: from a configuration to train, validation and test splits."""

from collections.abc import Callable

import numpy as np
import torch

from firm.base.user_code import user_code
from firm.fmoo.config import DATASETS, CallableT, DatasetConfig
from firm.fmoo.loaders.faces import celeba, celeba5
from firm.fmoo.loaders.images import (
    cifar10,
    cifar10_mnist,
    fashion_mnist,
    femnist,
    mnist,
    mnist_fmnist,
    multi_mnist,
    two_digits,
)
from firm.fmoo.loaders.molecules import qm9
from firm.fmoo.loaders.splitting import complete_splits
from firm.fmoo.loaders.tables import adult, river_flow
from firm.fmoo.loaders.text import shakespeare
from firm.fmoo.task_data import LOSSES, Splits, TaskData

__all__ = ["DATASETS", "LOSSES", "DatasetConfig", "Splits", "TaskData", "dataset", "load_data"]

_PAIRS = (two_digits, multi_mnist, mnist_fmnist, cifar10_mnist)
_IMAGES = (mnist, fashion_mnist, cifar10, femnist, celeba, celeba5)
_OTHERS = (adult, river_flow, qm9, shakespeare)

for _loader in (*_PAIRS, *_IMAGES, *_OTHERS):
    DATASETS.add(_loader.__name__, _loader)


def dataset(name: str) -> Callable[[CallableT], CallableT]:
    """Returns a decorator that registers a data set under a name, for ``data.name``.

    The function takes a ``DatasetConfig`` with the study's path and seed, and returns ``Splits`` or
    all samples as one ``TaskData``. In the latter case the test split gets 0.1 of each natural
    client's samples, or 0.2 of all samples without natural clients, and the validation split
    ``validation_fraction`` of them, by default none.

    Raises:
        ValueError: When the name is taken.
    """
    return DATASETS.register(name)


def load_data(cfg: DatasetConfig) -> Splits:
    """Returns train, validation and test samples; equal configurations give equal samples.

    Raises:
        ValueError: When the data set, an objective or a loss is unknown, the path does not exist,
            arrays do not match the layout, labels are out of range, or a user's function raises;
            states the remedy.
    """
    loader = DATASETS[cfg.name]
    try:
        with user_code("its function", but=(ValueError, OSError)):
            loaded = loader(cfg)
        splits = _cut(loaded, cfg) if isinstance(loaded, TaskData) else loaded
        if not isinstance(splits, Splits):
            raise ValueError(
                f"its function must return Splits or TaskData, got {type(splits).__name__}."
            )
    except ValueError as error:
        raise ValueError(f"data set {cfg.name}: {error}") from error
    parts = (splits.train, splits.validation, splits.test)
    return Splits(*(part.with_losses(cfg.losses) for part in parts)) if cfg.losses else splits


def _cut(data: TaskData, cfg: DatasetConfig) -> Splits:
    """Splits a source without splits in the same way as the tabular data sets."""
    table = {"row": np.arange(len(data))}
    if data.natural is not None:
        table["client"] = data.natural.numpy()
    order = "random" if data.natural is None else "within_clients"
    parts = complete_splits({"train": table}, cfg, order=order, default_validation=0.0)
    rows = {name: torch.from_numpy(part["row"]) for name, part in parts.items()}
    return Splits(**{name: data.take(indices) for name, indices in rows.items()})
