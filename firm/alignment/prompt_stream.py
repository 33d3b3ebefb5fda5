"""The order of a client's prompts."""

from collections.abc import Sequence
from typing import Any

import torch

from firm.alignment.prompts import Prompt
from firm.federation.randomness import RandomStream


class PromptStream:
    """Endless shuffled passes over one client's prompts.

    Every pass uses each prompt once. A batch that spans two passes has no prompt twice either: the
    new pass contributes only prompts that the old one did not.

    Args:
        prompts: The client's shard.
        stream: Random stream of the shuffles, not shared with anything else.
    """

    def __init__(self, prompts: Sequence[Prompt], stream: RandomStream) -> None:
        self.prompts = tuple(prompts)
        self._stream = stream
        self._order: list[int] = []  # remaining indices of this pass

    def draw(self, batch_size: int) -> list[Prompt]:
        """Returns the next prompts, all different.

        Raises:
            ValueError: The shard has fewer prompts than the batch.
        """
        if not 1 <= batch_size <= len(self.prompts):
            raise ValueError(
                f"a batch of {batch_size} different prompts cannot be drawn from a shard of "
                f"{len(self.prompts)}: lower the batch size, or give the client more prompts."
            )
        picked = self._order[:batch_size]
        self._order = self._order[batch_size:]
        if len(picked) < batch_size:
            with self._stream:
                order: list[int] = torch.randperm(len(self.prompts)).tolist()
            old = set(picked)
            new = [index for index in order if index not in old][: batch_size - len(picked)]
            used = set(new)
            self._order = [index for index in order if index not in used]
            picked += new
        return [self.prompts[index] for index in picked]

    def state(self) -> dict[str, Any]:
        """Returns a deep copy of the rest of this pass, and of the shuffle's generator."""
        order = torch.tensor(self._order, dtype=torch.long)
        return {"order": order, "stream": self._stream.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state of a stream over the same prompts."""
        self._order = state["order"].tolist()
        self._stream.restore(state["stream"])
