"""Recipes run where a user runs them: in the clone."""

from pathlib import Path

import pytest

from tests import smoke


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    """Configs name the shipped checkpoints relative to the clone."""
    monkeypatch.chdir(smoke.ROOT)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A finished run of one round of configs/smoke.yaml, which no test changes."""
    return smoke.run("--rounds", 1, "--out", tmp_path_factory.mktemp("runs") / "aligned")
