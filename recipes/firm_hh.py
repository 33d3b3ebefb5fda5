"""FIRM end to end: one language model, several objectives, several clients, one page of results.

    python recipes/firm_hh.py                                    # the miniature world
    python recipes/firm_hh.py --config configs/hh_tinyllama.yaml # the paper's run
    python recipes/firm_hh.py --strategy.beta 0.5 --rounds 10    # any key, overridden
    python recipes/firm_hh.py --plan                             # sizes, memory, bytes, steps
    python recipes/firm_hh.py --resume runs/mine                 # continue after a stop
    torchrun --nproc_per_node 4 recipes/firm_hh.py               # clients on 4 GPUs

A run is a directory: configuration, metrics, checkpoints, the adapter, and `report.html`. The
command `firm align` does the same.
"""

from contextlib import closing
from dataclasses import replace

from firm.federation import Processes, ProcessesEngine
from firm.jobs import alignment_loading as loading
from firm.jobs.alignment import (
    claim_folder,
    notes_at_start,
    open_task,
    print_result,
    progress_of,
    run_folder,
    write_result,
)
from firm.jobs.alignment_config import KEYS, AlignmentConfig, client_names
from firm.jobs.fetch import fetch_policy
from firm.jobs.loop import train
from firm.jobs.plan import print_plan
from firm.jobs.sources import check_sources
from firm.run import continued_later, run_cli, run_to_resume


def main(cfg: AlignmentConfig) -> None:
    """Aligns a policy and compares it with its base model."""
    if cfg.plan:
        print_plan(cfg)
        return
    fetch_policy(cfg.policy.path)
    check_sources(cfg)
    out = run_folder(cfg)
    with continued_later(out):  # an interrupted run ends with the command that continues it
        run(replace(cfg, out=out))


def run(cfg: AlignmentConfig) -> None:
    """Runs the alignment in this process, which may be one of several."""
    processes = Processes.join(per_client=cfg.processes_per_client)  # one, or torchrun's
    # What depends on the machine is measured once; a resumed run keeps it.
    cfg = loading.with_fast_dtypes(loading.with_recorded(cfg), processes)
    out, progress = claim_folder(cfg, processes), progress_of(cfg)

    # The policy with its adapter, the reward models and the prompts; each process loads its own.
    loaded = loading.load(cfg, processes, on_event=progress.event)
    if processes.is_server:
        progress.event("started", alarms=notes_at_start(cfg, loaded))
    cfg = loading.set_threads(cfg, loaded, on_event=progress.event)

    # Reward models have different scales. Calibrations to [0, 1], fitted to replies of the base
    # model, make rewards comparable across objectives and clients.
    calibrations = loading.common_calibrations(loaded, cfg, out, on_event=progress.event)

    # A client has a shard of the prompts, an optimizer, value heads and random streams. The clients
    # of a process share its policy; each loads its adapter into it before training.
    clients = loading.build_clients(
        loaded, cfg, calibrations, on_event=progress.event, on_measured=progress.event
    )
    engine = loading.build_engine(clients, cfg, processes, out=out, on_event=progress.event)
    if not processes.is_server:  # its clients work for the first process until the run ends
        assert isinstance(engine, ProcessesEngine)
        with closing(loaded.trainer.rollout_engine):
            engine.serve()
        return

    with open_task(loaded, cfg, calibrations, engine, progress, out) as task:
        # A round of Algorithm 1 is firm/federation/strategies/firm.py: each client takes K local
        # steps along the direction that its weights λ give, and the server averages the adapters.
        # It starts from a fresh adapter or the last checkpoint's. After each round the task
        # validates, logs, saves and draws, and may undo the round or end the run.
        state = train(task, engine, client_names(cfg), cfg.strategy)

        # Base and aligned model reply to prompts that no client trains on.
        base, final = task.finish(state)
    print_result(cfg, write_result(cfg, out, base, final))


if __name__ == "__main__":
    run_cli(
        main,
        AlignmentConfig,
        description=__doc__ or "",
        default_file="configs/miniature.yaml",
        keys=KEYS,
        resumed=run_to_resume,
    )
