"""The time of a plan: its operations are those of the run, at the speeds of the device."""

import json
import math
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmarks.plan_memory import BFLOAT16, CHECKPOINTED, CRITIC_FREE, STACKED, Shape
from benchmarks.plan_memory import configuration as random_run
from benchmarks.random_models import dialogues
from firm.alignment.roofline import (
    FLOPS,
    LARGEST_SIDE,
    SMALLEST_SIDE,
    Operation,
    OperationCounter,
    Speeds,
)
from firm.base import devices
from firm.federation import Processes
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.plan import make_plan, plan_tables
from firm.run import compose

COMMON = {
    "policy.lora.r": 2,
    "rounds": 1,
    "rollout.logprobs": "forward",  # which does not depend on the round
}
CPU = torch.device("cpu")


def plan_of(cfg):
    return make_plan(cfg, client_names(cfg), Processes())


def operations(work, *sizes, dtype=torch.float32):
    counter = OperationCounter()
    with counter:
        tensors = [torch.ones(size, dtype=dtype) for size in sizes]
        counter.take()
        work(*tensors)
    return counter.take()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**CRITIC_FREE, **STACKED, **BFLOAT16},
        {**CRITIC_FREE, **CHECKPOINTED},
        {"estimator.micro_batch_size": 2, "estimator.critic": "network"},
        {**CRITIC_FREE, "policy.conditioning.kind": "preference", "strategy.name": "fedavg"},
    ],
)
def test_a_run_multiplies_as_much_as_its_plan_says(options, tmp_path, monkeypatch):
    monkeypatch.setattr(Speeds, "seconds", lambda _, own: sum(each.flops for each in own))
    shape = Shape(256, num_prompt_tokens=24, num_new_tokens=16, options={**COMMON, **options})
    cfg = random_run(shape, tmp_path)
    planned = plan_of(cfg).seconds
    for operation, formula in FLOPS.items():
        monkeypatch.setitem(flop_registry, operation, formula)
    monkeypatch.setattr(devices, "product_seconds", lambda _: 1.0)  # its products would count
    with FlopCounterMode(display=False) as counted:
        main(cfg)
    assert planned.total == pytest.approx(counted.get_total_flops(), rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_pairs_multiplies_as_much_as_its_plan_says(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(Speeds, "seconds", lambda _, own: sum(each.flops for each in own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    random_run(Shape(256, num_prompt_tokens=24, num_new_tokens=16), tmp_path)  # writes a policy
    reply = " ".join(dialogues(256, 40, 1)[0].split()[1:])  # cut at the maximum length
    settings = {
        "policy.path": str(tmp_path / "policy"),
        "policy.dtype": dtype,
        "policy.lora.r": 2,
        "rollout.max_prompt_tokens": 24,
        "rollout.max_new_tokens": 16,
        "num_clients": 2,
        "rounds": 2,
        "estimator.name": "dpo",
        "estimator.batch_size": 8,
        "estimator.minibatch_size": 4,
        "evaluation.num_validation_prompts": 2,
        "evaluation.num_test_prompts": 2,
        "out": str(tmp_path / "run"),
    }
    for at, name in enumerate(("helpful", "harmless")):
        rows = [
            {"prompt": text, "chosen": reply, "rejected": "more " + reply}
            for text in dialogues(256, 22, 64)[32 * at : 32 * (at + 1)]
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings[f"pairs.{name}.source"] = str(tmp_path / f"{name}.jsonl")
    cfg = compose(AlignmentConfig, [], list(settings.items()))
    planned = plan_of(cfg).seconds
    for operation, formula in FLOPS.items():
        monkeypatch.setitem(flop_registry, operation, formula)
    monkeypatch.setattr(devices, "product_seconds", lambda _: 1.0)  # its products would count
    with FlopCounterMode(display=False) as counted:
        main(cfg)
    assert planned.total == pytest.approx(counted.get_total_flops(), rel=0.1)


def test_matrix_products_are_counted_and_views_are_not():
    (product,) = operations(lambda a, b: a.T @ b.view(8, 4), (8, 3), (4, 8))
    assert product == Operation(2 * 3 * 8 * 4, 4 * (8 * 3 + 8 * 4 + 3 * 4), torch.float32)
    (added,) = operations(lambda a: a.add_(1), (5,), dtype=torch.bfloat16)
    assert added == Operation(0, 2 * 5 * 2, torch.bfloat16)


def test_operations_made_of_others_count_once():
    (softmax,) = operations(lambda a: torch.softmax(a, 0), (6,))
    assert softmax.num_bytes == 2 * 4 * 6


def test_attention_on_the_cpu_is_counted():
    attend = torch.nn.functional.scaled_dot_product_attention
    counted = operations(attend, *[(2, 3, 5, 4)] * 3)
    assert sum(each.flops for each in counted) == 2 * (2 * 2 * 3 * 5 * 5 * 4)


def test_a_device_without_room_to_measure_leaves_the_memory_and_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Speeds, "seconds", full)
    plan = plan_of(random_run(Shape(256), tmp_path))
    assert plan.memory is not None
    assert plan.seconds is None
    assert any("no estimate of the time (out of memory)" in note for note in plan.notes)


def test_an_operation_takes_the_longest_of_start_bytes_and_arithmetic(monkeypatch):
    speeds = Speeds(CPU)
    monkeypatch.setattr(Speeds, "start", 0.5)
    monkeypatch.setattr(Speeds, "bytes_per_second", 10.0)
    monkeypatch.setattr(Speeds, "flops_per_second", lambda _, dtype: 100.0 * dtype.itemsize)
    sizes = [(0, 1), (0, 20), (1_600, 20)]
    alone = [speeds.seconds([Operation(*size, torch.float32)]) for size in sizes]
    assert alone == [0.5, 2.0, 4.0]
    assert speeds.seconds([Operation(*size, torch.float32) for size in sizes]) == sum(alone)
    assert speeds.seconds([Operation(1_600, 20, torch.bfloat16)]) == 8.0


def test_the_speeds_of_this_machine_are_measured_once(monkeypatch):
    monkeypatch.setattr("firm.alignment.roofline.COPIED_BYTES", 1_000)
    times = iter(range(1_000))
    speeds = Speeds(CPU, clock=lambda: float(next(times)))  # everything takes a second
    assert speeds.flops_per_second(torch.float32) == 2 * SMALLEST_SIDE**3
    assert speeds.bytes_per_second == 2_000
    assert 0.001 < speeds.start < 0.1  # a second by the operations of a small model
    used = next(times)
    assert speeds.seconds([Operation(2 * SMALLEST_SIDE**3, 0, torch.float32)]) == 1.0
    assert next(times) == used + 1


def test_other_work_on_this_machine_does_not_slow_the_measured_speed(monkeypatch):
    now, calls = 0.0, 0

    def clock():
        nonlocal now, calls
        calls += 1
        if calls % 2 == 0:  # one product in three is not interrupted
            now += 1e-3 if calls % 6 == 0 else 8e-3
        return now

    monkeypatch.setattr(torch, "mm", lambda *_: None)
    monkeypatch.setattr("firm.alignment.roofline.LARGEST_SIDE", 512)
    speed = Speeds(CPU, clock=clock).flops_per_second(torch.float32)
    assert speed == pytest.approx(2 * 512**3 / 1e-3)


@pytest.mark.parametrize(("seconds", "largest"), [(1e-6, LARGEST_SIDE), (1e-3, 512), (2.0, 256)])
def test_the_measured_product_is_as_large_as_the_device_is_fast(monkeypatch, seconds, largest):
    sides = []

    def product(matrix, _):
        sides.append(len(matrix))

    def fastest(_, work):  # of a device on which a product of the smallest matrices takes `seconds`
        work()
        return seconds * (sides[-1] / SMALLEST_SIDE) ** 3

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(Speeds, "_fastest", fastest)
    speed = Speeds(torch.device("meta")).flops_per_second(torch.bfloat16)
    assert sides[-1] == largest
    assert speed == pytest.approx(2 * SMALLEST_SIDE**3 / seconds)


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("sampling", {"rollout.max_new_tokens": 32, "estimator.num_epochs": 1}),
        ("updates", {"rollout.max_new_tokens": 2, "estimator.num_epochs": 8}),
        ("updates", {"rollout.max_new_tokens": 2, "estimator.num_epochs": 1}),
        ("evaluation", {"evaluation.num_test_prompts": 64, "evaluation.num_samples": 4}),
    ],
)
def test_a_plan_shows_the_time_and_what_shortens_it(part, options, tmp_path, monkeypatch):
    monkeypatch.setattr(Speeds, "seconds", lambda _, own: float(len(own)))
    options = {"num_threads": 1, "rounds": 4} | options
    plan = plan_of(random_run(Shape(256, options=options), tmp_path))
    rows = dict(next(table.rows for table in plan_tables(plan) if table.title == "Work"))
    assert rows["time on this machine, about"].endswith("in all")
    assert plan.seconds.total > 2 * plan.seconds.round > 0
    assert any("excludes reward models" in note for note in plan.notes)
    named, key, value, share = re.fullmatch(
        r"(\w+), \d+ %; --(\S+) (\d+) leaves (\d+) % of it", rows["  largest part"]
    ).groups()
    assert named == part

    def taken(plan):
        own = plan.seconds
        return own.evaluation if part == "evaluation" else own.rounds * getattr(own, part)

    shorter = plan_of(random_run(Shape(256, options=options | {key: int(value)}), tmp_path))
    assert taken(shorter) == pytest.approx(int(share) / 100 * taken(plan), rel=0.15)


@pytest.mark.parametrize("options", [{"policy.device": "meta:7"}, {"rollout.engine.name": "vllm"}])
def test_no_time_is_told_for_devices_and_engines_that_are_not_here(options, tmp_path):
    plan = plan_of(random_run(Shape(256, options=options), tmp_path))
    assert plan.memory is not None
    assert plan.seconds is None
    assert not any("Time is" in note for note in plan.notes)


def test_the_threads_of_the_run_are_those_that_are_measured(tmp_path, monkeypatch):
    seen = []

    def seconds(_, operations):
        seen.append(torch.get_num_threads())
        return math.nan

    monkeypatch.setattr(Speeds, "seconds", seconds)
    before = torch.get_num_threads()
    plan_of(random_run(Shape(256, options={"num_threads": before + 1}), tmp_path))
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_the_fastest_number_of_threads_counts_where_the_run_measures_them(tmp_path, monkeypatch):
    speed = {1: 1.0, 2: 4.0, 4: 2.0}  # two of four cores are busy
    monkeypatch.setattr(Speeds, "seconds", lambda _, own: len(own) / speed[torch.get_num_threads()])
    totals = {}
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for number in ("auto", 1, 2, None):
            options = {"num_threads": number}
            totals[number] = plan_of(
                random_run(Shape(256, options=options), tmp_path)
            ).seconds.total
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert totals["auto"] == totals[2] == totals[1] / 4 == totals[None] / 2
