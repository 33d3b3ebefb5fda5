"""Estimates the time of operations from their size and the speeds of a device.

In the roofline model an operation takes as long as its arithmetic or its transfers to and from
memory, whichever is longer. Small operations take as long as Python needs to start one. All three
speeds are measured on the device, within about a second.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from firm.base.devices import synchronize

REPEATS, MEASURED_S = 3, 0.02
"""Fewest measurements of a speed, and the seconds that they fill; the fastest counts. On a busy
machine most wait, for many times as long as they take, for a thread that has no processor."""
SMALLEST_SIDE, LARGEST_SIDE = 256, 8_192
"""Rows and columns of the measured matrix products, which double until one takes `LONG_S`."""
LONG_S = 5e-3
"""Seconds after which a product runs at a device's full speed."""
COPIED_BYTES = 2**27
"""Bytes of a measured copy; more than caches hold."""


_aten = torch.ops.aten
FLOPS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Formulas of operations that torch does not count; they begin with the same arguments."""


@dataclass(frozen=True)
class Operation:
    """Size of one operation on tensors."""

    flops: int
    """Floating-point operations of matrix products, convolutions and attention; otherwise 0."""
    num_bytes: int
    """Bytes of its inputs and outputs."""
    dtype: torch.dtype
    """Dtype of its first input."""


class OperationCounter(FakeTensorMode):
    """Mode of tensors without content that lists the operations on them in `operations`.

    Views and other operations that move no data are left out.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.operations: list[Operation] = []
        self._depth = 0

    def take(self) -> list[Operation]:
        """Returns the operations since the last call."""
        taken, self.operations = self.operations, []
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Any = None
    ) -> Any:
        self._depth += 1  # an operation may be computed by others
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if not self._depth and not _is_view(func):
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not outputs:
            return
        count = FLOPS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        self.operations.append(
            Operation(
                count(*args, **kwargs, out_val=result) if count else 0,
                sum(tensor.nbytes for tensor in (*tensors, *outputs)),
                (tensors or outputs)[0].dtype,
            )
        )


def _is_view(func: Any) -> bool:
    returned = [each.alias_info for each in func._schema.returns if each.alias_info]
    return any(not alias.is_write for alias in returned)


class Speeds:
    """Speeds of a device, each measured when it is first needed.

    Args:
        device: The device.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._clock = device, clock
        self._flops: dict[torch.dtype, float] = {}
        self._bytes = 0.0
        self._start = 0.0

    def seconds(self, operations: Iterable[Operation]) -> float:
        """Returns the time of operations, one after another."""
        return sum(
            max(
                self.start,
                operation.num_bytes / self.bytes_per_second,
                operation.flops / self.flops_per_second(operation.dtype) if operation.flops else 0,
            )
            for operation in operations
        )

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """Returns the floating-point operations per second of a matrix product."""
        if dtype not in self._flops:
            side, seconds = SMALLEST_SIDE, 0.0
            while seconds < LONG_S and side <= LARGEST_SIDE:
                matrix = torch.ones(side, side, dtype=dtype, device=self._device)
                seconds = self._fastest(partial(torch.mm, matrix, matrix))
                self._flops[dtype] = 2 * side**3 / seconds
                side *= 2
        return self._flops[dtype]

    @property
    def bytes_per_second(self) -> float:
        """Bytes that are read and written per second."""
        if not self._bytes:
            source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            self._bytes = 2 * COPIED_BYTES / self._fastest(lambda: target.copy_(source))
        return self._bytes

    @property
    def start(self) -> float:
        """Seconds to start an operation of a language model, Python's part included."""
        if not self._start:
            architecture = LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            )  # fmt: skip
            ids = torch.zeros(1, 1, dtype=torch.long)
            counter = OperationCounter(allow_non_fake_inputs=True)
            with counter, torch.no_grad():
                empty = LlamaForCausalLM(architecture)
                counter.take()  # those of the initialization
                empty(ids, use_cache=False)
            model: Any = LlamaForCausalLM(architecture)
            model.to(self._device)
            own = ids.to(self._device)
            with torch.no_grad():
                taken = self._fastest(lambda: model(own, use_cache=False))
            self._start = taken / len(counter.operations)
        return self._start

    def _fastest(self, work: Callable[[], Any]) -> float:
        """Returns the least seconds of `work`, after a first time that is not measured."""
        work()
        taken = list[float]()
        while len(taken) < REPEATS or sum(taken) < MEASURED_S:
            synchronize(self._device)
            start = self._clock()
            work()
            synchronize(self._device)
            taken.append(self._clock() - start)
        return min(taken)
