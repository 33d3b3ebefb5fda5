"""Runs the commands and snippets of a page, in their order and in the current folder.

Called as `python tests/docs/page.py PAGE`, with the `firm` that Python finds. A training takes a
round of few and short replies; another policy may stand for the one that ships. Names on the hub
stand for models and prompts that ship; what needs several machines or a GPU is read, not run.
"""

import ast
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

import firm
from firm import align
from firm.cli.main import COMMANDS, main
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import StudyConfig, SweepConfig
from firm.jobs.fmoo import ClassicConfig
from firm.jobs.network_config import FederationConfig, SiteConfig
from firm.run import UserError, compose, parse

FENCE = re.compile(r"^```(\w+)[ \t]*(\S*)\n(.*?)^```$", re.M | re.S)
NAMED = re.compile(r"# (\S+\.\w+)\n")
ROOT = Path(__file__).parents[2]
CHECKPOINTS = Path(firm.__file__).parent / "miniature/checkpoints"
HUB_POLICY = "Qwen/Qwen2.5-0.5B-Instruct"
ON_THE_HUB = {
    HUB_POLICY: CHECKPOINTS / "policy",
    "Ray2333/gpt2-large-helpful-reward_model": CHECKPOINTS / "helpful",
    "Ray2333/gpt2-large-harmless-reward_model": CHECKPOINTS / "harmless",
    "Anthropic/hh-rlhf": CHECKPOINTS / "prompts_train.jsonl",
}
"""Names on the hub, and what stands for them here."""
SHIPPED = "firm/miniature/checkpoints/policy"
SMALL = {
    "rounds": 1,
    "strategy.num_local_steps": 1,
    "estimator.batch_size": 8,
    "estimator.minibatch_size": 8,
    "estimator.num_epochs": 1,
    "rollout.max_new_tokens": 8,
    "evaluation.num_calibration_prompts": 32,
    "evaluation.num_validation_prompts": 8,
    "evaluation.num_test_prompts": 8,
    "evaluation.num_samples": 1,
    "evaluation.num_shown_samples": 4,
}
"""Settings of every training."""
SMALL_RECIPES = {"recipes.theory": ["--config", str(ROOT / "recipes/theory/smoke.yaml")]}
"""Arguments of a recipe."""
TOO_LARGE = ("hh_tinyllama", "hh_llama32")
"""Configurations that are planned and not run."""
RECIPE = "recipes/firm_hh.py"
CONFIGS = {
    AlignmentConfig: (["miniature"], []),
    **dict.fromkeys((StudyConfig, SweepConfig, ClassicConfig), ([], [])),
    FederationConfig: ([], [("out", "kits")]),
    SiteConfig: ([], [("kit", "kit")]),
}
"""What a snippet of YAML may configure, what it is laid over, and keys that it need not have."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    name: str
    """The file that it is, named after the language or in a comment on its first line."""
    text: str
    line: int


def blocks(content: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page."""
    for fence in FENCE.finditer(content):
        language, name, text = fence.groups()
        named = NAMED.match(text)
        name = name or (named[1] if named else "")
        yield Block(language, name, text, content.count("\n", 0, fence.start()) + 2)


def commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command, without variables that are set for it."""
    line = ""
    for more in text.replace("\\\n", " ").splitlines():
        line += more + "\n"
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        line = ""
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words
    assert not line, f"a quotation does not end: {line}"


class Runner:
    """Runs blocks by their language."""

    def __init__(self, policy: Path | None) -> None:
        self.places = {**ON_THE_HUB}
        self.small = {**SMALL}
        if policy is not None:
            self.places |= {HUB_POLICY: policy, SHIPPED: policy}
            self.small["policy.path"] = policy
        self.namespace: dict[str, Any] = {"__name__": "snippet"}

    def run(self, block: Block) -> None:
        """Runs a block, or checks it where there is nothing to run."""
        run: Callable[[Block], None] = getattr(self, block.language)
        if block.name:
            Path(block.name).write_text(self.here(block.text), encoding="utf-8")
        run(block)

    def python(self, block: Block) -> None:
        if block.name:
            ast.parse(block.text)
        else:
            code = compile(self.here(block.text), f"line {block.line}", "exec")
            with mock.patch.object(firm, "align", _align_for_a_round):
                exec(code, self.namespace)

    def yaml(self, block: Block) -> None:
        name = block.name or "snippet.yaml"
        Path(name).write_text(self.here(block.text), encoding="utf-8")
        errors = []
        # a run on pairs is not laid over one that has rewards
        for config, (below, keys) in [*CONFIGS.items(), (AlignmentConfig, ([], []))]:
            try:
                compose(config, [*below, name], keys)
                return
            except UserError as error:
                errors.append(f"{config.__name__}: {error}")
        raise ValueError("no configuration reads this:\n" + "\n".join(errors))

    def toml(self, block: Block) -> None:
        tomllib.loads(block.text)

    def json(self, block: Block) -> None:
        assert [yaml.safe_load(line) for line in block.text.splitlines()]

    def bibtex(self, block: Block) -> None:
        assert block.text.startswith("@")

    def text(self, block: Block) -> None:
        """Output of a program, or a picture of a folder."""

    def sh(self, block: Block) -> None:
        for words in commands(self.here(block.text)):
            sys.stdout.write(f"$ {shlex.join(words)}\n")
            self.programs[words[0]](words[1:])

    def here(self, text: str) -> str:
        """Returns a text with names on the hub replaced."""
        names = "|".join(map(re.escape, self.places))
        return re.sub(names, lambda found: str(self.places[found[0]]), text)

    @property
    def programs(self) -> dict[str, Callable[[list[str]], None]]:
        """Returns what runs or checks a program's arguments."""
        return {
            "firm": self.firm,
            "python": run_script,
            "make": check_target,
            "pip": check_extras,
            "curl": check_request,
            "flwr": check_flower_app,
            **dict.fromkeys(("torchrun", "accelerate"), check_launch),
            **dict.fromkeys(("flower-superlink", "flower-supernode"), lambda words: None),
            **dict.fromkeys(("cd", "export", "git", "source", "tensorboard"), lambda words: None),
        }

    def firm(self, words: list[str]) -> None:
        command, arguments = words[0], words[1:]
        if "--help" in words:
            run_command(words)
        elif command == "network":
            parse = COMMANDS[" ".join(words[:2])].parse
            if arguments[0] == "provision":
                main(words)
            elif "--config" in arguments:
                parse(arguments[1:])
        elif command in ("explore", "serve", "workspace"):  # served until stopped, or elsewhere
            cfg = COMMANDS[command].parse(arguments)
            assert (cfg.run or cfg.export).is_dir()
        else:
            arguments += self.settings(command, arguments)
            is_plan = command == "plan" or "--plan" in arguments
            run_command([command, *arguments], expected=(0, 1) if is_plan else (0,))

    def settings(self, command: str, arguments: list[str]) -> list[str]:
        """Returns what a command is given on top of what the page says."""
        if command in ("align", "demo"):
            is_planned = any(name in word for name in TOO_LARGE for word in arguments)
            return ["--plan"] if is_planned else self.small_as("")
        if command in ("study", "sweep"):
            return self.small_as("overrides.")
        more = {
            "evaluate": ["--num_prompts", "4", "--num_samples", "1"],
            "classic": ["--rounds", "1"],
        }
        return more.get(command, [])

    def small_as(self, prefix: str) -> list[str]:
        """Returns the settings of every training as arguments."""
        return [
            word for key, value in self.small.items() for word in (f"--{prefix}{key}", str(value))
        ]


