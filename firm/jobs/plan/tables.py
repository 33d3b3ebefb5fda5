"""Formats plans as tables, and prints them."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from firm.alignment.hyperparameters import hyperparameters
from firm.base.sanitize import printable
from firm.federation.processes import Processes
from firm.jobs.alarms import alarms_at_start
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.plan.planning import make_plan
from firm.jobs.plan.record import Passes, RunPlan, Seconds, Work
from firm.jobs.sources import check_sources
from firm.report import formats
from firm.run.progress import print_table
from firm.run.shipped import with_shipped_paths

MAX_ROWS = 200
"""Number of runs of a study or sweep that a plan lists by name."""


class PlanTable(NamedTuple):
    """A table for `firm.run.print_table`: title, headings and rows of text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def print_plan(cfg: AlignmentConfig) -> None:
    """Prints the plan of a run, in the first of a launcher's processes.

    Raises:
        UserError: A source of data or a reward model does not exist.
        SystemExit: With code 1, if the policy's configuration could not be read.
    """
    check_sources(cfg)
    if int(os.environ.get("RANK", 0)):
        return
    processes = Processes(0, int(os.environ.get("WORLD_SIZE", 1)), cfg.processes_per_client)
    plan = make_plan(with_shipped_paths(cfg), client_names(cfg), processes)
    for table in [*plan_tables(plan), *(paper_tables(plan) if cfg.paper else [])]:
        print_table(*table)
    for note in [*plan.notes, *alarms_at_start(cfg)]:
        print(printable(note, max_length=5_000))
    if plan.policy is None:
        raise SystemExit(1)


def print_plans(runs: Mapping[str, AlignmentConfig], noun: str) -> None:
    """Prints the names and sizes of several runs, and the plan of the first that trains."""
    rows = [[n, str(run.rounds), str(run.num_clients)] for n, run in [*runs.items()][:MAX_ROWS]]
    if len(runs) > MAX_ROWS:
        rows.append([f"and {len(runs) - MAX_ROWS:,} more", "", ""])
    print_table(f"{len(runs):,} {noun}s", [noun, "rounds", "clients"], rows)
    print_plan(max(runs.values(), key=lambda run: run.rounds > 0))


def plan_tables(plan: RunPlan) -> list[PlanTable]:
    """Returns the tables of a plan, without its notes; see `paper_tables` for the settings."""
    by_device = plan.memory_by_device()
    tables = [
        PlanTable("Models", ("", ""), list(_model_rows(plan))),
        PlanTable("Work", ("", ""), list(_work_rows(plan))),
    ]
    if len(plan.places) > 1 or len(by_device) > 1:
        tables.append(_placement_table(plan))
    if rows := list(_memory_rows(plan)):
        tables.append(PlanTable("Memory of a process", ("", ""), rows))
    if sizes := [(name, formats.size(size)) for name, size in sorted(by_device.items())]:
        tables.append(PlanTable("Peak memory by device", ("", ""), sizes))
    return tables


def _model_rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    yield "policy", plan.cfg.policy.path
    if inspection := plan.inspection:
        formats_in_words = {
            "chat": "messages in its chat template",
            "hh": "in the format of HH-RLHF, without a chat template",
            "plain": "the last user message in policy.prompt.template",
        }
        yield "prompts", formats_in_words[inspection.prompt_format]
        ends = " ".join(inspection.ends) or "the maximum length, as there is no end token"
        yield "replies end at", ends
        if inspection.stop_strings:
            yield "replies end before", " ".join(map(repr, inspection.stop_strings))
        context = f"{inspection.context:,} tokens" if inspection.context else "unlimited"
        yield "context", context
    if policy := plan.policy:
        share = policy.num_trainable / (policy.num_parameters + policy.num_trainable)
        visits = plan.work.rounds * plan.work.clients_per_round
        sizes = (policy.adapter_bytes, policy.bytes_down, policy.bytes_up)
        size, down, up = map(formats.size, sizes)
        total = visits * (policy.bytes_down + policy.bytes_up)
        yield "parameters", f"{policy.num_parameters:,} in {plan.cfg.policy.dtype}"
        yield "trainable", f"{policy.num_trainable:,} in float32, {100 * share:.2g} % of all"
        yield "adapted layers", _layers_text(policy.layers_by_module)
        yield "adapter", f"{size} ({policy.adapter_bytes:,} bytes)"
        yield "down and up, per client and round", f"{down} and {up}"
        yield "down and up, in total", formats.size(total)
    for name, reward in plan.rewards.items():
        count = reward.num_parameters
        size = "" if count is None else f", {count:,} parameters, {formats.size(reward.num_bytes)}"
        if reward.base:
            size += f" and its base's {formats.size(reward.base_bytes)}"
        yield f"reward {name}", reward.source + size


