"""Prints plans on the terminal."""

import os
from collections.abc import Mapping
from itertools import islice

from firm.base.sanitize import printable
from firm.federation.engines.processes import Processes
from firm.jobs.alarms import alarms_at_start
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.plan.planning import make_plan
from firm.jobs.plan.tables import paper_tables, plan_tables
from firm.run.progress import print_table
from firm.run.shipped import with_shipped_paths

MAX_ROWS = 200
"""Number of runs of a study or sweep that a plan lists by name."""


def print_plan(cfg: AlignmentConfig) -> None:
    """Prints the plan of a run, in the first of a launcher's processes.

    Raises:
        SystemExit: With code 1, if the policy's configuration could not be read.
    """
    if int(os.environ.get("RANK", 0)):
        return
    processes = Processes(0, int(os.environ.get("WORLD_SIZE", 1)), cfg.processes_per_client)
    plan = make_plan(with_shipped_paths(cfg), client_names(cfg), processes)
    for table in [*plan_tables(plan), *(paper_tables(plan) if cfg.paper else [])]:
        print_table(table.title, table.header, table.rows)
    for note in [*plan.notes, *alarms_at_start(cfg)]:
        print(printable(note, max_length=5_000))
    if plan.policy is None:
        raise SystemExit(1)


def print_plans(runs: Mapping[str, AlignmentConfig], noun: str) -> None:
    """Prints the names and sizes of several runs, and the plan of the first that trains."""
    shown = islice(runs.items(), MAX_ROWS)
    rows = [[name, str(run.rounds), str(run.num_clients)] for name, run in shown]
    if len(runs) > MAX_ROWS:
        rows.append([f"and {len(runs) - MAX_ROWS:,} more", "", ""])
    print_table(f"{len(runs):,} {noun}s", [noun, "rounds", "clients"], rows)
    print_plan(max(runs.values(), key=lambda run: run.rounds > 0))
