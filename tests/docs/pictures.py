"""Takes the guide's pictures of pages, in Chromium (Debian's package `chromium`).

Called by `make pictures` with the runs that it makes. docs/fmoo.png is of a study of hours, on data
that its owners give out, and stays as it is unless there is one:

    firm classic --config fmoo/preferences --out runs/preferences --data.path MNIST_FOLDER
    python -m tests.docs.pictures --preferences runs/preferences

docs/front.png is drawn by benchmarks/fronts.py.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import explored
from tests.browser import NAMES, PROGRAM, Page, browser

DOCS = Path(__file__).parents[2] / "docs"


def demo(page: Page, run: Path) -> bytes:
    """The beginning of a run's page."""
    page.open(run / "report.html")
    return page.picture(height=1900)


def theory(page: Page, run: Path) -> bytes:
    """What Theorem 1 says of the disagreement drift."""
    page.open(run / "theory.html", width=1190)
    return page.picture("#disagreement")


def explore(page: Page, run: Path) -> bytes:
    """A point of a front, with an answer there."""
    with explored.served(run) as address:
        explored.visit(page, address, width=1185)
        explored.slide(page, 0, 0.8)
        explored.slide(page, 1, 0.2)
        explored.ask(page, "How do I clean my oven?", 2)
        page.wait_until("document.querySelector('#aligned').innerText.includes('reward')")
        return page.picture()


def preferences(page: Page, study: Path) -> bytes:
    """Losses wanted and reached by a study of the classic package."""
    page.open(study / "comparison.html", width=1120)
    return page.picture("#preferences")


PICTURES: dict[str, Callable[[Page, Path], bytes]] = {
    "report.png": demo,
    "theory.png": theory,
    "explore.png": explore,
    "fmoo.png": preferences,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for file, take in PICTURES.items():
        parser.add_argument(f"--{take.__name__}", type=Path, help=f"folder of docs/{file}")
    folders = vars(parser.parse_args())
    if PROGRAM is None:
        parser.error(f"pictures need one of {', '.join(NAMES)}: install Chromium.")
    with TemporaryDirectory() as profile, browser(Path(profile)) as page:
        for file, take in PICTURES.items():
            if (folder := folders[take.__name__]) is None:
                continue
            (DOCS / file).write_bytes(take(page, folder.absolute()))
            sys.stdout.write(f"{DOCS / file}\n")


if __name__ == "__main__":
    main()
