"""All clients of a process at once: one policy, an adapter for each, joint passes."""

from firm.alignment.stacked.client import StackedPolicy, StackedSampler
from firm.alignment.stacked.model import StackedModel

__all__ = ["StackedModel", "StackedPolicy", "StackedSampler"]
