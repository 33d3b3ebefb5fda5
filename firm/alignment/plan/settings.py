# ruff: noqa: D102  (documented where they are configured)
"""What a plan reads of a run's configuration, which lies on a floor above."""

from collections.abc import Mapping
from typing import Protocol

from firm.alignment.estimators import EstimatorConfig
from firm.alignment.generation import RolloutConfig
from firm.alignment.policy import PolicyConfig
from firm.federation.strategies import StrategyConfig


class RewardSettings(Protocol):
    """What a plan reads of a reward model's configuration."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def output(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...


class EvaluationSettings(Protocol):
    """What a plan reads of how much is measured."""

    @property
    def num_calibration_prompts(self) -> int: ...
    @property
    def num_validation_prompts(self) -> int: ...
    @property
    def num_test_prompts(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, RewardSettings]: ...


class GroupSettings(Protocol):
    """What a plan reads of clients that differ from the others."""

    @property
    def rewards(self) -> Mapping[str, RewardSettings]: ...


class RunSettings(Protocol):
    """What a plan reads of a run's configuration."""

    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def rewards(self) -> Mapping[str, RewardSettings]: ...
    @property
    def groups(self) -> Mapping[str, GroupSettings]: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def estimator(self) -> EstimatorConfig: ...
    @property
    def strategy(self) -> StrategyConfig: ...
    @property
    def evaluation(self) -> EvaluationSettings: ...
    @property
    def rounds(self) -> int: ...
