"""Federated multi-objective alignment of language models.

Every client runs PPO with a LoRA adapter on its own prompts, computes one policy gradient per
objective, resolves their conflict by a small regularised MGDA problem, and sends its adapter
to a server that averages. The floors, from the bottom: ``solvers`` (Gram matrix to weights),
``gradients`` (losses to Jacobian to Gram matrix), ``federation`` (clients, engines, strategies),
then ``alignment`` (what a client of a language model does), ``miniature`` (the embedded world),
``run`` (configuration, directories, checkpoints) and ``report``.
"""

__version__ = "0.1.0"
