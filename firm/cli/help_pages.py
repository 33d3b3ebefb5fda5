"""Regenerates `--help` pages and outlines after changes of keys, help texts or defaults.

python -m firm.cli.help_pages
"""

import io
from contextlib import redirect_stdout, suppress
from pathlib import Path

from firm.cli import outlining
from firm.cli.main import COMMANDS, Command

TITLE = "keys"


def made_page(command: Command) -> str:
    """Generates a command's page from its configuration, without the description."""
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        command.run(["--help"], description=TITLE)
    # libraries may print lines of their own when the command imports them
    return printed.getvalue().partition(f"{TITLE}\n\n")[2]


def commands_with_pages() -> list[Command]:
    """Returns the commands with pages in files, one command per page."""
    pages: dict[Path, Command] = {}
    for name, command in COMMANDS.items():
        if " " not in name:
            pages.setdefault(command.page, command)
    return list(pages.values())


if __name__ == "__main__":
    for command in commands_with_pages():
        command.page.write_text(made_page(command), encoding="utf-8")
    outlining.FILE.write_text(outlining.outlines(), encoding="utf-8")
