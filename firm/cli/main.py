"""The `firm` command: a table of jobs, each a function of one configuration."""

import atexit
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise, takewhile
from pathlib import Path
from shutil import get_terminal_size
from textwrap import shorten
from typing import Any, NoReturn

from firm.base.console import accept_any_text
from firm.base.extras import install_command


@dataclass(frozen=True)
class Command:
    """A job on the command line; its modules are imported when it starts.

    Functions, configurations and keys are given as MODULE:NAME, relative to `firm.jobs` unless the
    module has a dot; the function of a job is by default `main`, and the module of a configuration
    `configs`.
    """

    text: str
    """Purpose in one line."""
    job: str
    """Function of the configuration."""
    config: str
    """Class of the configuration."""
    check: str | None = None
    """Function in `sources` that finds missing files before the job is imported."""
    default: str | None = None
    """Configuration file to read if the command line has none."""
    keys: str | None = None
    """Keys shown by `--help`, by heading; None: the top-level keys that are not sections."""
    resumed: str | None = None
    """Function in `firm.run.resuming` that reads the folder passed to `--resume`."""
    over: str | None = None
    """Key of a finished run that provides the default settings."""
    more: tuple[str, ...] = ()
    """Arguments appended to the command line."""
    models: tuple[str, ...] = ()
    """Shipped configurations that `--model` chooses from."""
    positional: str | None = None
    """Key of the words before the first `--key`; None: that of the finished run, if any."""
    below: str | None = None
    """Configuration whose keys may be given without the prefix `overrides.`."""
    begins: str = ""
    """Line to print before the job is imported, which takes seconds."""

    def parse(self, argv: Sequence[str] | None = None, *, description: str = "") -> Any:
        """Parses a command line, by default sys.argv, to a configuration.

        Raises:
            UserError: The command line or a configuration file is invalid.
        """
        config = load(self.config, "configs")
        arguments = self._arguments(argv, config)
        if self.over:
            from firm.jobs.finished_runs import parse_over_run

            return parse_over_run(config, arguments, key=self.over, description=description)
        from firm.run import resuming
        from firm.run.command_line import parse

        return parse(
            config,
            arguments,
            description=description,
            default_file=self.default,
            keys=load(self.keys) if self.keys else None,
            resumed=getattr(resuming, self.resumed) if self.resumed else None,
        )

    def run(self, argv: Sequence[str] | None = None, *, description: str = "") -> None:
        """Runs the job on a command line; exits with a one-line message on invalid input.

        The configuration is read before the job is imported, which takes seconds.
        """
        from firm.run.errors import exit_on_user_error

        with exit_on_user_error():
            cfg = self.parse(argv, description=description)
            if self.check:
                load(self.check, "sources")(cfg)
            if self.begins and os.environ.get("RANK", "0") == "0":
                print(self.begins, flush=True)
            load(self.job)(cfg)

    def _arguments(self, argv: Sequence[str] | None, config: type) -> list[str]:
        """Returns the arguments, all as `--key VALUE`."""
        arguments = [*(sys.argv[1:] if argv is None else argv), *self.more]
        key = self.positional or self.over
        if key and arguments and not arguments[0].startswith("-"):
            arguments.insert(0, f"--{key}")
        if self.models:
            arguments = _with_config(arguments, self.models)
        return _with_prefix(arguments, config, load(self.below)) if self.below else arguments


