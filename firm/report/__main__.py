"""Rewrites the report of a run: `python -m firm.report RUN_DIR`."""

import argparse
import sys
from pathlib import Path

from firm.report.run_page import write_report
from firm.run.errors import exit_on_user_error


def main(argv: list[str] | None = None) -> None:
    """Writes a self-contained report.html into the run directory and prints where it lies."""
    parser = argparse.ArgumentParser(
        prog="python -m firm.report", description="Rewrite report.html of a run, in one file."
    )
    parser.add_argument("run_path", type=Path, metavar="RUN_DIR", help="directory of the run")
    run_path = parser.parse_args(argv).run_path
    with exit_on_user_error():
        sys.stdout.write(f"{write_report(run_path, final=True)}\n")


if __name__ == "__main__":
    main()
