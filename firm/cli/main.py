"""The command `firm`: one word for every job."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

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
    "serve-point": ("serve_point", "Picks or merges a model for a wanted trade-off."),
    "network": ("network", "Runs across sites over a network: kits, server, sites, runs."),
    "fmoo": ("fmoo", "Compares the classic algorithms on images, tables and text."),
    "theory": ("theory", "Measures the convergence theory on random tabular MDPs."),
}
"""Command -> module of `firm.cli`, and what it does."""

USAGE = """usage: firm COMMAND [--config NAME_OR_FILE.yaml ...] [--key.path VALUE ...]

{commands}

Shipped configurations are found by name from any folder: `firm plan --config hh_tinyllama`.
`firm COMMAND --help` prints every key. On several GPUs or processes: `accelerate launch -m firm
align ...`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names; without one it prints all of them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name == "--version":
        print(f"firm {version('firm-align')}")
        return
    if name not in COMMANDS:
        width = max(map(len, COMMANDS))
        lines = [f"  {command:<{width}}  {text}" for command, (_, text) in COMMANDS.items()]
        print(USAGE.format(commands="\n".join(lines)))
        if name not in ("", "-h", "--help"):
            print(f"\nfirm: error: there is no command {name!r}.", file=sys.stderr)
        raise SystemExit(0 if name in ("", "-h", "--help") else 2)
    module, text = COMMANDS[name]
    given = arguments[1:] + (["--plan"] if name == "plan" else [])
    import_module(f"firm.cli.{module}").cli(given, description=f"firm {name}: {text}")
