"""State of a run, as checkpoints store it."""

import copy
from typing import Any

State = dict[str, Any]
"""Contents of a checkpoint: nested dicts and lists of tensors, numbers, strings, bools and None.
"""


def copy_of_state(state: State) -> State:
    """Returns a deep copy of a state, whose tensors `copy.deepcopy` would copy slowly."""
    import torch  # here, since configurations name states, and are read without torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, structure = tree_flatten(state)
    copies = [
        leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
        for leaf in leaves
    ]
    return tree_unflatten(copies, structure)
