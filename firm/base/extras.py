"""Optional packages: the command that installs those of an extra, for messages."""

import shlex
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra.

    It names the packages themselves: FIRM is installed from a clone or a wheel, and its name on the
    Python package index belongs to nobody yet.

    >>> install_command("explore")
    "pip install 'gradio<7,>=6'"
    """
    try:
        needs = [Requirement(line) for line in requires("firm-align") or ()]
    except PackageNotFoundError:  # imported from a folder without being installed
        needs = []
    names = [
        str(Requirement(str(need).partition(";")[0]))
        for need in needs
        if need.marker and need.marker.evaluate({"extra": extra})
        if not need.marker.evaluate({"extra": ""})
    ]
    if not names:
        return f"pip install '.[{extra}]' in FIRM's folder"
    return f"pip install {shlex.join(names)}"
