"""A real model that some tests need: SmolLM2-135M-Instruct, or that of FIRM_MODEL."""

import os
from pathlib import Path

import pytest

from firm.base.cache import cache_folder


def real_model() -> str:
    """Returns the model's folder, or skips the test if there is none."""
    folder = Path(os.environ.get("FIRM_MODEL") or cache_folder("models") / "smollm2")
    if not (folder / "config.json").is_file():
        pytest.skip(f"there is no model in {folder}: run `firm fetch smollm2`, or set FIRM_MODEL")
    return str(folder)
