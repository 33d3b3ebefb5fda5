"""Does what README and guide say, page by page, as somebody who installs the wheel does.

    python benchmarks/guide.py    # a wheel, a new environment, an empty folder for each page
    python benchmarks/guide.py --python .venv/bin/python    # in an environment that is there

Every command and snippet runs in its fast form (`tests/docs/page.py`): a round of few and short
replies. Prints the seconds of each page.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from firm.run import print_table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/guide").glob("*.md"))]
EXTRAS = "cvxpy,network,privacy,wandb"
DRIVER = ROOT / "tests/docs/page.py"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, help="of an environment that has the project")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        python = options.python.absolute() if options.python else _installed(Path(folder))
        rows = [["installation", f"{time.monotonic() - begun:.0f}", "done"]]
        for page in PAGES:
            place = Path(folder) / "pages" / page.relative_to(ROOT)
            place.mkdir(parents=True)
            rows.append(_followed(python, page, place))
            sys.stderr.write(f"{' '.join(rows[-1])}\n")
    print_table("README and guide, from an empty folder", ["page", "seconds", "result"], rows)


def _installed(folder: Path) -> Path:
    """Returns the Python of a new environment with the wheel."""
    quiet = ["--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", *quiet, "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    python = folder / "environment/bin/python"
    install = [python, "-m", "pip", "install", *quiet, "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, f"{wheel}[{EXTRAS}]"], check=True)
    return python


def _followed(python: Path, page: Path, place: Path) -> list[str]:
    begun = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    environment.pop("PYTHONPATH", None)  # the wheel's modules, not the clone's
    with (place / "output.txt").open("w") as output:
        done = subprocess.run(
            [python, DRIVER, page],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    last = (place / "output.txt").read_text().splitlines()[-1:]
    result = "done" if done.returncode == 0 else f"failed: {''.join(last)}"
    return [str(page.relative_to(ROOT)), f"{time.monotonic() - begun:.0f}", result]


if __name__ == "__main__":
    main()