def _layers_text(layers_by_module: Mapping[str, int]) -> str:
    """Returns the adapted modules with the number of layers that have them."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, num_layers in layers_by_module.items():
        names[num_layers].append(name)
    return "; ".join(
        f"{', '.join(modules)} in {formats.count(num_layers, 'layer')}"
        for num_layers, modules in names.items()
    )


def _work_rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    work = plan.work
    visits = work.clients_per_round
    yield "rounds", f"{work.rounds:,}, with {formats.count(visits, 'client')} each"
    if work.prompts_per_client:
        fewest, most = work.prompts_per_client
        yield "prompts per client", f"{fewest:,}" + f" to {most:,}" * (most > fewest)
    own, total = work.optimizer_steps, work.rounds * visits * work.optimizer_steps
    yield "optimizer steps", f"{own:,} per client and round, {total:,} in total"
    num_solves = work.rounds * (visits * work.solves + work.server_solves)
    yield "solves for weights in total", f"{num_solves:,}"
    if work.training_replies:
        yield "replies sampled in training", f"{work.training_replies:,}"
        most = f"at most {work.evaluation_replies:,} and {work.calibration_replies:,}"
        yield "replies sampled to evaluate and calibrate", most
        yield "reward calls, one per reply and score", f"at most {work.scored_replies:,}"
    yield "forward and backward passes", _passes_text(work.updates)
    if work.training_replies:
        yield "rollouts", _passes_text(work.rollouts)
    if plan.seconds:
        one, total = map(formats.duration, (plan.seconds.round, plan.seconds.total))
        yield "time on this machine, about", f"{one} a round, {total} in all"
        yield "  largest part", _largest_part(plan.cfg, work, plan.seconds)


def _largest_part(cfg: AlignmentConfig, work: Work, seconds: Seconds) -> str:
    """Names what takes most of a run's time, and an option that shortens it."""
    parts = {
        "sampling": seconds.rounds * seconds.sampling,
        "updates": seconds.rounds * seconds.updates,
        "evaluation": seconds.evaluation,
    }
    part, taken = max(parts.items(), key=itemgetter(1))
    share = f"{part}, {100 * taken / max(seconds.total, 1e-9):.0f} %"
    if part == "evaluation" and not work.training_replies:
        return f"{share}, which a smaller split of each pairs.NAME shortens"
    if part == "sampling":
        options = [("rollout.max_new_tokens", cfg.rollout.max_new_tokens)]
    elif part == "updates":
        options = [("estimator.num_epochs", cfg.estimator.num_epochs)]
        if cfg.strategy.num_local_epochs is None:
            options.append(("strategy.num_local_steps", cfg.strategy.num_local_steps))
    else:
        is_test = math.prod(work.test) >= math.prod(work.validation)
        use, (number, _) = ("test", work.test) if is_test else ("validation", work.validation)
        samples = ("evaluation.num_samples", cfg.evaluation.num_samples)
        options = [samples, (f"evaluation.num_{use}_prompts", number)]
    options.append(("rounds", cfg.rounds))
    for key, value in options:
        if value > 1:
            less = value // 2
            return f"{share}; --{key} {less} leaves {100 * less / value:.0f} % of it"
    return share


def _passes_text(passes: Passes) -> str:
    """Formats the number of passes per process and round, and their rows."""
    clients = f" of {passes.clients} clients" * (passes.clients > 1)
    return f"{passes.count:,} per process and round, of {passes.rows:,} rows{clients}"


def _placement_table(plan: RunPlan) -> PlanTable:
    names = [name for name, reward in plan.rewards.items() if reward.device]
    rows = []
    for rank, place in enumerate(plan.places):
        policy = " ".join(place.policy_bytes) or place.policy
        devices = [policy, *(place.rewards[name] for name in names)]
        rows.append((str(rank), " ".join(place.clients) or "-", *devices))
    header = ("process", "clients", "policy", *(f"reward {name}" for name in names))
    return PlanTable(f"Placement, {len(rows)} process{'es' * (len(rows) > 1)}", header, rows)


def _memory_rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    policy, memory, size = plan.policy, plan.memory, formats.size
    if policy is None or memory is None:
        return
    mode = "with" if plan.cfg.policy.gradient_checkpointing else "without"
    sizes = policy.bytes_by_dtype.items()
    yield "policy", ", ".join(f"{size(num_bytes)} {dtype}" for dtype, num_bytes in sizes)
    if policy.gathered_bytes:
        yield "  part that a process keeps", size(policy.part_bytes)
        yield "  layers gathered for a pass, at most", size(policy.gathered_bytes)
    yield "adapter", size(policy.adapter_bytes)
    yield "client in training: critic, moments, saved state", size(memory.training)
    yield "other client: critic, moments, saved states", size(memory.waiting)
    yield "Jacobian [M, d]", size(memory.jacobian)
    update = f"{size(memory.update)} ({size(memory.saved)} saved for the backward pass)"
    yield f"update {mode} gradient checkpointing", update
    yield "values and advantages", size(memory.values)
    if not plan.work.training_replies:
        yield "passes over pairs without gradients", size(memory.evaluation)
        return
    rollout = f"{size(memory.rollout)} ({size(memory.cache)} keys and values)"
    yield "rollout, with log-probabilities", rollout
    yield "rollout of an evaluation or calibration", size(memory.evaluation)
    if memory.engine:
        yield "rollout engine's copy and cache", size(memory.engine)


def paper_tables(plan: RunPlan) -> list[PlanTable]:
    """Returns the tables of a run's settings beside the paper's, and of those it does not give."""
    rows = [
        (
            h.path,
            _text(h.value),
            " or ".join(map(_text, h.paper.values)),
            h.paper.section,
            "yes" if h.is_papers else "no",
        )
        for h in hyperparameters(plan.cfg)
        if h.paper
    ]
    given = PlanTable("Given in the paper", ("key", "value", "paper", "section", "equal"), rows)
    rows = [(h.path, _text(h.value)) for h in hyperparameters(plan.cfg) if not h.paper]
    return [given, PlanTable("Not in the paper", ("key", "value"), rows)]


def _text(value: Any) -> str:
    """Formats a value as YAML, without optional quotes."""
    return value if value and isinstance(value, str) else json.dumps(value, default=str)
