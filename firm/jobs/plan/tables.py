"""Formats a plan as human-readable tables."""

import json
from collections.abc import Iterator
from typing import Any

from firm.jobs.plan.passes import Passes
from firm.jobs.plan.record import PlanTable, PolicyFigures, RunPlan, Work
from firm.report import formats


def plan_tables(plan: RunPlan) -> list[PlanTable]:
    """Returns the tables of a plan, without its notes; see `paper_tables` for the settings."""
    tables = [_model_table(plan), _work_table(plan)]
    if len(plan.places) > 1 or len(plan.memory_by_device()) > 1:
        tables.append(_placement_table(plan))
    return [*tables, *_memory_tables(plan)]


def _model_table(plan: RunPlan) -> PlanTable:
    rows = [("policy", plan.policy_path), *_inspection_rows(plan)]
    if figures := plan.policy:
        share = figures.num_trainable / (figures.num_parameters + figures.num_trainable)
        visits = plan.work.rounds * plan.work.clients_per_round
        both = visits * (figures.bytes_down + figures.bytes_up)
        trainable = f"{figures.num_trainable:,} in float32, {100 * share:.2g} % of all"
        rows += [
            ("parameters", f"{figures.num_parameters:,} in {plan.dtype}"),
            ("trainable", trainable),
            ("adapted layers", _layers_text(figures)),
            ("adapter", f"{formats.size(figures.adapter_bytes)} ({figures.adapter_bytes:,} bytes)"),
            (
                "down and up, per client and round",
                f"{formats.size(figures.bytes_down)} and {formats.size(figures.bytes_up)}",
            ),
            ("down and up, in total", formats.size(both)),
        ]
    for name, reward in plan.rewards.items():
        count = reward.num_parameters
        size = "" if count is None else f", {count:,} parameters, {formats.size(reward.num_bytes)}"
        if reward.base:
            size += f" and its base's {formats.size(reward.base_bytes)}"
        rows.append((f"reward {name}", reward.source + size))
    return PlanTable("Models", ("", ""), rows)


def _layers_text(figures: PolicyFigures) -> str:
    """Returns the adapted modules with the number of layers that have them."""
    names: dict[int, list[str]] = {}
    for name, num_layers in figures.layers_by_module.items():
        names.setdefault(num_layers, []).append(name)
    return "; ".join(
        f"{', '.join(own)} in {num_layers:,} layer{'s' * (num_layers > 1)}"
        for num_layers, own in names.items()
    )


def _inspection_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the rows on prompt format and end tokens."""
    if (found := plan.inspection) is None:
        return []
    formats_in_words = {
        "chat": "messages in its chat template",
        "hh": "in the format of HH-RLHF, without a chat template",
        "plain": "the last user message in policy.prompt.template",
    }
    context = f"{found.context:,} tokens" if found.context else "unlimited"
    return [
        ("prompts", formats_in_words[found.prompt_format]),
        ("replies end at", " ".join(found.ends) or "the maximum length, as there is no end token"),
        *(
            [("replies end before", " ".join(map(repr, stops)))]
            if (stops := found.stop_strings)
            else []
        ),
        ("context", context),
    ]


def _work_table(plan: RunPlan) -> PlanTable:
    work = plan.work
    visits = work.clients_per_round
    rows = [
        ("rounds", f"{work.rounds:,}, with {formats.count(visits, 'client')} each"),
        *_share_rows(work),
        (
            "optimizer steps",
            f"{work.optimizer_steps:,} per client and round, "
            f"{work.rounds * visits * work.optimizer_steps:,} in total",
        ),
        (
            "solves for weights in total",
            f"{work.rounds * (visits * work.solves + work.server_solves):,}",
        ),
        *_sampling_rows(work),
        ("forward and backward passes", _passes_text(work.updates)),
        *([("rollouts", _passes_text(work.rollouts))] if work.training_replies else []),
        *_time_rows(plan),
    ]
    return PlanTable("Work", ("", ""), rows)


def _time_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the row on time, if it is known."""
    if plan.seconds is None:
        return []
    one, total = map(formats.duration, (plan.seconds.round, plan.seconds.total))
    return [("time on this machine, about", f"{one} a round, {total} in all")]


