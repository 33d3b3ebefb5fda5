"""Recipes run where a user runs them: in the clone."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    """Configs name the shipped checkpoints relative to the clone."""
    monkeypatch.chdir(Path(__file__).parents[2])
