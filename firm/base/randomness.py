"""Named random streams: complete generator states that replace the global ones.

torch, numpy and TRL draw from global generators. With a separate stream for each client or stage,
the draws of one do not affect those of another.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch

from firm.base.devices import (
    accelerator_type,
    fresh_generator_states,
    generator_states,
    set_generator_states,
)
from firm.base.state import State

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


class GeneratorStates(NamedTuple):
    """States of the global generators of torch, numpy and Python, as these return them."""

    cpu: torch.Tensor
    accelerators: Sequence[torch.Tensor]
    numpy: Any
    python: Any


class RandomStream:
    """A named stream of random numbers, used as ``with stream: ...``.

    Inside the block, the global generators of torch (CPU and every accelerator), numpy (the legacy
    one) and Python have this stream's state. At the end of the block the advanced states are saved
    in the stream and the outer states are restored, also after an exception. Streams can be nested,
    but a stream cannot be nested in itself.
    """

    def __init__(self, seed: int, *names: str | int):
        self._seed = derive_seed(seed, *names)
        self._state = _fresh_states(self._seed)
        self._outer: GeneratorStates | None = None

    def __enter__(self) -> Self:
        if self._outer is not None:
            raise RuntimeError("This random stream is already in use; enter it once at a time.")
        outer = global_states()
        try:
            set_global_states(self._state)
        except BaseException:  # a time limit may interrupt here
            set_global_states(outer)
            raise
        self._outer = outer
        return self

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        outer = self._outer
        try:
            self._state = global_states()
        finally:
            self._outer = None
            set_global_states(outer)

    def state(self) -> State:
        """Returns a copy of the generators' states for a checkpoint."""
        states, (version, keys, gauss) = self._state, self._state.python
        _, numpy_keys, pos, has_gauss, numpy_gauss = states.numpy
        return {
            "torch": states.cpu.clone(),
            "accelerators": {
                # other types of accelerators cannot read them
                "type": accelerator_type(),
                "index": torch.accelerator.current_device_index() if states.accelerators else 0,
                "states": [state.clone() for state in states.accelerators],
            },
            # int64, because safetensors readers in other languages do not support uint32
            "numpy": {
                "keys": torch.from_numpy(numpy_keys.astype(np.int64)),
                "pos": int(pos),
                "has_gauss": int(has_gauss),
                "gauss": float(numpy_gauss),
            },
            "python": {
                "version": version,
                "keys": torch.tensor(keys, dtype=torch.int64),
                "gauss": gauss,
            },
        }

    def restore(self, state: State) -> None:
        """Restores a state returned by ``state``.

        States of accelerators that this machine does not have, or of another type, are dropped;
        accelerators missing from the state start from the stream's seed. The state of the device on
        which this process then was is that of the one on which it is now.
        """
        accelerators = []
        if torch.accelerator.is_available():
            fresh, saved = fresh_generator_states(self._seed), state["accelerators"]
            known = saved["states"] if saved["type"] == accelerator_type() else []
            here = torch.accelerator.current_device_index()
            there = saved.get("index", here)  # absent in older checkpoints
            accelerators = [*known, *fresh[len(known) :]]
            if there < len(known):
                accelerators[here], accelerators[there] = accelerators[there], accelerators[here]
            accelerators = accelerators[: len(fresh)]
        numpy_state, python_state = state["numpy"], state["python"]
        self._state = GeneratorStates(
            state["torch"].clone(),
            [each.clone() for each in accelerators],
            (
                "MT19937",
                numpy_state["keys"].numpy().astype(np.uint32),
                *(numpy_state[name] for name in ("pos", "has_gauss", "gauss")),
            ),
            (python_state["version"], tuple(python_state["keys"].tolist()), python_state["gauss"]),
        )


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the global generators at the end, for code that seeds them."""
    states = global_states()
    try:
        yield
    finally:
        set_global_states(states)


def _fresh_states(seed: int) -> GeneratorStates:
    return GeneratorStates(
        torch.Generator().manual_seed(seed).get_state(),
        fresh_generator_states(seed),
        np.random.RandomState([seed >> 32, seed & 0xFFFFFFFF]).get_state(),
        random.Random(seed).getstate(),
    )


def global_states() -> GeneratorStates:
    """Returns the states of the global generators."""
    accelerators = generator_states() if torch.accelerator.is_available() else []
    return GeneratorStates(
        torch.get_rng_state(), accelerators, np.random.get_state(), random.getstate()
    )


def set_global_states(states: GeneratorStates) -> None:
    """Restores states that ``global_states`` returned."""
    torch.set_rng_state(states.cpu)
    if states.accelerators:
        set_generator_states(states.accelerators)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


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
