"""Plugins: modules that register strategies and the like when they are imported."""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from firm.federation.outside import printable
from firm.federation.user_code import ENDS, described
from firm.run.errors import UserError


def import_plugin(name: str) -> None:
    """Imports a module, by its name or a Python file's path, so that what it registers is there.

    Raises:
        UserError: There is no such module or file, or it cannot be imported.
    """
    try:
        if name.endswith(".py"):
            import_file(Path(name))
        elif name not in sys.modules:
            _announce("module", name)
            importlib.import_module(name)
    except ENDS:
        raise
    except BaseException as error:  # whatever another's module raises ends in one line
        reason = described(error)
        raise UserError(f"plugins: {name} cannot be imported ({reason}); correct it.") from error


def import_file(file: Path) -> None:
    """Runs a Python file as a module, once in this process, and says so; it may raise anything.

    Raises:
        ImportError: There is no such file, or it is no Python file.
    """
    path = file.expanduser().resolve()
    name = f"firm_plugin_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ImportError("there is no such Python file")
    _announce("file", path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever it was, the module is not imported
        del sys.modules[name]
        raise


def _announce(kind: str, name: object) -> None:
    """Says whose code runs, since a configuration may come from somebody else."""
    if not int(os.environ.get("RANK", 0)):  # one of the launcher's processes speaks for all
        sys.stderr.write(printable(f"runs Python {kind} {name}") + "\n")
