"""A rollout engine of another package: samples of a copy whose log-probabilities are off."""

from dataclasses import replace
from typing import Literal

from firm.alignment.rollout_engines import (
    SeparateEngineConfig,
    TransformersEngine,
    register_rollout_engine,
)
from firm.base.fields import configuration


@register_rollout_engine
@configuration
class ShiftedConfig(SeparateEngineConfig):
    """Log-probabilities that are off."""

    name: Literal["shifted"] = "shifted"
    """Rollout engine."""
    shift: float | None = 0.25
    """Number of nats by which they are too low; null: the engine has none."""

    def engine(self, policy, tokenizer, config):
        return ShiftedEngine(policy, tokenizer, self.shift)


class ShiftedEngine(TransformersEngine):
    """The policy's own passes, with other log-probabilities."""

    def __init__(self, policy, tokenizer, shift: float | None) -> None:
        super().__init__(policy, tokenizer)
        self.shift = shift

    def sample(self, requests):
        return [
            replace(samples, logprobs=None if self.shift is None else samples.logprobs - self.shift)
            for samples in super().sample(requests)
        ]
