"""The one entrance to the data sets: a configuration in, three splits out."""

from collections.abc import Callable

from firm.fmoo.config import DataConfig, by_name
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
from firm.fmoo.loaders.tables import adult, river_flow
from firm.fmoo.loaders.text import shakespeare
from firm.fmoo.task_data import LOSSES, Splits, TaskData

__all__ = ["DATASETS", "LOSSES", "DataConfig", "Splits", "TaskData", "load_data"]

_PAIRS = (two_digits, multi_mnist, mnist_fmnist, cifar10_mnist)
_IMAGES = (mnist, fashion_mnist, cifar10, femnist, celeba, celeba5)
_OTHERS = (adult, river_flow, qm9, shakespeare)

DATASETS: dict[str, Callable[[DataConfig], Splits]] = {
    loader.__name__: loader for loader in (*_PAIRS, *_IMAGES, *_OTHERS)
}
"""Loaders by the name that a configuration gives."""


def load_data(cfg: DataConfig) -> Splits:
    """Returns a data set's train, validation and test samples. Equal configurations, equal samples.

    Raises:
        ValueError: An unknown data set, objective or loss, nothing at the path, arrays that do not
            fit the layout, or labels out of range; says what to do.
    """
    loader = by_name(DATASETS, cfg.name, "data set")
    try:
        splits = loader(cfg)
    except ValueError as error:
        raise ValueError(f"data set {cfg.name}: {error}") from error
    parts = (splits.train, splits.validation, splits.test)
    return Splits(*(part.with_losses(cfg.losses) for part in parts)) if cfg.losses else splits
