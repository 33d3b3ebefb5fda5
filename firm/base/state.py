"""State of a run, as checkpoints store it."""

import copy
from typing import Any

State = dict[str, Any]
"""Contents of a checkpoint: nested dicts and lists of tensors, numbers, strings, bools and None.
"""


def copy_of_state(state: State) -> State:
    """Returns a deep copy of a state, whose tensors `copy.deepcopy` would copy slowly."""
    import torch  # here, since configurations name states, and are read without torch
    from torch.utils._pytree import tree_map

    def copied(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor)
        return leaf.detach().clone() if is_tensor else copy.deepcopy(leaf)

    return tree_map(copied, state)
