"""Fixtures that every test may use, and the quiet, offline world that tests run in."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")

torch.set_num_threads(1)  # bit-for-bit promises hold at one thread count


@pytest.fixture(scope="session")
def firm_data() -> Path:
    """The folder of real data that FIRM_DATA names; skips, saying so, without it."""
    folder = os.environ.get("FIRM_DATA")
    if not folder:
        pytest.skip("FIRM_DATA is not set: no folder of real data to test on")
    return Path(folder)
