"""Rollout engines, which sample replies; one file each.

Configurations select an engine by its `name`. To add one, write a file with a configuration
decorated with `register_rollout_engine` and an implementation of `RolloutEngine`.
"""

from firm.alignment.rollout_config import (
    ROLLOUT_ENGINES,
    RolloutEngineConfig,
    SeparateEngineConfig,
    TransformersConfig,
    VLLMConfig,
    register_rollout_engine,
)
from firm.alignment.rollout_engines.engine import RolloutEngine, SampledTokens, SampleRequest
from firm.alignment.rollout_engines.transformers import TransformersEngine, generate
from firm.alignment.rollout_engines.vllm import VLLMEngine

__all__ = [
    "ROLLOUT_ENGINES",
    "RolloutEngine",
    "RolloutEngineConfig",
    "SampleRequest",
    "SampledTokens",
    "SeparateEngineConfig",
    "TransformersConfig",
    "TransformersEngine",
    "VLLMConfig",
    "VLLMEngine",
    "generate",
    "register_rollout_engine",
]
