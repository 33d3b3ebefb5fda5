"""Access to the package's configurations and checkpoints from any working directory."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from firm.base.cache import cache_folder
from firm.base.preferences import NamedShares
from firm.run.errors import UserError

_ROOT = Path(__file__).parents[2]
"""Parent of the package `firm`: a clone, or the folder of installed packages."""

CONFIGS = next(folder for folder in (_ROOT / "firm/configs", _ROOT / "configs") if folder.is_dir())
"""Folder of the shipped configurations: inside an installed package, beside it in a clone."""

FETCHED = "firm/models/"
"""Prefix of the paths of models that `firm fetch` has put into the cache."""

Value = TypeVar("Value")


def find_config(name: str | Path) -> Path:
    """Returns an existing configuration file or, failing that, the shipped one with this name.

    The suffix `.yaml` is optional. Names of shipped files are, for example, `smoke`,
    `fmoo/adult.yaml` or `configs/smoke.yaml`.

    Raises:
        UserError: Neither exists; suggests similar names among shipped and neighbouring files.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.name and not path.suffix and (own := path.with_suffix(".yaml")).is_file():
        return own
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    stem = str(Path(*parts)).removesuffix(".yaml")
    shipped = CONFIGS / f"{stem}.yaml"
    if shipped.is_file():
        return shipped
    if path.exists():  # a folder, or what a program writes to this one
        return path
    names = [str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.rglob("*.yaml")]
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    own = {file.stem: str(file) for file in beside if file.suffix in (".yaml", ".yml")}
    near = [own[stem] for stem in difflib.get_close_matches(path.stem, own)]
    near += difflib.get_close_matches(stem, names)
    near += [name for name in names if path.stem in name.split("/")[-1].split("_")]
    hint = f"did you mean {' or '.join(list(dict.fromkeys(near))[:3])}?"
    if not near:
        nearest = difflib.get_close_matches(stem, names, cutoff=0)
        hint = f"the nearest that ship are {', '.join(nearest)}; `firm configs --all` lists all."
    raise UserError(f"no such file; {hint}")


def path_in_package(path: str | Path) -> str | None:
    """Returns a path relative to the package `firm`; None if it is outside or does not exist.

    >>> path_in_package("firm/miniature/checkpoints/policy")
    'miniature/checkpoints/policy'
    """
    place, package = Path(with_shipped_paths(path)).resolve(), (_ROOT / "firm").resolve()
    is_inside = place.is_relative_to(package) and place.exists()
    return place.relative_to(package).as_posix() if is_inside else None


def fetched_folder(name: str) -> Path:
    """Returns the folder of a fetched model, which may not exist yet."""
    return cache_folder("models", name)


def with_shipped_paths(value: Value) -> Value:
    """Resolves shipped paths in a dataclass or in a value of its fields.

    A string or path that starts with `firm/` and does not exist relative to the working directory
    becomes absolute if the package contains this file or folder; `firm/models/NAME` is the folder
    of a fetched model.
    """
    result: Any = value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value) if field.init)
        old = {name: getattr(value, name) for name in fields}
        new = {name: with_shipped_paths(each) for name, each in old.items()}
        changed = {name: each for name, each in new.items() if each != old[name]}
        result = dataclasses.replace(value, **changed) if changed else value
    elif isinstance(value, Mapping):
        result = {key: with_shipped_paths(each) for key, each in value.items()}
    elif isinstance(value, list | tuple) and not isinstance(value, NamedShares):
        result = type(value)(with_shipped_paths(each) for each in value)
    elif isinstance(value, str | Path) and str(value).startswith("firm/"):
        shipped = _ROOT / value
        if str(value).startswith(FETCHED):
            shipped = fetched_folder(str(value).removeprefix(FETCHED))
        result = type(value)(shipped) if shipped.exists() and not Path(value).exists() else value
    return result
