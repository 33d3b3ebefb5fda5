"""Help and typos: answered by the configurations, before a library that takes seconds is needed."""

import re
import subprocess
import sys

HEAVY = {"torch", "transformers", "trl", "peft", "datasets", "accelerate", "scipy", "numpy"}

HELP = [
    [],
    ["align", "--help"],
    ["align", "--config", "smollm2_front", "--help", "all"],
    ["align", "--help", "strategy"],
    ["classic", "--help", "all"],
    ["network", "start-site", "--help"],
    *([command, "--help"] for command in ("init", "reward", "sweep", "pick", "serve", "chat")),
]
TYPOS = [
    ["aling"],
    ["align", "--config", "miniature", "--roundz", "3"],
    ["align", "--strategy.name", "frim"],
    ["align", "--rollout.engine.name", "vlm"],
    ["align", "--policy.adapter", "lorra"],
    ["align", "--strategy.robust.rule", "krumm"],
    ["align", "--num_clients", "0"],
    ["align", "--strategy.preference", "0.5,-1"],
    ["align", "--rewards.helpful.name", "brevty", "--rewards.helpful.path", ""],
    ["align", "--data.train.source", "no_such_file.jsonl"],
    ["sweep", "--rounds", "3", "--roundz", "3"],
    ["sweep", "--base", "smoky"],
    ["evaluate", "run", "--num_prompts", "many"],
    ["classic", "--roundz", "3"],
    ["classic", "--model.name", "lennet"],
    ["network", "status", "--kit", "no_such_kit"],
    ["network", "start-site", "--kit", "no_such_kit", "--policy.tasks", "[trainign]"],
    ["pick", "no_such_run", "--target", "a=1"],
    ["resume", "no_such_run"],
    ["align", "--resume", "no_such_run"],
    ["sweep", "--resume", "no_such_run"],
    ["chat", "no_such_run"],
    ["evaluate", "no_such_run"],
    ["export", "no_such_run"],
    ["workspace", "no_such_run"],
]


def run_all(commands: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """Runs commands in one process, which prints their exit codes and the heavy modules so far."""
    code = f"""
import sys
from firm.cli.main import main
for words in {commands}:
    try:
        main(words)
    except SystemExit as end:
        print("exit", end.code, *sorted({HEAVY} & sys.modules.keys()))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def ends(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("exit ")]


def test_help_is_printed_without_the_libraries_that_take_seconds():
    ended = run_all(HELP)
    assert ends(ended.stdout) == ["exit 0"] * len(HELP), ended.stderr


def test_a_plan_says_what_takes_seconds_before_it_does():
    code = """
import sys
from firm.cli import main

def load(place, default=None, own=main.load):
    if place.startswith("plan:"):
        sys.stderr.write(" ".join({HEAVY} & sys.modules.keys()))
        raise KeyboardInterrupt
    return own(place, default)

main.load = load
main.main(["plan", "--config", "smoke"])
""".replace("{HEAVY}", str(HEAVY))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.startswith("rehearsing a step without weights"), ended.stderr
    assert ended.stderr == "interrupted\n"  # while modules are imported, too


def test_typos_are_reported_before_the_libraries_that_take_seconds_are_imported():
    ended = run_all(TYPOS)
    assert ends(ended.stdout) == ["exit 2"] * len(TYPOS), ended.stderr
    told = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert len(told) == len(TYPOS)
    hint = "did you mean|must be|there is no|is not a kit"
    assert [line for line in told if not re.search(hint, line)] == []
