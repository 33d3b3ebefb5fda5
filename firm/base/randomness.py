"""Named random streams: complete generator states that replace the global ones.

torch, numpy and TRL draw from global generators. With a separate stream for each client or stage,
the draws of one do not affect those of another.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from firm.base.devices import (
    accelerator_type,
    fresh_generator_states,
    generator_states,
    set_generator_states,
)
from firm.base.state import State, copy_of_state

Item = TypeVar("Item")


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a seed in [0, 2^63), derived from the run's seed and a sequence of names.

    >>> derive_seed(0, "sampling", 1) == derive_seed(0, "sampling", 1)
    True
    >>> derive_seed(0, "sampling", 1) == derive_seed(0, "sampling", 2)
    False
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RandomStream:
    """A named stream of random numbers, used as ``with stream: ...``.

    Inside the block, the global generators of torch (CPU and every accelerator), numpy (the legacy
    one) and Python have this stream's state. At the end of the block the advanced states are saved
    in the stream and the outer states are restored, also after an exception. Streams can be nested,
    but a stream cannot be nested in itself.
    """

    def __init__(self, seed: int, *names: str | int):
        self._seed = derive_seed(seed, *names)
        self._state = _fresh_state(self._seed)
        self._outer: State | None = None

    def __enter__(self) -> Self:
        if self._outer is not None:
            raise RuntimeError("This random stream is already in use; enter it once at a time.")
        outer = _global_state()
        try:
            _set_global_state(self._state)
        except BaseException:  # a time limit may interrupt here
            _set_global_state(outer)
            raise
        self._outer = outer
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._outer is not None
        outer = self._outer
        try:
            self._state = _global_state()
        finally:
            self._outer = None
            _set_global_state(outer)

    def state(self) -> State:
        """Returns a copy of the generators' states for a checkpoint."""
        return copy_of_state(self._state)

    def restore(self, state: State) -> None:
        """Restores a state returned by ``state``.

        States of accelerators that this machine does not have, or of another type, are dropped;
        accelerators missing from the state start from the stream's seed.
        """
        fresh, saved = fresh_generator_states(self._seed), state["accelerators"]
        known = saved["states"] if saved["type"] == accelerator_type() else []
        states = [*known, *fresh[len(known) :]][: len(fresh)]
        self._state = copy_of_state({**state, "accelerators": _typed(states)})


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the global generators at the end, for code that seeds them."""
    state = _global_state()
    try:
        yield
    finally:
        _set_global_state(state)


def _fresh_state(seed: int) -> State:
    return {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "accelerators": _typed(fresh_generator_states(seed)),
        "numpy": _pack_numpy(np.random.RandomState([seed >> 32, seed & 0xFFFFFFFF]).get_state()),
        "python": _pack_python(random.Random(seed).getstate()),
    }


def _global_state() -> State:
    return {
        "torch": torch.get_rng_state(),
        "accelerators": _accelerator_state(),
        "numpy": _pack_numpy(np.random.get_state()),
        "python": _pack_python(random.getstate()),
    }


def _set_global_state(state: State) -> None:
    torch.set_rng_state(state["torch"])
    if states := state["accelerators"]["states"]:
        set_generator_states(states)
    packed = state["numpy"]
    keys = packed["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, packed["pos"], packed["has_gauss"], packed["gauss"]))
    packed = state["python"]
    random.setstate((packed["version"], tuple(packed["keys"].tolist()), packed["gauss"]))


def _accelerator_state() -> State:
    if not torch.accelerator.is_available():
        return {"type": None, "states": []}
    return _typed(generator_states())


def _typed(states: list[torch.Tensor]) -> State:
    """Returns the accelerators' states with their type, as others cannot read them."""
    return {"type": accelerator_type(), "states": states}


def _pack_numpy(state: Any) -> State:
    _, keys, pos, has_gauss, gauss = state
    # int64, because safetensors readers in other languages do not support uint32
    keys = torch.from_numpy(keys.astype(np.int64))
    return {"keys": keys, "pos": int(pos), "has_gauss": int(has_gauss), "gauss": float(gauss)}


def _pack_python(state: Any) -> State:
    version, keys, gauss = state
    return {"version": version, "keys": torch.tensor(keys, dtype=torch.int64), "gauss": gauss}


class ShuffledPasses(Generic[Item]):
    """Endless shuffled passes over a client's examples, such as its prompts.

    Every pass uses each example once. A batch that spans two passes has no example twice either:
    the new pass contributes only examples that the old one did not.

    Args:
        examples: The client's shard.
        stream: Random stream of the shuffles, not shared with anything else.
    """

    def __init__(self, examples: Sequence[Item], stream: RandomStream) -> None:
        self.examples = tuple(examples)
        self._stream = stream
        self._order: list[int] = []  # remaining indices of this pass

    def draw(self, batch_size: int) -> list[Item]:
        """Returns the next examples, all different.

        Raises:
            ValueError: The shard has fewer examples than the batch.
        """
        if not 1 <= batch_size <= len(self.examples):
            raise ValueError(
                f"a batch of {batch_size} different examples cannot be drawn from a shard of "
                f"{len(self.examples)}: lower the batch size, or give the client more of them."
            )
        picked = self._order[:batch_size]
        self._order = self._order[batch_size:]
        if len(picked) < batch_size:
            with self._stream:
                order: list[int] = torch.randperm(len(self.examples)).tolist()
            old = set(picked)
            new = [index for index in order if index not in old][: batch_size - len(picked)]
            used = set(new)
            self._order = [index for index in order if index not in used]
            picked += new
        return [self.examples[index] for index in picked]

    def state(self) -> dict[str, Any]:
        """Returns a deep copy of the rest of this pass, and of the shuffle's generator."""
        order = torch.tensor(self._order, dtype=torch.long)
        return {"order": order, "stream": self._stream.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state of passes over the same examples."""
        self._order = state["order"].tolist()
        self._stream.restore(state["stream"])
