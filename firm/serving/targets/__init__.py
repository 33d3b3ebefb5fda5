"""Engines that a run can be exported for: one file each, which has its name and a ``TARGET``."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from firm.serving.export_target import ExportTarget

    TargetName = str
else:
    # found without importing the files, since each needs its engine's formats
    TargetName = Literal[tuple(module.name for module in iter_modules(__path__))]


def target(name: TargetName) -> "ExportTarget":
    """Returns the target with a name."""
    return import_module(f"{__name__}.{name}").TARGET
