"""Clients of one process that share a policy and its forward passes, each with its adapter."""

from firm.alignment.stacked.client import StackedPolicy, StackedSampler, scored_in_lockstep
from firm.alignment.stacked.model import StackedModel

__all__ = ["StackedModel", "StackedPolicy", "StackedSampler", "scored_in_lockstep"]