def _sampling_rows(work: Work) -> list[tuple[str, str]]:
    """Returns the rows on sampled replies, if the run samples any."""
    if not work.training_replies:
        return []
    return [
        ("replies sampled in training", f"{work.training_replies:,}"),
        (
            "replies sampled to evaluate and calibrate",
            f"at most {work.evaluation_replies:,} and {work.calibration_replies:,}",
        ),
        ("reward calls, one per reply and score", f"at most {work.scored_replies:,}"),
    ]


def _share_rows(work: Work) -> Iterator[tuple[str, str]]:
    """Yields the number of training prompts per client, if known."""
    if work.prompts_per_client:
        fewest, most = work.prompts_per_client
        yield "prompts per client", f"{fewest:,}" + f" to {most:,}" * (most > fewest)


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


def _memory_tables(plan: RunPlan) -> Iterator[PlanTable]:
    if plan.policy and (memory := plan.memory):
        used = {plan.gradient_checkpointing: ", as configured"}
        sizes = plan.policy.bytes_by_dtype.items()
        rows = [
            ("policy", ", ".join(f"{formats.size(size)} {dtype}" for dtype, size in sizes)),
            *_shard_rows(plan.policy),
            ("adapter", formats.size(plan.policy.adapter_bytes)),
            ("client in training: critic, moments, saved state", formats.size(memory.training)),
            ("other client: critic, moments, saved states", formats.size(memory.waiting)),
            ("Jacobian [M, d]", formats.size(memory.jacobian)),
        ]
        for is_on, peak in memory.update.items():
            mode = f"{'with' if is_on else 'without'} gradient checkpointing"
            saved = f" ({formats.size(memory.saved[is_on])} saved for the backward pass)"
            rows.append((f"update {mode}{used.get(is_on, '')}", formats.size(peak) + saved))
        rows += [
            ("values and advantages", formats.size(memory.values)),
            *_pass_rows(plan),
        ]
        yield PlanTable("Memory of a process", ("", ""), rows)
    by_device = sorted(plan.memory_by_device().items())
    if rows := [(name, formats.size(size)) for name, size in by_device if size]:
        yield PlanTable("Peak memory by device", ("", ""), rows)


def _pass_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the memory of passes without gradients, with sampling if the run samples replies."""
    assert plan.memory is not None
    memory = plan.memory
    if not plan.work.training_replies:
        return [("passes over pairs without gradients", formats.size(memory.evaluation))]
    return [
        (
            "rollout, with log-probabilities",
            f"{formats.size(memory.rollout)} ({formats.size(memory.cache)} keys and values)",
        ),
        ("rollout of an evaluation or calibration", formats.size(memory.evaluation)),
        *([("rollout engine's copy and cache", formats.size(memory.engine))] * bool(memory.engine)),
    ]


def _shard_rows(policy: PolicyFigures) -> list[tuple[str, str]]:
    """Returns the bytes of a sharded policy in one process."""
    if not policy.gathered_bytes:
        return []
    return [
        ("  part that a process keeps", formats.size(policy.part_bytes)),
        ("  layers gathered for a pass, at most", formats.size(policy.gathered_bytes)),
    ]


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
        for h in plan.hyperparameters
        if h.paper
    ]
    given = PlanTable("Given in the paper", ("key", "value", "paper", "section", "equal"), rows)
    rows = [(h.path, _text(h.value)) for h in plan.hyperparameters if not h.paper]
    return [given, PlanTable("Not in the paper", ("key", "value"), rows)]


def _text(value: Any) -> str:
    """Formats a value as YAML, without optional quotes."""
    return value if value and isinstance(value, str) else json.dumps(value, default=str)
