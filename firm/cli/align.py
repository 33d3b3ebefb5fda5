"""Prints what an alignment run would do, or runs it and prints the comparison with the base."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from firm.federation import Processes
from firm.federation.outside import legible, printable
from firm.jobs.alignment import alarms_at_start, align, run_folder
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.plan import make_plan, plan_tables
from firm.jobs.sources import check_sources
from firm.report import alarms
from firm.run import continued_by, print_table, run_cli, run_to_resume
from firm.run.comparison import prompts_text
from firm.run.shipped import with_shipped_paths

KEYS = {
    "The run": ["out", "resume", "plan", "seed", "rounds", "num_clients"],
    "Models": ["policy.path", "policy.lora.r", "rewards.NAME.path", "rewards.NAME.format"],
    "Prompts and replies": [
        "data.train.source",
        "data.test.source",
        "partition.kind",
        "rollout.max_new_tokens",
        "rollout.temperature",
    ],
    "A local step": [
        "estimator.name",
        "estimator.batch_size",
        "estimator.actor_learning_rate",
        "estimator.kl.coefficient",
    ],
    "A round": [
        "strategy.name",
        "strategy.num_local_steps",
        "strategy.beta",
        "strategy.preference",
    ],
}
"""The keys that matter, which `--help` shows."""


def main(cfg: AlignmentConfig) -> Path | None:
    """Runs what `cfg` asks for; returns the run's directory, None after a plan."""
    check_sources(with_shipped_paths(cfg))
    if cfg.plan:
        return print_plan(cfg)
    out = run_folder(cfg)
    with continued_by("align", out):
        result = align(replace(cfg, out=out))
    if result is None:  # another process prints
        return None
    final = result.final
    print_table(
        f"{prompts_text(final.num_prompts, final.num_rows, 'held-out')}, "
        f"{cfg.evaluation.num_samples} replies each, mean ± standard error",
        ["", "base", "aligned", "change", "z"],
        [row.cells() for row in result.comparison],
    )
    for alarm in alarms(row for row in result.rows if row["kind"] in ("run", "round")):
        print(f"note: {alarm.when}: {printable(alarm.text, max_length=5_000)}")
    print(legible(f"report   {result.page}\nadapter  {result.adapter}"))
    return result.path


def print_plan(cfg: AlignmentConfig) -> None:
    """Prints what would run, from the first of the launcher's processes."""
    if int(os.environ.get("RANK", 0)):
        return
    processes = Processes(0, int(os.environ.get("WORLD_SIZE", 1)), cfg.processes_per_client)
    plan = make_plan(with_shipped_paths(cfg), client_names(cfg), processes)
    for table in plan_tables(plan):
        print_table(table.title, table.header, table.rows)
    for note in [*plan.notes, *alarms_at_start(cfg)]:
        print(printable(note, max_length=5_000))


def print_plans(runs: Mapping[str, AlignmentConfig], what: str) -> None:
    """Prints the names and sizes of several runs, and what the first that trains would do."""
    rows = [[name, str(run.rounds), str(run.num_clients)] for name, run in runs.items()]
    print_table(f"{len(rows)} {what}s", [what, "rounds", "clients"], rows)
    print_plan(max(runs.values(), key=lambda run: run.rounds > 0))


cli = partial(
    run_cli,
    main,
    AlignmentConfig,
    default_file="configs/miniature.yaml",
    keys=KEYS,
    resumed=run_to_resume,
)
