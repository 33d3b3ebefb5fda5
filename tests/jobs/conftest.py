"""Recipes run where a user runs them: in the clone."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from firm.fronts import Front
from tests import smoke


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    """Configs name the shipped checkpoints relative to the clone."""
    monkeypatch.chdir(smoke.ROOT)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A finished run of one round of configs/smoke.yaml, which no test changes."""
    return smoke.run("--rounds", 1, "--out", tmp_path_factory.mktemp("runs") / "aligned")


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A finished run of configs/smoke.yaml whose policy is conditioned; no test changes it."""
    return smoke.run(*smoke.FRONT, "--out", tmp_path_factory.mktemp("front") / "run")


@pytest.fixture(scope="session")
def bent(trained, tmp_path_factory) -> Path:
    """The same run with rewards that make targets differ from preferences, all of them sound.

    No test changes it.
    """
    place = Path(shutil.copytree(trained, tmp_path_factory.mktemp("front") / "bent"))
    front = Front.load(place / "front.json")
    points = []
    for point in front.points:
        first, _ = point.preference or ()
        rewards = dict(zip(front.objectives, (first**2, 1 - first**2), strict=True))
        points.append(replace(point, rewards=rewards, collapse=None))
    unknown = {"validation": {}, "test_values": {}, "validation_values": {}}
    replace(front, points=tuple(points), **unknown).save(place / "front.json")
    return place


@pytest.fixture(scope="session")
def strong(bent, tmp_path_factory) -> Path:
    """The bent run, with an adapter that answers differently at each preference.

    No test changes it.
    """
    place = Path(shutil.copytree(bent, tmp_path_factory.mktemp("front") / "strong"))
    slopes = load_file(place / "adapter/conditioned.safetensors")
    slopes = {name: 200 * value for name, value in slopes.items()}
    save_file(slopes, place / "adapter/conditioned.safetensors")
    return place
