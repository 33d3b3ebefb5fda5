"""Messages name the packages of an extra, since FIRM itself is not published under its name."""

import tomllib
from pathlib import Path

import pytest

from firm.base import extras
from firm.base.extras import install_command

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"all"}))
def test_the_command_names_the_packages_of_the_extra_alone(extra):
    words = install_command(extra).split()
    assert words[:2] == ["pip", "install"]
    named = sorted(word.strip("'").split("<")[0].split(">")[0] for word in words[2:])
    wanted = sorted(line.split("<")[0].split(">")[0] for line in EXTRAS[extra])
    assert [_plain(name) for name in named] == [_plain(name) for name in wanted]


def _plain(name):
    return name.lower().replace("_", "-")


def test_without_metadata_the_folder_is_named(monkeypatch):
    monkeypatch.setattr(extras, "requires", lambda name: None)
    assert install_command("real") == "pip install '.[real]' in FIRM's folder"
