"""Tasks of a newcomer, from a wheel in an empty folder: commands, times, exit codes and output.

    python benchmarks/first_hour.py                       # installs, in a new environment
    python benchmarks/first_hour.py --bin build/release/venv/bin    # in one that has FIRM
    python benchmarks/first_hour.py --real                # with SmolLM2, which is fetched

Runs are shortened by `--rounds`. The own model is a copy of the miniature world's policy, the own
data are prompts and pairs in JSON lines. Mistakes must be told at once. Prints seconds and, for
busy machines, seconds of CPU time. The exit code is 1 if a command ends with another exit code than
it should, or does not print what it must.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firm.run import print_table

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide" / "extending.md"
QUESTIONS = ROOT / "firm" / "questions"
CHECKPOINTS = ROOT / "firm" / "miniature" / "checkpoints"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
REWARDS = '''"""A reward function in the form of TRL's."""

from reward_models import reward_model


@reward_model("calm")
def calm(completions, **kwargs):
    return [-float(text.count("!")) for text in completions]
'''


@dataclass(frozen=True)
class Task:
    """A task: the commands that do it, and a pattern of what the last one prints."""

    text: str
    commands: tuple[str, ...]
    prints: str
    code: int = 0
    """Exit code of the last command; 2 if the user made a mistake."""


def install(wheel: Path) -> Task:
    """Returns the installation of a wheel in a new environment, under the tested versions."""
    pip = "venv/bin/python -m pip install --disable-pip-version-check"
    return Task(
        "install",
        (f"{sys.executable} -m venv venv", f"{pip} -c {ROOT / 'constraints.txt'} '{wheel}[real]'"),
        r"Successfully installed .*\bfirm-align",
    )


TASKS = (
    Task(
        "the demo, 1 round",
        ("firm demo --rounds 1 --evaluation.num_test_prompts 64 --out demo",),
        r"adapter +demo/adapter",
    ),
    Task(
        "a configuration for an own model and own data",
        (
            "firm init --policy model --prompts prompts.jsonl "
            "--rewards '{brief: brevity, positive: positivity}'",
        ),
        r"run +\d+ rounds.*",
    ),
    Task(
        "its reward misspelt",
        ("firm align --config own.yaml --rewards.brief.name brevty",),
        r"did you mean 'brevity'",
        2,
    ),
    Task(
        "its data misplaced",
        ("firm align --config own.yaml --data.train.source promts.jsonl",),
        r"there is no file promts\.jsonl",
        2,
    ),
    Task(
        "a key misspelt", ("firm align --config own.yaml --actor_lr 1",), r"actor_learning_rate", 2
    ),
    Task(
        "align it, 1 round",
        ("firm align --config own.yaml --rounds 1 --out own",),
        r"(?s)base +aligned +change.*adapter +own/adapter",
    ),
    Task("plan it", ("firm plan --config own.yaml",), r"time on this machine.*"),
    Task("plan smoke", ("firm plan --config smoke",), r"time on this machine.*"),
    Task("evaluate it", ("firm evaluate own --out evaluated",), r"evaluated/\S+\.html"),
    Task("one reply", ("echo 'Can you help me paint a chair?' | firm chat own",), r"aligned"),
    Task(
        "an own reward function",
        (
            "firm init --policy model --prompts prompts.jsonl --out calm.yaml "
            "--rewards '{brief: brevity, calm: rewards.py:calm}'",
            "firm align --config calm.yaml --rounds 1 --out calm",
        ),
        r"\bcalm\b.*±",
    ),
    Task(
        "three preferences, 1 round each",
        ("firm sweep --base own.yaml --rounds 1 --resolution 2 --out sweep",),
        r"sweep/\S+\.html",
    ),
    Task(
        "a front in one run, 1 round, and a pick",
        (
            "firm align --config miniature_front --rounds 1 --out front",
            "firm pick front --target helpful=0.5,harmless=0.5",
        ),
        r"preference|adapter",
    ),
    Task("a run misplaced", ("firm pick nowhere --target brief=1",), r"nowhere", 2),
    Task("a federation that is not there", ("firm network status nowhere",), r"nowhere", 2),
    Task(
        "ranked pairs, 2 rounds",
        (
            "firm init --policy model --pairs '{brief: pairs.jsonl}' --out ranked.yaml",
            "firm align --config ranked.yaml --rounds 2 --out ranked",
        ),
        r"accuracy|brief .*±.*",
    ),
    Task("export the front", ("firm export front --out exported",), r"exported"),
    Task(
        "a reward model from pairs",
        ("firm reward --pairs pairs.jsonl --base model --name brief --out brief",),
        r"brief",
    ),
    Task(
        "the guide's own strategy",
        (
            "firm align --config smoke --plugins '[momentum.py]' --strategy.name momentum "
            "--out momentum",
        ),
        r"adapter +momentum/adapter",
    ),
    Task(
        "classic algorithms, 5 rounds", ("firm classic --rounds 5 --out classic",), r"classic/\S+"
    ),
)

REAL = (
    Task(
        "SmolLM2, own chats",
        (
            "firm fetch smollm2",
            "firm init --policy firm/models/smollm2 --prompts chats.jsonl --out real.yaml "
            "--rewards '{brief: brevity, plain: reading_ease}'",
            "firm align --config real.yaml --out real",
        ),
        r"brief .*±.*",
    ),
    Task("plan SmolLM2", ("firm plan --config smollm2",), r"time on this machine.*"),
)
"""Tasks with a language model of 135 million parameters; the first takes about ten minutes."""


def write_files(folder: Path) -> None:
    """Writes the user's own model, prompts, pairs, reward function and strategy."""
    shutil.copytree(CHECKPOINTS / "policy", folder / "model")
    lines = (CHECKPOINTS / "prompts_train.jsonl").read_text(encoding="utf-8").splitlines()[:400]
    prompts = [json.loads(line)["prompt"] for line in lines]
    rows = [{"prompt": prompt} for prompt in prompts]
    write_rows(folder / "prompts.jsonl", rows)
    asked = [
        json.loads(line)["prompt"]
        for file in sorted(QUESTIONS.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    chats = [{"messages": [{"role": "user", "content": question}]} for question in asked]
    write_rows(folder / "chats.jsonl", chats)
    replies = {"chosen": " You can.", "rejected": " You can paint it, and then you can clean it."}
    write_rows(folder / "pairs.jsonl", [{**row, **replies} for row in rows])
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    (strategy,) = re.findall(r"```python momentum\.py\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    (folder / "momentum.py").write_text(strategy, encoding="utf-8")


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes JSON lines."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def run(task: Task, folder: Path, binaries: Path) -> str:
    """Runs a task, and returns the line in which the pattern ends.

    Raises:
        RuntimeError: A command fails, or the last one does not print the pattern.
    """
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100"}
    environment |= {} if task.text == "install" else OFFLINE
    environment.pop("PYTHONPATH", None)  # the wheel's modules, not the clone's
    output = ""
    for command in task.commands:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
        )
        output = done.stdout + done.stderr
        if done.returncode != (task.code if command == task.commands[-1] else 0):
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{output}")
    found = re.search(task.prints, output)
    if found is None:
        raise RuntimeError(f"{task.commands[-1]} did not print {task.prints}:\n{output}")
    line = output[output.rfind("\n", 0, found.end()) + 1 :].partition("\n")[0]
    return " ".join(line.split())[:60]


def clocks() -> tuple[float, float]:
    """Returns the seconds that have passed, and the CPU seconds of all ended commands."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bin", type=Path, help="programs of an environment that has FIRM")
    parser.add_argument("--only", default="", help="run the tasks whose text contains this")
    parser.add_argument("--real", action="store_true", help="with SmolLM2, which is fetched")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(folder)
        tasks = [*TASKS, *(REAL if options.real else ())]
        if options.bin is None:
            build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            subprocess.run([*build, "--wheel-dir", folder / "dist", ROOT], check=True)
            (wheel,) = (folder / "dist").glob("*.whl")
            tasks.insert(0, install(wheel))
        binaries = options.bin.absolute() if options.bin else folder / "venv" / "bin"
        rows = list[list[str]]()
        begin = clocks()
        for task in (task for task in tasks if options.only in task.text):
            start = clocks()
            try:
                line = run(task, folder, binaries)
            except RuntimeError as error:
                line = "FAILED"
                print(error, file=sys.stderr)
            rows.append([task.text, str(len(task.commands)), *since(start), line])
            print(*rows[-1], sep="  ", flush=True)
    num_commands = sum(int(row[1]) for row in rows)
    rows.append(["all", str(num_commands), *since(begin), ""])
    print_table("First hour", ["task", "commands", "seconds", "CPU seconds", "prints"], rows)
    raise SystemExit(any(row[-1] == "FAILED" for row in rows))


def since(start: tuple[float, float]) -> list[str]:
    """Returns the seconds and the CPU seconds since a reading of `clocks`."""
    return [f"{now - then:.0f}" for then, now in zip(start, clocks(), strict=True)]


if __name__ == "__main__":
    main()
