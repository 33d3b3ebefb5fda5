"""Outlines of configurations, which report typos without importing the job."""

import re
import subprocess
import sys
from dataclasses import MISSING

import pytest

from firm.cli import outlines, outlining
from firm.cli.main import COMMANDS, load
from firm.run.command_line import check
from firm.run.config import init_fields
from firm.run.errors import UserError
from firm.run.resuming import run_to_resume
from firm.run.shipped import CONFIGS

HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "cvxpy", "scipy"}
CONFIG_CLASSES = {command.config: load(command.config) for command in COMMANDS.values()}


def outline_of(place):
    return getattr(outlines, place.partition(":")[2])


def test_the_outlines_are_those_of_the_configurations():
    text = outlining.FILE.read_text(encoding="utf-8")
    assert text == outlining.outlines(), "run: python -m firm.cli.help_pages"


@pytest.mark.parametrize("place", CONFIG_CLASSES)
def test_an_outline_has_the_keys_of_its_configuration_in_order(place):
    own, outlined = (init_fields(kind) for kind in (CONFIG_CLASSES[place], outline_of(place)))
    assert [f.name for f in own] == [f.name for f in outlined]
    required = [
        [f.name for f in fields if f.default is MISSING and f.default_factory is MISSING]
        for fields in (own, outlined)
    ]
    assert required[0] == required[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--roundz", "3"],
        ["--strategy.bta", "3"],
        ["--rounds", "many"],
        ["--rounds", "-1"],
        ["--strategy.name", "frim"],
        ["--estimator.name", "dpo", "--estimator.clip_range", "0.2"],
        ["--engine", "lokal"],
        ["--policy.lora.dropout", "1.5"],
        ["--rewards.helpful.paht", "x"],
        ["--evaluation.num_test_prompts", "1"],
        ["--data.train.reader", "no"],
        ["--rounds"],
        ["--config", "no_such_file"],
        ["words"],
        ["--allow_code"],
    ],
    ids=" ".join,
)
def test_a_typo_is_reported_as_by_the_configuration_itself(words):
    words = words if "--config" in words else ["--config", "smoke", *words]
    if words[-1] == "words":
        words = words[-1:]
    with pytest.raises(UserError) as told:
        COMMANDS["align"].parse(words)
    with pytest.raises(UserError) as checked:
        check(outline_of(COMMANDS["align"].config), words, resumed=run_to_resume)
    assert str(checked.value) == str(told.value)


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in CONFIGS.glob("*.yaml") if "\npolicy:" in path.read_text())
)
def test_the_outline_accepts_every_shipped_configuration(name):
    words = ["--config", "smoke", "--config", name]  # some add to another one
    check(outline_of(COMMANDS["align"].config), words, resumed=run_to_resume)


def test_keys_of_plugins_are_left_to_the_configuration(tmp_path):
    plugin = tmp_path / "plugin.py"
    words = ["--config", "smoke", "--plugins", f"[{plugin}]", "--strategy.name", "mine"]
    check(outline_of(COMMANDS["align"].config), words)


def test_settings_of_a_folder_may_be_missing_on_the_command_line(tmp_path):
    (tmp_path / "config.yaml").write_text("policy: {path: p}\nestimator: {name: critic_free}\n")
    (tmp_path / "run.json").write_text("{}")
    words = ["--resume", str(tmp_path), "--estimator.num_replies", "8"]
    check(outline_of(COMMANDS["align"].config), words, resumed=run_to_resume)
    check(outline_of(COMMANDS["chat"].config), ["--run", str(tmp_path)], over="run")
    runs = ["--runs", f"[{tmp_path}]"]
    check(outline_of(COMMANDS["evaluate"].config), runs, over="runs")


TYPOS = [
    ["aling"],
    ["align", "--config", "miniature", "--roundz", "3"],
    ["align", "--strategy.name", "frim"],
    ["sweep", "--rounds", "3", "--roundz", "3"],
    ["evaluate", "run", "--num_prompts", "many"],
    ["classic", "--roundz", "3"],
    ["resume", "no_such_run"],
    ["align", "--resume", "no_such_run"],
    ["sweep", "--resume", "no_such_run"],
    ["chat", "no_such_run"],
    ["evaluate", "no_such_run"],
]


def test_typos_are_reported_before_the_libraries_that_take_seconds_are_imported():
    code = f"""
import sys
from firm.cli.main import main
for words in {TYPOS}:
    try:
        main(words)
    except SystemExit as end:
        print(end.code, *sorted({HEAVY} & sys.modules.keys()))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == ["2"] * len(TYPOS), ended.stderr
    told = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert len(told) == len(TYPOS)
    assert all(re.search("did you mean|must be|there is no run", line) for line in told)
