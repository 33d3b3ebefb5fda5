"""The user's cache folder, for what can be computed or downloaded again."""

import os
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """Returns a folder below `$XDG_CACHE_HOME/firm`, by default `~/.cache/firm`."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home.joinpath("firm", *parts)
