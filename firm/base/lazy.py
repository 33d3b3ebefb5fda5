"""Public names of packages, imported when they are first used (PEP 562).

A package lists its names for readers and type checkers under ``if TYPE_CHECKING``, and defines
``__getattr__, __dir__ = lazy(__name__)``. Importing one of its modules then imports only what that
module needs.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's ``__getattr__`` and ``__dir__``.

    The first imports a name from the module that defines it, the second lists all names.

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

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules()})

    return __getattr__, __dir__


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
