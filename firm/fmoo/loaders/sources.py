"""Reads tables of arrays from `.npz` files, dataset folders and the Hugging Face hub.

A table is a dictionary of arrays of equal length; each split of the source is a table. A `.npz`
file holds the arrays of a split under `NAME_train`, `NAME_validation` and `NAME_test`, or under
`NAME` if the data have no splits.
"""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetsError

Table = dict[str, np.ndarray]

SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "test": "test"}
"""Names of splits in sources, mapped to ours."""


@dataclass(frozen=True)
class Layout:
    """Location of a table's columns."""

    arrays: tuple[str, ...]
    """Names in a `.npz` file, without the split; also the column names of the table."""
    columns: Mapping[str, tuple[str, ...]] | None = None
    """For each name, the columns of a Hugging Face dataset that may hold it, tried in order; None
    if there is no such dataset."""
    hub: str | None = None
    """The dataset on the Hugging Face hub."""
    image: str | None = None
    """Name of the image column."""
    channels: int = 1
    """Channels of the images."""

    def in_words(self) -> str:
        """Describes the required contents of a path, for error messages."""
        names = " ".join(self.arrays)
        text = f"a .npz file with the arrays {names} (each with _train, _test, or neither)"
        if self.columns:
            listed = [" or ".join(options) for options in self.columns.values()]
            more = f" and {len(listed) - 3} more" if len(listed) > 4 else ""
            columns = ", ".join(listed[:3] if more else listed)
            text += f", or a dataset's folder with the columns {columns}{more}"
        return text


def read_tables(
    path: str | None, layout: Layout, *, image_size: int | None = None, stride: int = 1
) -> dict[str, Table]:
    """Returns the splits of a source by name: "train", and the others if present.

    Args:
        path: A `.npz` file, a folder with one, a dataset's folder or its name on the hub; None for
            the layout's dataset on the hub.
        layout: Columns to read.
        image_size: Side to which a dataset's images are resized; does not apply to `.npz` files.
        stride: Takes every n-th row of a dataset.

    Raises:
        ValueError: When the path is missing, unreadable or does not match the layout; names the
            required contents.
    """
    file = find_file(path, "*.npz")
    if file is not None:
        return read_npz(file, layout.arrays)
    name = path or layout.hub
    if name is None or layout.columns is None:
        raise ValueError(
            f"this data set is not on the hub, got path {path}: provide {layout.in_words()}."
        )
    opened = _open(name, layout)
    return {split: _read(rows, name, layout, image_size, stride) for split, rows in opened.items()}


def find_file(path: str | None, pattern: str) -> Path | None:
    """Returns the file at a path, or the file with the pattern in the folder at the path.

    None if there is no such file, as for a dataset's folder or a name on the hub.
    """
    if path is None:
        return None
    place = Path(path).expanduser()
    if place.is_file() and place.match(pattern):
        return place
    if place.is_dir():
        files = sorted(place.glob(pattern))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{path} contains several {pattern} files: choose one of {names}.")
        return files[0] if files else None
    if place.exists():
        raise ValueError(f"{path} is not a {pattern} file: provide one, or its folder.")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ValueError(f"there is no file or folder {path}: provide the path of the data.")
    return None


def read_npz(file: Path, arrays: tuple[str, ...]) -> dict[str, Table]:
    """Returns the splits of a `.npz` file after checking its arrays."""
    try:
        with np.load(file, allow_pickle=False) as content:
            held = {name: content[name] for name in content.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{file} is not a readable .npz file ({reason}): save it again.") from None
    tables: dict[str, Table] = {}
    if all(name in held for name in arrays):
        tables["train"] = {name: held[name] for name in arrays}
    else:
        for split in ("train", "validation", "test"):
            if any(f"{name}_{split}" in held for name in arrays):
                tables[split] = {
                    name: held[f"{name}_{split}"] for name in arrays if f"{name}_{split}" in held
                }
    lacking = [name for name in arrays if name not in tables.get("train", {})]
    lacking += [f"{n}_{s}" for s, t in tables.items() if s != "train" for n in arrays if n not in t]
    if lacking:
        raise ValueError(
            f"{file} lacks {', '.join(lacking)}, got the arrays {', '.join(held)}: name them "
            f"{', '.join(arrays)}, each with _train and _test or neither."
        )
    for split, table in tables.items():
        lengths = {name: len(values) for name, values in table.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"the {split} arrays of {file} differ in length, got {lengths}: they must hold "
                "one entry per sample."
            )
    return tables


def _open(name: str, layout: Layout) -> dict[str, datasets.Dataset]:
    try:
        if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            opened: Any = datasets.load_from_disk(name)
        else:
            opened = datasets.load_dataset(name)
    except (OSError, ValueError, DatasetsError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"no data at {name}: there is no such file, and no dataset could be loaded ({reason}): "
            f"provide the path of {layout.in_words()}."
        ) from None
    if isinstance(opened, datasets.Dataset):
        opened = {"train": opened}
    splits = {SPLITS[split]: rows for split, rows in opened.items() if split in SPLITS}
    if "train" not in splits:
        raise ValueError(f"{name} has no split train, got {', '.join(map(str, opened))}.")
    return splits


def _read(
    rows: datasets.Dataset, name: str, layout: Layout, image_size: int | None, stride: int
) -> Table:
    assert layout.columns is not None
    if stride > 1:
        rows = rows.select(range(0, len(rows), stride))
    table = {}
    for ours, options in layout.columns.items():
        column = next((option for option in options if option in rows.column_names), None)
        if column is None:
            raise ValueError(
                f"{name} has no column {' or '.join(options)}, got "
                f"{', '.join(rows.column_names)}: rename the column that holds it."
            )
        chosen = rows.select_columns(column)
        if ours == layout.image:
            table[ours] = _read_images(chosen, column, name, layout.channels, image_size)
        else:
            table[ours] = np.asarray(chosen.with_format("numpy")[:][column])
    return table


def _read_images(
    rows: datasets.Dataset, column: str, name: str, channels: int, image_size: int | None
) -> np.ndarray:
    is_picture = isinstance(rows.features[column], datasets.Image)
    mode = "L" if channels == 1 else "RGB"
    parts = []
    try:
        # in batches: full-size images take a hundred times the memory of the resized ones
        for batch in rows.iter(batch_size=1000):
            values: Any = batch[column]  # pyright: ignore[reportArgumentType, reportCallIssue]
            if is_picture:
                pictures = [picture.convert(mode) for picture in values]
                if image_size is not None:
                    pictures = [picture.resize((image_size, image_size)) for picture in pictures]
                values = [np.asarray(picture) for picture in pictures]
            parts.append(np.asarray(values, dtype=np.uint8))
        return np.concatenate(parts)
    except ImportError:
        raise ValueError(
            f"the images of {name} are stored as image files, which requires Pillow: "
            "pip install pillow, or convert them to a .npz file."
        ) from None
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"the images of {name} cannot be stacked into a uint8 array ({error}): they must all "
            "have the same size, with pixels from 0 to 255."
        ) from None
