"""Image data sets: two images per sample with one objective each, or one class label."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from firm.fmoo.config import DatasetConfig
from firm.fmoo.loaders.composition import draw_pairs, paste_centre, paste_corners
from firm.fmoo.loaders.sources import Layout, Table, read_tables
from firm.fmoo.loaders.splitting import (
    as_images,
    as_labels,
    complete_splits,
    number_clients,
    take,
    to_splits,
)
from firm.fmoo.task_data import Splits, TaskData

MNIST = Layout(("x", "y"), {"x": ("image",), "y": ("label",)}, "ylecun/mnist", "x")
FASHION_MNIST = Layout(
    ("x", "y"), {"x": ("image",), "y": ("label",)}, "zalando-datasets/fashion_mnist", "x"
)
CIFAR10 = Layout(
    ("x", "y"), {"x": ("img", "image"), "y": ("label",)}, "uoft-cs/cifar10", "x", channels=3
)
FEMNIST = Layout(
    ("x", "y", "writer"),
    {"x": ("image",), "y": ("character", "label"), "writer": ("writer_id", "writer")},
    "flwrlabs/femnist",
    "x",
)

Paste = Callable[[np.ndarray, np.ndarray], np.ndarray]


# --- Two images in one ----------------------------------------------------------------------------


def two_digits(cfg: DatasetConfig) -> Splits:
    """Returns the built-in default: pairs of scikit-learn's 8 x 8 handwritten digits.

    The digits are at (0, 0) and (6, 6) of 16 x 16 pixels and overlap in two rows and columns.
    """
    from sklearn.datasets import load_digits  # takes a second to import

    digits: Any = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # from 0..16 to 0..255
    table = {"x": pixels[:, None], "y": digits.target.astype(np.int64)}
    parts = complete_splits({"train": table}, cfg, order="random")
    paste = partial(paste_corners, offset=6, canvas=16, size=16)
    return _pair_images(parts, parts, ("left", "right"), paste, cfg, default_pairs=4)


def multi_mnist(cfg: DatasetConfig) -> Splits:
    """Returns MultiMNIST: pairs of digits."""
    digits = _ten_classes(cfg, cfg.path, MNIST, side=28)
    return _pair_images(digits, digits, ("left", "right"), _paste_28, cfg)


def mnist_fmnist(cfg: DatasetConfig) -> Splits:
    """Returns MNIST+FMNIST: a digit top left and a piece of clothing bottom right."""
    digits = _ten_classes(cfg, cfg.path, MNIST, side=28)
    clothes = _ten_classes(cfg, cfg.second_path, FASHION_MNIST, side=28)
    return _pair_images(digits, clothes, ("mnist", "fashion_mnist"), _paste_28, cfg)


def cifar10_mnist(cfg: DatasetConfig) -> Splits:
    """Returns CIFAR10+MNIST, which the FedCMOO paper also calls CIFAR10+FMNIST."""
    pictures = _ten_classes(cfg, cfg.path, CIFAR10, side=32)
    digits = _ten_classes(cfg, cfg.second_path, MNIST, side=28)
    paste = partial(paste_centre, opacity=0.6)
    return _pair_images(pictures, digits, ("cifar10", "mnist"), paste, cfg)


_paste_28 = partial(paste_corners, offset=6, canvas=36, size=28)


def _pair_images(
    left: Mapping[str, Table],
    right: Mapping[str, Table],
    objectives: tuple[str, str],
    paste: Paste,
    cfg: DatasetConfig,
    *,
    default_pairs: int = 1,
) -> Splits:
    """Pairs images within each split, so that no image is in two splits."""
    per_image = cfg.pairs_per_image or default_pairs

    def pair(split: str) -> TaskData:
        sizes = len(left[split]["y"]), len(right[split]["y"])
        picks = draw_pairs(*sizes, per_image, seed=cfg.seed, name=split)
        first, second = take(left[split], picks[0]), take(right[split], picks[1])
        return TaskData(
            inputs=torch.from_numpy(paste(first["x"], second["x"])),
            targets=torch.from_numpy(np.stack([first["y"], second["y"]], axis=1)),
            objectives=objectives,
            losses=("cross_entropy", "cross_entropy"),
            groups=torch.from_numpy(10 * first["y"] + second["y"]),
            num_outputs=(10, 10),
        )

    return Splits(pair("train"), pair("validation"), pair("test"))


# --- One objective --------------------------------------------------------------------------------


def mnist(cfg: DatasetConfig) -> Splits:
    """Returns MNIST with one objective."""
    return to_splits(_ten_classes(cfg, cfg.path, MNIST, side=28), _class)


def fashion_mnist(cfg: DatasetConfig) -> Splits:
    """Returns Fashion-MNIST with one objective."""
    return to_splits(_ten_classes(cfg, cfg.path, FASHION_MNIST, side=28), _class)


def cifar10(cfg: DatasetConfig) -> Splits:
    """Returns CIFAR-10 with one objective."""
    return to_splits(_ten_classes(cfg, cfg.path, CIFAR10, side=32), _class)


def femnist(cfg: DatasetConfig) -> Splits:
    """Returns Federated EMNIST: 62 classes of characters, by writer."""
    tables = _with_classes(read_tables(cfg.path, FEMNIST), channels=1, side=28, num_classes=62)
    names = number_clients(tables, "writer")
    parts = complete_splits(tables, cfg, order="within_clients", default_validation=0.1)
    return to_splits(
        parts,
        lambda part: _class(
            part, 62, natural=torch.from_numpy(part["client"]), natural_names=names
        ),
    )


def _class(part: Table, num_classes: int = 10, **users: Any) -> TaskData:
    return TaskData(
        inputs=torch.from_numpy(part["x"]),
        targets=torch.from_numpy(part["y"][:, None]),
        objectives=("class",),
        losses=("cross_entropy",),
        groups=torch.from_numpy(part["y"]),
        num_outputs=(num_classes,),
        **users,
    )


def _ten_classes(
    cfg: DatasetConfig, path: str | None, layout: Layout, *, side: int
) -> dict[str, Table]:
    tables = read_tables(path, layout)
    tables = _with_classes(tables, channels=layout.channels, side=side, num_classes=10)
    return complete_splits(tables, cfg, order="random")


def _with_classes(
    tables: dict[str, Table], *, channels: int, side: int, num_classes: int
) -> dict[str, Table]:
    for table in tables.values():
        table["x"] = as_images(table["x"], channels=channels, side=side)
        table["y"] = as_labels(table["y"], num_classes=num_classes)
    return tables
