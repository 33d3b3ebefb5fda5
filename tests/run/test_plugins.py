import os
import sys
from dataclasses import dataclass, field

import pytest

from firm.base.user_code import import_file
from firm.federation.strategies import StrategyConfig
from firm.federation.strategy_configs import FirmConfig
from firm.run import compose, parse, to_yaml
from firm.run.errors import UserError

PLUGIN = '''
from dataclasses import dataclass
from typing import Any, Literal

from firm.federation.strategies import STRATEGIES, StrategyConfig, strategy


@dataclass(frozen=True)
class NewcomerConfig(StrategyConfig):
    """Does nothing."""

    name: Literal["newcomer"] = "newcomer"
    """The strategy."""
    gain: float = 1.0
    """A key of its own."""


@strategy
def newcomer(state, clients, engine, cfg: NewcomerConfig) -> tuple[Any, dict[str, Any]]:
    return state, {}
'''


@dataclass(frozen=True)
class Config:
    """A run."""

    plugins: tuple[str, ...] = ()
    """Modules or files."""
    strategy: StrategyConfig = field(default_factory=FirmConfig)
    """A round."""


@pytest.fixture
def plugin(tmp_path, new_plugins):
    path = tmp_path / "newcomer.py"
    path.write_text(PLUGIN)
    return path


def test_a_file_registers_a_strategy_before_other_keys_are_read(plugin, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(f"strategy: {{name: newcomer, gain: 2}}\nplugins: [{plugin}]\n")
    config = compose(Config, [file], [])
    assert config.strategy.name == "newcomer"
    assert to_yaml(config.strategy).endswith("gain: 2.0\n")
    again = parse(Config, ["--strategy.name", "newcomer", "--plugins", str(plugin)])
    assert type(again.strategy) is type(config.strategy)
    with pytest.raises(UserError, match=r"unknown key strategy\.beta"):
        compose(Config, [file], [("strategy.beta", 0.1)])
    with pytest.raises(SystemExit):
        parse(Config, ["--help", "all"])
    assert "--strategy.gain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"newcomer\.py cannot be imported \(ZeroDivisionError"),
        (
            "\nraise SystemExit",
            r"newcomer\.py cannot be imported \(SystemExit \(.*newcomer\.py:2\)",
        ),
        ("class Odd(BaseException): pass\nraise Odd", r"newcomer\.py cannot be imported \(Odd"),
        ("if x", r"cannot be imported \(SyntaxError: expected ':' \(.*newcomer\.py:1\)\)"),
    ],
)
def test_a_plugin_that_fails_ends_in_one_line(plugin, text, message):
    plugin.write_text(text)
    with pytest.raises(UserError, match=message):
        compose(Config, [], [("plugins", [str(plugin)])])


def test_a_file_that_was_edited_within_a_second_is_read_again(tmp_path, monkeypatch):
    """Bytecode belongs to a file by its size and whole seconds."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (1e9, 1e9))
        import_file(file)
        (name,) = (name for name in sys.modules if name.startswith("firm_plugin_mine_"))
        assert value == sys.modules.pop(name).VALUE


def test_a_plugin_that_is_missing_ends_in_one_line(tmp_path):
    for name in (str(tmp_path / "none.py"), "no_such_module_of_anybody"):
        with pytest.raises(UserError, match=r"plugins: .* cannot be imported"):
            compose(Config, [], [("plugins", f"[{name}]")])
    with pytest.raises(UserError, match=r"plugins must be a list of str, got \{}"):
        compose(Config, [], [("plugins", "{}")])
