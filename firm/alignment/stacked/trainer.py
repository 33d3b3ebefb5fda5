"""Trainers of one policy, each with its own adapter, which join their passes in lockstep."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from firm.alignment.rewards import Scored, ScoringRequest, scored_together
from firm.alignment.stacked.client import StackedPolicy, StackedSampler
from firm.alignment.stacked.model import StackedModel
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.federation.lockstep import clock, together


def stacked_trainers(trainer: MultiObjectiveTrainer) -> "Callable[[], StackedTrainer]":
    """Returns a factory of trainers that share this policy but have separate adapters.

    In ``lockstep`` their passes are one large batch (`StackedModel`), and a reward model scores
    the replies of all in one call.
    """
    stack = StackedModel(trainer.policy_model, prompts_once=trainer.prompts_once)
    engine = trainer.rollout_config.engine.stacked(trainer.rollout_engine, stack.sample)
    return partial(StackedTrainer, stack, **{**trainer.settings(), "rollout_engine": engine})


def _scored(asked: ScoringRequest) -> Callable[[], Scored]:
    return together(scored_together, asked, size=len(asked.completions))


class StackedTrainer(MultiObjectiveTrainer):
    """A trainer whose passes are joined with those of other trainers of the same policy.

    Args:
        stack: Joins the passes.
        settings: Those of `MultiObjectiveTrainer`.
    """

    _scored = staticmethod(_scored)
    _clock = staticmethod(clock)

    def __init__(self, stack: StackedModel, **settings: Any) -> None:
        self._stack = stack
        super().__init__(**settings)

    def _adapter(self) -> dict[str, torch.nn.Parameter]:
        return self._stack.new_adapter()

    def _new_policy(self, **fields: Any) -> StackedPolicy:
        return StackedPolicy(**fields, stack=self._stack, adapter=self.adapter_parameters)

    def _new_sampler(self, **fields: Any) -> StackedSampler:
        assert isinstance(self._policy, StackedPolicy)
        return StackedSampler(**fields, policy=self._policy)