_RUN = "alignment_config:AlignmentConfig"
_ALIGN = Command(
    "Aligns a language model to several objectives across clients.",
    "alignment",
    _RUN,
    check="check_local",
    default="configs/miniature.yaml",
    keys="alignment_config:KEYS",
    resumed="run_to_resume",
)
_STUDY = Command(
    "Compares several settings of a run, with several seeds each.",
    "study",
    "StudyConfig",
    check="check_base",
    resumed="study_to_resume",
    below=_RUN,
)
COMMANDS = {
    "demo": replace(
        _ALIGN,
        text="Aligns the miniature world in about three minutes, or a real one: --model smollm2.",
        models=("miniature", "smollm2", "smollm2_front"),
    ),
    "align": _ALIGN,
    "init": Command(
        "Writes a configuration for your own model, data and reward models.", "init", "InitConfig"
    ),
    "reward": Command(
        "Trains a reward model from ranked pairs of replies.",
        "reward",
        "reward_models.training_config:RewardConfig",
    ),
    "plan": replace(
        _ALIGN,
        text="Prints the sizes, bytes, memory and steps of a run.",
        job="plan:print_plan",
        more=("--plan",),
        begins="rehearsing a step without weights, which takes about ten seconds",
    ),
    "rollout-server": replace(
        _ALIGN,
        text="Prints the commands that start a run's rollout servers.",
        job="rollout_server",
    ),
    "fetch smollm2": Command(
        "Fetches a language model of 135 million parameters, once.",
        "fetch:main_smollm2",
        "FetchConfig",
    ),
    "resume": replace(
        _ALIGN, text="Continues the run, sweep or study in a folder.", positional="resume"
    ),
    "study": _STUDY,
    "sweep": replace(
        _STUDY,
        text="Trains at several preferences, and draws the front.",
        job="sweep",
        config="SweepConfig",
    ),
    "evaluate": Command(
        "Compares adapters with their base model on held-out prompts.",
        "compare",
        "CompareConfig",
        over="runs",
    ),
    "chat": Command(
        "Chats with the base and the aligned model side by side.", "chat", "ChatConfig", over="run"
    ),
    "explore": Command(
        "Serves a page with a slider for each objective of a conditioned run.",
        "explore",
        "ExploreConfig",
        over="run",
    ),
    "pick": Command(
        "Picks or merges a model for a trade-off.",
        "pick",
        "PickConfig",
        check="check_front",
        positional="front",
    ),
    "export": Command(
        "Exports a run, or a whole front, for PEFT, llama.cpp, OpenVINO or vLLM.",
        "export",
        "ExportConfig",
        over="run",
    ),
    "serve": Command(
        "Serves a conditioned run at any preference, as an OpenAI-compatible endpoint.",
        "serve",
        "ServeConfig",
        over="run",
    ),
    "report": Command(
        "Rewrites a run's page as one file, or prints a study's differences.",
        "report",
        "ReportConfig",
        check="check_run_folder",
        positional="run",
    ),
    "workspace": Command(
        "Saves a workspace in W&B with the main figures of a run's page.",
        "workspace",
        "WorkspaceConfig",
        check="check_run_folder",
        positional="run",
    ),
    "classic": Command(
        "Compares classic algorithms on images, tables and text.",
        "fmoo",
        "fmoo_config:ClassicConfig",
        default="configs/fmoo/two_digits.yaml",
        resumed="study_to_resume",
    ),
}
_PARTIES = {"start-server": "Server", "start-site": "Site"} | dict.fromkeys(
    ("provision", "demo"), "Federation"
)
"""Party whose configuration a command of a network takes, if not the administrator's."""
COMMANDS |= {
    f"network {name}": Command(
        text,
        f"network_parties:{name.replace('-', '_')}",
        f"network_config:{_PARTIES.get(name, 'Admin')}Config",
        check=None if _PARTIES.get(name) == "Federation" else "check_kit",
    )
    for name, text in {
        "provision": "Creates an installation kit for each party of a run across sites.",
        "start-server": "Runs the server until it is stopped.",
        "start-site": "Runs a site until it is stopped.",
        "submit": "Starts or continues a run, and waits until it ends.",
        "status": "Prints the connected sites and the latest runs.",
        "stop": "Stops the active runs; `submit` continues them from their last checkpoints.",
        "demo": "Completes a run on this machine, with kits, a server and its sites.",
    }.items()
}
"""All commands, by the words after `firm`."""