def _align_for_a_round(*arguments: Any, settings: Mapping[str, Any] = {}, **options: Any) -> Any:
    return align(*arguments, settings={**settings, "rounds": 1}, **options)


def run_command(words: list[str], *, expected: tuple[int, ...] = (0,)) -> None:
    """Runs a command that ends with an expected code; plans end with 1 if they need the hub."""
    try:
        main(words)
    except SystemExit as error:
        if (error.code or 0) not in expected:
            raise


def run_script(words: list[str]) -> None:
    """Checks a benchmark and its options, or runs a recipe or a script of the page's own."""
    script = ROOT / words[0]
    if not script.is_file():
        program = get_context("fork").Process(target=run_as_main, args=(words,))
        program.start()
        program.join()
        assert program.exitcode == 0, f"{words[0]} ended with {program.exitcode}"
        return
    assert words[0].startswith("benchmarks/"), f"write {words[0]} as a command of firm"
    content = script.read_text(encoding="utf-8")
    for option in (word for word in words[1:] if word.startswith("--")):
        assert f'"{option}"' in content, f"{words[0]} has no option {option}"


def run_as_main(words: list[str]) -> None:
    """Runs a script as Python would, with what this process has imported."""
    if words[0] == "-m":
        _, module, *arguments = words
        sys.argv = [module, *arguments, *SMALL_RECIPES[module]]
        sys.modules.pop(f"{module}.__main__", None)  # a test may have imported it
        runpy.run_module(module, run_name="__main__")
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def check_target(words: list[str]) -> None:
    """Checks that the Makefile has a target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{words[0]}:", makefile, re.M), f"no target {words[0]}"


def check_extras(words: list[str]) -> None:
    """Checks that the project has the extras that pip is asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\[(.+?)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras


def check_request(words: list[str]) -> None:
    """Checks that a request's body is one that `firm serve` takes."""
    if "-d" in words:
        body = json.loads(words[words.index("-d") + 1])
        assert {"model", "messages"} <= body.keys()


def check_flower_app(words: list[str]) -> None:
    """Checks the settings that the Flower app is run with."""
    text = (ROOT / "recipes/flower/pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    if "--run-config" in words:
        given = words[words.index("--run-config") + 1]
        own = dict(re.findall(r'([\w-]+)="(.*?)"', given))
        assert own.keys() <= settings.keys(), given
        settings |= own
    parse(AlignmentConfig, shlex.split(settings["align"]), default_file="configs/miniature.yaml")


def check_launch(words: list[str]) -> None:
    """Checks the configuration of a run that a launcher starts."""
    at = next(place for place, word in enumerate(words) if word in ("-m", RECIPE))
    arguments = words[at + 1 :]
    if words[at] == "-m":
        assert arguments[:2] == ["firm", "align"]
        arguments = arguments[2:]
    default = [] if "--config" in arguments else ["--config", "miniature"]
    parse(AlignmentConfig, [*default, *arguments])


def run_page(page: Path, *, policy: Path | None = None) -> None:
    """Runs the blocks of a page, in the current folder, with another policy for the shipped one."""
    content = page.read_text(encoding="utf-8")
    runner = Runner(policy)
    for block in blocks(content):
        sys.stdout.write(f"line {block.line}\n")
        runner.run(block)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
