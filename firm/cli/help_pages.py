"""Writes the pages that `--help` prints, after a change of keys, texts or defaults.

python -m firm.cli.help_pages
"""

import io
from contextlib import redirect_stdout, suppress
from pathlib import Path

from firm.cli.main import COMMANDS, Command

TITLE = "keys"


def made_page(command: Command) -> str:
    """Returns a command's page as its configuration has it, without the description."""
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        command.run(["--help"], description=TITLE)
    return printed.getvalue().removeprefix(f"{TITLE}\n\n")


def commands_with_pages() -> list[Command]:
    """Returns the commands whose pages are files, one of each page."""
    pages: dict[Path, Command] = {}
    for name, command in COMMANDS.items():
        if " " not in name:
            pages.setdefault(command.page, command)
    return list(pages.values())


if __name__ == "__main__":
    for command in commands_with_pages():
        command.page.write_text(made_page(command), encoding="utf-8")
