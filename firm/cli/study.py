"""Runs a study and prints its table."""

from functools import partial
from pathlib import Path

from firm.cli import align
from firm.federation.outside import legible
from firm.jobs.study import StudyConfig, study, study_configs
from firm.run import print_table, run_cli, study_to_resume


def main(cfg: StudyConfig) -> Path | None:
    """Runs what is not done yet; returns the folder, None after a plan or with runs elsewhere."""
    if cfg.plan:
        return align.print_plans(study_configs(cfg), "run")
    result = study(cfg)
    if result is None:
        return None
    print_table(
        f"{cfg.name}: final model on the test prompts, mean ± standard deviation over "
        f"{len(cfg.seeds)} seeds",
        result.header,
        result.rows,
    )
    for table in result.differences:
        print_table(f"{table.title}: {table.text}", table.headings, table.rows)
    print(legible(f"report   {result.report}"))
    return result.path


cli = partial(run_cli, main, StudyConfig, resumed=study_to_resume)
