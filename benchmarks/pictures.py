"""Takes the guide's pictures of pages, with a headless Chromium (Debian's package `chromium`).

    make pictures  # runs the demo and the theory, then:
    python benchmarks/pictures.py --demo runs/pictures/demo/report.html \
        --theory runs/pictures/theory/theory.html

    firm fmoo --config fmoo/preferences --out runs/preferences --data.path MNIST_FOLDER
    python benchmarks/pictures.py --preferences runs/preferences/comparison.html

Pictures of what is not given stay as they are. docs/front.png is drawn by benchmarks/fronts.py,
docs/explore.png is a picture of the page that `firm explore` serves.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, ImageChops

DOCS = Path(__file__).parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SETTLED = 10_000
"""Milliseconds of a page's own time until its figures stand."""
MARGIN = 20


@dataclass(frozen=True)
class Picture:
    """What is taken of a page."""

    width: int
    height: int
    section: str | None = None
    """Name of the section that is shown alone, down to its end; the page's beginning without."""


PICTURES = {
    "demo": ("report.png", Picture(1280, 1900)),
    "theory": ("theory.png", Picture(1190, 3000, section="disagreement")),
    "preferences": ("fmoo.png", Picture(1120, 3000, section="preferences")),
}
"""File in docs/, and what it shows, by whose page it is of."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (file, _) in PICTURES.items():
        parser.add_argument(f"--{name}", type=Path, help=f"page that docs/{file} shows")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pictures")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in PICTURES if getattr(options, name)}
    if not given:
        parser.error(f"give a page for one of --{', --'.join(PICTURES)}.")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"pictures need one of {', '.join(BROWSERS)}: install Chromium.")
    for name, page in given.items():
        file, picture = PICTURES[name]
        take(browser, page, picture, options.out / file)
        print(options.out / file)


def take(browser: str, page: Path, picture: Picture, out: Path) -> None:
    """Writes the picture of a page.

    Raises:
        SystemExit: The page is missing or has no such section.
    """
    if not page.is_file():
        sys.exit(f"there is no page {page}: give that of a finished run.")
    text = page.read_text()
    if picture.section is not None:
        if f'<section id="{picture.section}">' not in text:
            sys.exit(f"{page} has no section {picture.section!r}: give a run that has one.")
        hidden = f"body > header, footer, .choices, section:not(#{picture.section})"
        text = text.replace("</style>", f"{hidden} {{ display: none }}</style>", 1)
    with TemporaryDirectory() as folder:
        copy, shot = Path(folder) / page.name, Path(folder) / "shot.png"
        copy.write_text(text)
        for beside in page.parent.glob("*.js"):  # plotly, where several pages share it
            shutil.copy(beside, folder)
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--virtual-time-budget={SETTLED}", f"--screenshot={shot}",
                f"--window-size={picture.width},{picture.height}", copy.as_uri(),
            ],
            check=True,
            capture_output=True,
        )  # fmt: skip
        with Image.open(shot) as image:
            whole = image.convert("RGB")
    _cut(whole, picture).quantize(256).save(out, optimize=True)


def _cut(image: Image.Image, picture: Picture) -> Image.Image:
    """Returns a section without the empty page above and below it."""
    if picture.section is None:
        return image
    empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, empty).getbbox()
    if box is None:
        sys.exit(f"the section {picture.section!r} came out empty.")
    top, bottom = max(0, box[1] - MARGIN), min(image.height, box[3] + MARGIN)
    return image.crop((0, top, image.width, bottom))


if __name__ == "__main__":
    main()
