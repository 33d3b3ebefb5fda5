"""Sets the number of CPU threads: as configured, as recorded by the run, or as measured."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from firm.alignment.threads import choose, measure, short_step
from firm.base.randomness import RandomStream
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_loading import LoadedRun
from firm.run.directory import Run

AUTO = "auto"


def with_recorded_threads(cfg: AlignmentConfig) -> AlignmentConfig:
    """Returns the configuration with the number of threads of the run that it resumes, if any."""
    if cfg.num_threads != AUTO or not cfg.resume or not cfg.out:
        return cfg
    if not (cfg.out / "config.yaml").exists():
        return cfg
    settings = Run(cfg.out).settings()
    recorded = settings.get("num_threads") if isinstance(settings, Mapping) else None
    return replace(cfg, num_threads=recorded)


def set_threads(
    cfg: AlignmentConfig,
    loaded: LoadedRun,
    *,
    on_event: Callable[..., None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> AlignmentConfig:
    """Sets torch's number of CPU threads if it is to be measured.

    Several processes are left at torch's number, which launchers set to 1: they cannot all measure
    on their own, as one's choice changes another's times.

    Args:
        cfg: The run.
        loaded: Its models.
        on_event: Progress callback, called with the number and the reason if there was a choice.
        clock: Returns the time in seconds.

    Returns:
        The configuration with the number; null on an accelerator, where it is left to torch.
    """
    if cfg.num_threads != AUTO:
        return cfg
    if loaded.trainer.device.type != "cpu":
        return replace(cfg, num_threads=None)
    most = torch.get_num_threads()
    chosen, seconds = most, {}
    if most > 1 and loaded.processes.size == 1:
        with RandomStream(cfg.seed, "threads"):
            seconds = measure(short_step(loaded.trainer, clock), most, clock=clock)
        chosen = choose(seconds)
    torch.set_num_threads(chosen)
    if seconds and on_event:
        others = "; ".join(f"with {n}: {s:.2g} s" for n, s in seconds.items() if n != chosen)
        reason = f"a short step takes {seconds[chosen]:.2g} s; {others}"
        on_event("threads", text=f"threads: {chosen} of {most} ({reason})")
    return replace(cfg, num_threads=chosen)
