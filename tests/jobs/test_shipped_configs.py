"""The command in the header of every shipped configuration works from any folder."""

import re
import shlex
from pathlib import Path

import pytest

from firm.cli.main import COMMANDS
from firm.jobs.configs import StudyConfig, SweepConfig
from firm.jobs.network_config import FederationConfig, run_config
from firm.jobs.study import study_configs
from firm.jobs.sweep import sweep_configs
from firm.run import to_dict
from firm.run.shipped import CONFIGS, FETCHED, with_shipped_paths

FILES = {str(file.relative_to(CONFIGS).with_suffix("")): file for file in CONFIGS.rglob("*.yaml")}


def header_commands(file):
    """Returns command and arguments of what a header tells to run."""
    text = file.read_text().replace("\\\n#", "")
    found = re.findall(r"^# +firm (.+?)(?: +#.*)?$", text, re.MULTILINE)
    return [shlex.split(command) for command in found]


def parsed(name, arguments):
    """Returns the configuration that a command would run with."""
    if name == "network":
        return COMMANDS[f"network {arguments[0]}"].parse(arguments[1:])
    one_seed = ["--seeds", "[0]"] if name in ("study", "sweep") else []
    return COMMANDS[name].parse([*arguments, *one_seed])


def runs_of(cfg):
    """Returns the runs of which a configuration consists, or itself."""
    if isinstance(cfg, StudyConfig):
        return [*study_configs(cfg).values()]
    if isinstance(cfg, SweepConfig):
        return [*sweep_configs(cfg, Path("out")).values()]
    return [run_config(cfg.run, cfg.overrides)] if isinstance(cfg, FederationConfig) else [cfg]


def texts(value):
    """Yields all texts in plain data."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("name", FILES)
def test_the_commands_of_its_header_find_all_they_need_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = header_commands(FILES[name])
    assert commands
    for command, *arguments in commands:
        for run in runs_of(parsed(command, arguments)):
            inside = [text for text in texts(to_dict(with_shipped_paths(run))) if "firm/" in text]
            assert all(Path(text).exists() for text in inside if not text.startswith(FETCHED))


@pytest.mark.parametrize("name", FILES)
def test_its_header_names_it(name):
    arguments = [word for command in header_commands(FILES[name]) for word in command]
    default = {"miniature": ["align"], "fmoo/two_digits": ["classic"]}.get(name)
    named = {name, f"{name}.yaml", f"configs/{name}.yaml"}
    assert arguments == default or named & {*arguments}
