"""The configuration of data sets, and registries of named components."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, TypeVar

from annotated_types import Interval

from firm.fields import BoundedInt, PositiveInt, Seed, configuration

EntryT = TypeVar("EntryT")
CallableT = TypeVar("CallableT", bound=Callable[..., Any])


@configuration
class DatasetConfig:
    """A data set in its three splits."""

    name: str = "two_digits"
    """The data set, a key of `firm.fmoo.data.DATASETS`, or what a file under `plugins` registers by
    `firm.fmoo.dataset`."""
    path: str | None = None
    """A .npz file or a folder in the layout that `firm.fmoo.loaders` tells, a dataset's folder, or
    its name on the Hugging Face hub; by default the one on the hub, where there is one."""
    second_path: str | None = None
    """The same for the second images of mnist_fmnist (Fashion-MNIST) and cifar10_mnist (MNIST)."""
    seed: Seed = 0
    """Draws splits and pairs of images; apart from the run's seed, so that runs of several seeds
    are on the same data."""
    validation_fraction: Annotated[float | None, Interval(ge=0, le=0.5)] = None
    """Share of the training data that becomes validation data, where the source has none; 0 leaves
    that split empty. By default the papers': 0.2 (FedCMOO, Appendix D.3), 0.1 of each natural
    client's data (FedMGDA+, Section 6.1), and 0 for adult, whose PhD client keeps its 413 rows."""
    pairs_per_image: BoundedInt | None = None
    """Pairs that every first image stands in, where a sample is made of two images; by default 1,
    and 4 for two_digits."""
    losses: dict[str, str] = field(default_factory=dict)
    """Loss by objective where another than the data set's own is wanted, such as {"left": "l2"};
    the keys of `firm.fmoo.data.LOSSES`."""
    image_size: Annotated[int, Interval(ge=1, le=4_096)] = 32
    """Side that CelebA's pictures are scaled to, in pixels. Not in the paper; a .npz file's stay as
    they are."""
    window_stride: PositiveInt = 10
    """Characters between the starts of two samples of shakespeare. Not in the paper; 1 takes all,
    at 640 bytes a character."""


def by_name(table: Mapping[str, EntryT], name: str, what: str) -> EntryT:
    """Returns an entry of a registry, or raises ``ValueError`` with the nearest names."""
    if name not in table:
        near = difflib.get_close_matches(name, table, n=2)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ValueError(
            f"there is no {what} {name!r}{hint}: choose among {', '.join(table)}, or name the file "
            "that registers it under plugins."
        )
    return table[name]


def registering(table: dict[str, Any], name: str, what: str) -> Callable[[CallableT], CallableT]:
    """Returns a decorator that adds a function or class to a registry and leaves it unchanged.

    A redefinition, as when a notebook cell runs twice, replaces the earlier entry.

    Raises:
        ValueError: The name is taken by another.
    """

    def register(entry: CallableT) -> CallableT:
        if name in table and _origin(table[name]) != _origin(entry):
            raise ValueError(f"there is a {what} {name!r} already: choose another name.")
        table[name] = entry
        return entry

    return register


def _origin(entry: Any) -> tuple[str, str]:
    return entry.__module__, entry.__qualname__
