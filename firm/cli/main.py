"""The command `firm`: one word for every job."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from firm.cli.help_pages import page_file
from firm.console import accept_any_text

COMMANDS = {
    "demo": ("align", "Aligns the miniature world to two objectives, in about three minutes."),
    "align": ("align", "Aligns a language model to several objectives across clients."),
    "init": ("init", "Asks for model, data and reward models, and writes a configuration."),
    "plan": ("align", "Prints what `align` would do: sizes, bytes, memory, steps."),
    "study": ("study", "Runs several settings, each with several seeds, side by side."),
    "sweep": ("sweep", "Runs a training for every preference, and draws the front."),
    "evaluate": ("evaluate", "Compares adapters with their base model on held-out prompts."),
    "chat": ("chat", "Lets the base and the aligned model answer side by side."),
    "explore": ("explore", "Opens a page with a slider for each objective of a conditioned run."),
    "pick": ("pick", "Picks or merges a model for a wanted trade-off."),
    "workspace": ("workspace", "Saves a workspace in W&B with the main figures of a run's page."),
    "network": ("network", "Runs across sites over a network: kits, server, sites, runs."),
    "fmoo": ("fmoo", "Compares the classic algorithms on images, tables and text."),
}
"""Command -> module of `firm.cli`, and what it does."""

EXTRAS = {"nvflare": "network"}
"""Packages that commands import at once -> the extra that installs them."""

RENAMED = {"serve-point": "pick"}
"""Commands that have another name now."""

USAGE = """usage: firm COMMAND [--config NAME_OR_FILE.yaml ...] [--key.path VALUE ...]

{commands}

Shipped configurations are found by name from any folder: `firm plan --config hh_tinyllama`.
`firm COMMAND --help` prints the keys that matter, `--help all` every key. On several GPUs or
processes: `torchrun --nproc_per_node 4 -m firm align ...`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names; without one it prints all of them."""
    accept_any_text()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name == "--version":
        print(f"firm {version('firm-align')}")
        return
    if name in RENAMED:
        print(f"firm: error: {name} is called {RENAMED[name]} now.", file=sys.stderr)
        raise SystemExit(2)
    if name not in COMMANDS:
        width = max(map(len, COMMANDS))
        lines = [f"  {command:<{width}}  {text}" for command, (_, text) in COMMANDS.items()]
        print(USAGE.format(commands="\n".join(lines)))
        if name not in ("", "-h", "--help"):
            from firm.fields import did_you_mean  # imports that a command's own help does without

            line = f"there is no command {name!r}{did_you_mean(name, COMMANDS)}"
            print(f"\nfirm: error: {line}", file=sys.stderr)
        raise SystemExit(0 if name in ("", "-h", "--help") else 2)
    module, text = COMMANDS[name]
    plan = ["--plan"] if name == "plan" else []
    run(module, arguments[1:], plan, description=f"firm {name}: {text}")


def run(
    module: str,
    argv: Sequence[str] | None = None,
    more: Sequence[str] = (),
    *,
    description: str,
) -> None:
    """Runs a command; `--help` alone is read from a file, since imports take seconds.

    Args:
        module: The command's module of `firm.cli`.
        argv: Arguments without the program's name; those of the process when None.
        more: Further ones.
        description: Opens the help page.
    """
    accept_any_text()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["-h"], ["--help"]):
        print(f"{description}\n\n{page_file(module).read_text(encoding='utf-8')}", end="")
        raise SystemExit(0)
    try:
        command = import_module(f"firm.cli.{module}").cli
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(
            f"firm: error: firm {module} needs the package {package}, which is not installed: "
            f"pip install 'firm-align[{EXTRAS[package]}]'.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    command([*arguments, *more], description=description)
