"""The pages that `--help` prints, kept as files: what they tell of takes seconds to import.

python -m firm.cli.help_pages  # writes them anew, after a change of keys, texts or defaults
"""

import io
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent / "pages"


def page_file(module: str) -> Path:
    """Returns the file of a command's page, by its module of `firm.cli`."""
    return FOLDER / f"{module}.txt"


def made_page(module: str) -> str:
    """Returns a command's page as its configuration has it, without the description."""
    cli, printed = import_module(f"firm.cli.{module}").cli, io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        cli(["--help"], description=module)
    return printed.getvalue().removeprefix(f"{module}\n\n")


def write_pages() -> None:
    """Writes the pages of all commands."""
    for module in modules():
        page_file(module).write_text(made_page(module), encoding="utf-8")


def modules() -> list[str]:
    """Returns the modules of `firm.cli` that are commands."""
    names = {file.stem for file in Path(__file__).parent.glob("*.py")}
    return sorted(names - {"__init__", "main", Path(__file__).stem})


if __name__ == "__main__":
    write_pages()
