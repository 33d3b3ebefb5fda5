"""The peak of whole runs on an accelerator beside the plan's."""

from dataclasses import replace

import pytest

from benchmarks.plan_memory import CRITIC_FREE, SHAPES, STACKED, Shape, configuration, measured

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

ONCE = {"rounds": 1}
FAST = {
    "PPO": Shape(2048, options=ONCE),
    "critic-free in parts": Shape(
        2048, options={**CRITIC_FREE, **ONCE, "estimator.micro_batch_size": 1}
    ),
    "PPO, stacked, M = 4": replace(SHAPES["128k, PPO, stacked, M = 4"], vocabulary=2048),
    "critic-free, stacked, checkpointed, M = 1": Shape(
        2048,
        num_objectives=1,
        options={
            **CRITIC_FREE,
            **STACKED,
            **ONCE,
            "policy.lora.dropout": 0.0,
            "policy.gradient_checkpointing": True,
        },
    ),
    "one client's value network": Shape(
        2048, options={"estimator.critic": "network", "num_clients": 1, "rounds": 2}
    ),
    "weights at each preference, bfloat16": Shape(
        2048,
        options={
            **CRITIC_FREE,
            **ONCE,
            "policy.conditioning.kind": "preference",
            "policy.dtype": "bfloat16",
        },
    ),
}


@pytest.mark.parametrize("name", FAST)
def test_a_runs_peak_is_the_plans(tmp_path, name):
    result = measured(configuration(FAST[name], tmp_path))
    assert result.peak == pytest.approx(result.planned, rel=0.1)


REAL = ("49k, PPO", "layers, value network, stacked")
"""Shapes that differ in kind, of those that benchmarks/plan_memory.py measures."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_runs_peak_is_the_plans_with_real_vocabularies(tmp_path, name):
    result = measured(configuration(SHAPES[name], tmp_path))
    assert result.peak == pytest.approx(result.planned, rel=0.1)
