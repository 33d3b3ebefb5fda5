"""Federated multi-objective alignment of language models.

Every client runs PPO with a LoRA adapter on its own prompts, computes one policy gradient per
objective, resolves their conflict by solving a small regularised MGDA problem, and sends its
adapter to a server that averages the adapters. The layers, from the bottom: ``solvers`` (Gram
matrix to weights), ``gradients`` (losses to Jacobian to Gram matrix), ``federation`` (clients,
engines, strategies), then ``alignment`` (local training of language models), ``miniature`` (the
embedded world), ``run`` (configuration, directories, checkpoints) and ``report``.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.jobs.interface import align

__version__ = "0.1.0"
__all__ = ["align"]
__getattr__, __dir__ = lazy(__name__)
