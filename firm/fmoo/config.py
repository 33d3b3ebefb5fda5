"""Configuration of data sets, and the registry of their loaders."""

from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any, TypeVar

from annotated_types import Interval

from firm.base.fields import BoundedInt, PositiveInt, Seed, configuration
from firm.base.registry import OneOf, Registry

CallableT = TypeVar("CallableT", bound=Callable[..., Any])

DATASETS: Registry[str, Callable[["DatasetConfig"], Any]] = Registry("data set")
"""Loaders by the name that a configuration gives; `firm.fmoo.data` has the shipped ones."""


@configuration
class DatasetConfig:
    """Data set, and how it is split into train, validation and test samples."""

    name: Annotated[str, OneOf(DATASETS)] = "two_digits"
    """Data set. A file under `plugins` may register others with `firm.fmoo.dataset`."""
    path: str | None = None
    """A .npz file or a folder in the layout described in `firm.fmoo.loaders`, a Hugging Face
    dataset's folder, or its name on the hub; by default the data set's copy on the hub, if there is
    one."""
    second_path: str | None = None
    """Path of the second images of mnist_fmnist (Fashion-MNIST) and cifar10_mnist (MNIST)."""
    seed: Seed = 0
    """Seed of the splits and image pairs; separate from the run's seed, so that runs with different
    seeds use the same data."""
    validation_fraction: Annotated[float | None, Interval(ge=0, le=0.5)] = None
    """Share of the training data used for validation if the source has no validation split; 0
    leaves the split empty. Defaults follow the papers: 0.2 (FedCMOO, Appendix D.3), 0.1 of each
    natural client's data (FedMGDA+, Section 6.1), and 0 for adult, whose PhD client has only 413
    rows."""
    pairs_per_image: BoundedInt | None = None
    """Pairs per first image, for data sets whose samples combine two images; by default 1, and 4
    for two_digits."""
    losses: dict[str, str] = field(default_factory=dict)
    """Overrides the loss of objectives, such as {"left": "l2"}, with keys of
    `firm.fmoo.data.LOSSES`."""
    image_size: Annotated[int, Interval(ge=1, le=4_096)] = 32
    """Side length in pixels to which CelebA's images are resized. Not in the paper; images in a
    .npz file are not resized."""
    window_stride: PositiveInt = 10
    """Characters between the starts of consecutive samples of shakespeare. Not in the paper; 1 uses
    all samples, at 640 bytes of memory per character."""