EXTRAS = {
    "cvxpy": "cvxpy",
    "nvflare": "network",
    "gguf": "real",
    "xllamacpp": "serve",
    "uvicorn": "serve",
    "starlette": "serve",
}
"""Extra that installs an optional package, by the package's name."""

FIRST = (
    "smoke", "miniature", "miniature_front", "miniature_pairs", "smollm2", "smollm2_front",
)  # fmt: skip
"""Configurations to begin with."""

USAGE = """usage: firm COMMAND [--config NAME_OR_FILE.yaml ...] [--key.path VALUE ...]

{commands}

Shipped configurations are found by name from any folder: `firm plan --config hh_tinyllama`.
`firm COMMAND --help` prints the main keys, `--help all` all keys. On several GPUs or processes:
`torchrun --nproc_per_node 4 -m firm align ...`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command in the first arguments; without a command, prints all of them."""
    atexit.register(gc.freeze)  # collecting the objects of all libraries takes seconds at the exit
    accept_any_text()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments[:1] == ["--version"]:
        print(f"firm {version('firm-align')}")
        return None
    num_words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:num_words]), arguments[num_words:]
    if name != "configs" and name not in COMMANDS:
        _print_usage(arguments)
    from firm.run.errors import exit_on_user_error

    with exit_on_user_error():
        if name == "configs":
            return _print_configs(shows_all="--all" in rest)
        command = _resumed_in(rest) if name == "resume" else COMMANDS[name]
    description = f"firm {name}: {command.text}"
    try:
        command.run(rest, description=description)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(
            f"firm: error: firm {name} needs the package {package}, which is not installed: "
            f"{install_command(EXTRAS[package])}.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def _with_config(arguments: Sequence[str], models: Sequence[str]) -> list[str]:
    """Replaces `--model NAME` by the configuration of this name.

    Raises:
        UserError: There is no such model.
    """
    result, words = list[str](), iter(arguments)
    for word in words:
        key, _, name = word.partition("=")
        if key != "--model":
            result.append(word)
            continue
        name = name or next(words, "")
        if name not in models:
            from firm.base.registry import did_you_mean
            from firm.run.errors import UserError

            raise UserError(
                f"--model must be {', '.join(models[:-1])} or {models[-1]}, got {name!r}"
                f"{did_you_mean(name, models)} For a model of your own, see `firm init`."
            )
        result += ["--config", name]
    return result


def _with_prefix(arguments: Sequence[str], config: type, below: type) -> list[str]:
    """Prepends `overrides.` to keys that `config` lacks and `below` has.

    Raises:
        UserError: `--config` is given the configuration of a run, which belongs to `--base`, or a
            key resembles one that only `below` has.
    """
    import difflib

    from firm.run.command_line import read_arguments, switches_of
    from firm.run.config import read_config
    from firm.run.errors import UserError

    own, others = ({field.name for field in fields(kind)} for kind in (config, below))
    trees = dict[str, Any]()
    with suppress(UserError):  # `parse` explains malformed command lines and files
        files, _ = read_arguments(arguments, switches_of(config))
        trees = {file: read_config(file) for file in files}
    for file, tree in trees.items():
        if isinstance(tree, Mapping) and not tree.keys() <= own and tree.keys() <= others:
            raise UserError(f"{file} configures one run: pass it as --base {file}.")
    result = list[str]()
    for before, word in pairwise(["", *arguments]):
        key = word.removeprefix("--").partition("=")[0].partition(".")[0]
        if before in ("-h", "--help") and key in others - own:
            word = word.removeprefix("--")
            raise UserError(f"{word} is a key of the runs: see `firm align --help {word}`.")
        if word.startswith("--") and key not in own | others:
            near = difflib.get_close_matches(key, own | others, n=1)
            if near and near[0] in others:
                raise UserError(f"unknown key {key}; did you mean {near[0]}?")
        is_below = word.startswith("--") and key in others - own
        result.append(f"--overrides.{word[2:]}" if is_below else word)
    return result


def _resumed_in(arguments: Sequence[str]) -> Command:
    """Returns the command that continues the run, sweep or study in the first argument.

    Raises:
        UserError: The first argument is no folder, or the study's file is malformed.
    """
    from firm.run.errors import UserError

    if arguments[:1] in (["-h"], ["--help"]):
        return COMMANDS["resume"]
    if not arguments or arguments[0].startswith("-"):
        got = arguments[0] if arguments else "nothing"
        raise UserError(f"resume needs the folder of a run, sweep or study first, got {got}.")
    from firm.run.resuming import STUDY_NAME, study_to_resume

    folder = Path(arguments[0])
    if not (folder / STUDY_NAME).is_file():
        return COMMANDS["resume"]
    keys = study_to_resume(folder)
    if not isinstance(keys, Mapping):
        file = folder / STUDY_NAME
        raise UserError(f"{file} is not a study's configuration; restore the file.")
    name = "classic" if "algorithms" in keys else "study" if "settings" in keys else "sweep"
    return replace(COMMANDS[name], positional="resume")


def _print_configs(*, shows_all: bool) -> None:
    """Prints the names and the first lines of shipped configurations, of all or of the first."""
    from firm.run.shipped import CONFIGS

    rows = {
        str(file.relative_to(CONFIGS).with_suffix("")): _first_sentence(file)
        for file in sorted(CONFIGS.rglob("*.yaml"))
    }
    num_others = 0 if shows_all else len(rows) - len(FIRST)
    rows = rows if shows_all else {name: rows[name] for name in FIRST}
    width = max(map(len, rows))
    room = get_terminal_size((120, 24)).columns - width - 4
    lines = [
        f"  {name:<{width}}  {shorten(text, max(room, 40), placeholder=' ...')}"
        for name, text in sorted(rows.items(), key=lambda row: ("/" in row[0], row[0]))
    ]
    if num_others:
        more = "more, such as studies and papers' settings: firm configs --all"
        lines.append(f"\n{num_others} {more}")
    print("\n".join(lines))


def _first_sentence(file: Path) -> str:
    """Returns the first sentence of the comment at the top of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = [line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines)]
    sentence, stop, _ = " ".join(takewhile(bool, comment)).partition(". ")
    return sentence + stop.strip()


def _print_usage(words: Sequence[str]) -> NoReturn:
    """Prints all commands, or the commands that start with the first word, and exits."""
    group = [name for name in COMMANDS if name.startswith(f"{' '.join(words[:1])} ")]
    asked = " ".join(words[: 2 if group else 1])
    texts = {name: command.text for name, command in COMMANDS.items()}
    texts |= {"configs": "Lists the shipped configurations."}
    names = group or list(texts)
    width = max(map(len, names))
    usage = USAGE.format(commands="\n".join(f"  {name:<{width}}  {texts[name]}" for name in names))
    if asked.split()[len(group) > 0 :] in ([], ["-h"], ["--help"]):
        print(usage)
        raise SystemExit(0)
    from firm.base.registry import did_you_mean  # imported late: a command's help does not need it

    first_words = dict.fromkeys(name.partition(" ")[0] for name in texts)
    line = f"unknown command {asked!r}{did_you_mean(asked, group or first_words)}"
    print(f"{usage}\n\nfirm: error: {line}", file=sys.stderr)
    raise SystemExit(2)


def load(place: str, default: str | None = None) -> Any:
    """Imports MODULE:NAME; NAME alone is in the module `default`. See `Command`.

    Without a default, MODULE alone stands for its function `main`.
    """
    module, _, name = place.rpartition(":")
    if not module:
        module, name = (default, name) if default else (name, "main")
    return getattr(import_module(module if "." in module else f"firm.jobs.{module}"), name)
