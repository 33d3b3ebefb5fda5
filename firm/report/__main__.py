"""Rewrites the report of a run as one file, or prints a comparison of a study's settings.

`python -m firm.report FOLDER` makes the page of a run, sweep or study self-contained; otherwise the
pages of a sweep or study load plotly from a shared file. `python -m firm.report STUDY --against
SETTING` prints the final differences from a setting; with `--rounds 50 100`, values and differences
at these rounds.
"""

import argparse
import sys
from pathlib import Path

from firm.base.console import accept_any_text
from firm.report.page import PAGE_NAME, stand_alone
from firm.report.run_page import write_report
from firm.report.terminal import print_differences, print_rounds
from firm.run.errors import exit_on_user_error
from firm.run.sweep import SWEEP_NAME


def main(argv: list[str] | None = None) -> None:
    """Writes a self-contained report.html into the directory and prints its path."""
    parser = argparse.ArgumentParser(
        prog="python -m firm.report",
        description="Rewrite report.html of a run, sweep or study as one file; with --against, "
        "print the differences of a study's settings from one of them; with --rounds, print their "
        "values at these rounds.",
    )
    parser.add_argument("run_path", type=Path, metavar="DIR", help="directory of the run or study")
    parser.add_argument("--rounds", type=int, nargs="+", help="evaluated rounds of a study")
    parser.add_argument("--against", help="setting to compare the others with, paired by seed")
    accept_any_text()
    options = parser.parse_args(argv)
    with exit_on_user_error():
        if options.rounds:
            print_rounds(options.run_path, options.rounds, against=options.against)
        elif options.against:
            print_differences(options.run_path, options.against)
        else:
            path = options.run_path
            is_sweep = (path / SWEEP_NAME).is_file()
            page = stand_alone(path / PAGE_NAME) if is_sweep else write_report(path, final=True)
            sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
