"""Rewrites the page of a run, sweep or study as one file, or prints a study's values."""

from firm.jobs.configs import ReportConfig
from firm.report.page import COMPARISON_NAME, PAGE_NAME, stand_alone
from firm.report.run_page import write_report
from firm.report.terminal import classic_folders, print_differences, print_rounds
from firm.run.sweep import SWEEP_NAME


def main(cfg: ReportConfig) -> None:
    """Writes report.html and prints its path; with `rounds` or `against`, prints tables instead.

    The page of a classic study is comparison.html.

    Raises:
        UserError: The folder contains no run, sweep or study, or no such setting or round.
    """
    if cfg.rounds:
        print_rounds(cfg.run, cfg.rounds, against=cfg.against)
    elif cfg.against is not None:
        print_differences(cfg.run, cfg.against)
    elif (cfg.run / SWEEP_NAME).is_file():
        print(stand_alone(cfg.run / PAGE_NAME))
    elif classic_folders(cfg.run):
        print(stand_alone(cfg.run / COMPARISON_NAME))
    else:
        print(write_report(cfg.run, final=True))
