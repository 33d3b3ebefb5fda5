"""Public names of packages, imported when they are first used (PEP 562).

A package lists its names for readers and type checkers under ``if TYPE_CHECKING``, and defines
``__getattr__ = lazy(__name__)``. Importing one of its modules then imports nothing else of it:
a report needs no torch, and a round no strategy but its own.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(package: str) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``, which imports a name from the module that defines it.

    The modules are read from the package's own ``if TYPE_CHECKING`` block, so that each name is
    written once, as with the stub files of ``lazy_loader`` (SPEC 1).
    """

    @cache
    def modules() -> dict[str, str]:
        file = sys.modules[package].__file__
        assert file is not None
        return _imported_for_types(Path(file).read_text(encoding="utf-8"))

    def __getattr__(name: str) -> Any:
        if name.startswith("__") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


def _imported_for_types(source: str) -> dict[str, str]:
    """Returns the module of each name that a source imports under ``if TYPE_CHECKING``."""
    blocks = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        alias.name: node.module
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
