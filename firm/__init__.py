"""Federated multi-objective alignment of language models.

Every client runs PPO with a LoRA adapter on its own prompts, computes one policy gradient per
objective, resolves their conflict by solving a small regularised MGDA problem, and sends its
adapter to a server that averages the adapters. The layers, from the bottom: ``solvers`` (Gram
matrix to weights), ``gradients`` (losses to Jacobian to Gram matrix), ``federation`` (clients,
engines, strategies), then ``alignment`` (local training of language models), ``miniature`` (the
embedded world), ``run`` (configuration, directories, checkpoints) and ``report``.
"""

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firm.jobs.interface import align

__version__ = "0.1.0"
__all__ = ["align"]


def __getattr__(name: str) -> Any:
    """Imports `align` lazily, since it imports torch and transformers."""
    if name == "align":
        with warnings.catch_warnings():  # about notebook progress bars, which no run uses
            warnings.filterwarnings("ignore", message="IProgress not found")
            import tqdm.auto  # noqa: F401

        from firm.jobs.interface import align

        return align
    raise AttributeError(f"module 'firm' has no attribute {name!r}")
