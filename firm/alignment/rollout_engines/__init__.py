"""Rollout engines, which sample replies; one file each.

Configurations select an engine by its `name`. To add one, write a file with a configuration
decorated with `register_rollout_engine` and an implementation of `RolloutEngine`.
"""

from firm.alignment.rollout_config import (
    SeparateEngineConfig,
    TransformersConfig,
    register_rollout_engine,
)
from firm.alignment.rollout_engines.engine import (
    BackgroundEngine,
    RolloutEngine,
    SampledTokens,
    SampleRequest,
)
from firm.alignment.rollout_engines.transformers import TransformersEngine

__all__ = [
    "BackgroundEngine",
    "RolloutEngine",
    "SampleRequest",
    "SampledTokens",
    "SeparateEngineConfig",
    "TransformersConfig",
    "TransformersEngine",
    "register_rollout_engine",
]
