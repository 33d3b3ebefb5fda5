"""Counts the bytes of the tensors that live at a time."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors created in the context; ``now`` and at most, ``peak``.

    Counts those on the device of `owned`, and excludes `owned` and views of it. In contrast to
    torch's `MemTracker`, it counts what torch allocates without a module's hooks, which joint
    passes of several clients do not call in order.

    Args:
        owned: Modules and tensors that exist already, such as the model.
    """

    def __init__(self, *owned: torch.nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}
        tensors = [
            tensor
            for each in owned
            for tensor in (
                [each] if isinstance(each, torch.Tensor) else [*each.parameters(), *each.buffers()]
            )
        ]
        self._device = tensors[0].device.type
        self._owned = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._live and address not in self._owned:
            self._live[address] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self.now -= self._live.pop(address)
