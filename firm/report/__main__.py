"""Rewrites the report of a run in one file, or prints how the settings of a study compare.

`python -m firm.report RUN`, also for a point of a sweep or study, whose pages share a file else;
`python -m firm.report FOLDER` puts that file into the page of the sweep or study itself.
`python -m firm.report STUDY --against FIRM` for a study of language models; `python -m firm.report
STUDY --rounds 50 100 --against FSMGDA` for a classic one.
"""

import argparse
import sys
from pathlib import Path

from firm.console import accept_any_text
from firm.report.classic_rounds import print_rounds
from firm.report.page import PAGE_NAME, stand_alone
from firm.report.run_page import write_report
from firm.report.settings_page import print_differences
from firm.run.errors import exit_on_user_error
from firm.run.sweep import SWEEP_NAME


def main(argv: list[str] | None = None) -> None:
    """Writes a self-contained report.html into the directory and prints where it lies."""
    parser = argparse.ArgumentParser(
        prog="python -m firm.report",
        description="Rewrite report.html of a run, sweep or study, in one file; with --against, "
        "print how a study of language models ends beside one of its settings; with --rounds, what "
        "a study of classic algorithms had come to in these rounds.",
    )
    parser.add_argument("run_path", type=Path, metavar="DIR", help="directory of the run or study")
    parser.add_argument("--rounds", type=int, nargs="+", help="rounds of a classic study")
    parser.add_argument("--against", help="setting that the others are compared with, by seed")
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
