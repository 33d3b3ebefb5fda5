"""Records of rows, which slice all data of a prompt or a reply together."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch

from firm.federation import Team

Index = slice | np.ndarray | torch.Tensor
"""Which rows: a slice, or their indices."""

ALONE = Team()
"""One process that has all rows for itself."""

BY_OBJECTIVE = {"axis": 1}
"""Metadata of a tensor's field [M, B, ...], whose rows are its second axis."""


@dataclass(frozen=True)
class Rows:
    """B rows: tensors [B, ...] (or ``BY_OBJECTIVE``), lists of length B, and records of B rows.

    Fields of other types are common to all rows.
    """

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        first = fields(self)[0]
        value = getattr(self, first.name)
        if isinstance(value, Rows):
            return value.num_rows
        return len(value) if isinstance(value, list) else value.size(first.metadata.get("axis", 0))

    @property
    def device(self) -> torch.device:
        """Device of the first tensor."""
        values = (getattr(self, f.name) for f in fields(self))
        devices = (value.device for value in values if isinstance(value, torch.Tensor | Rows))
        return next(devices, torch.device("cpu"))

    def rows(self, index: Index) -> Self:
        """Returns the record of some of the rows, in the order of the index; tensors are copied."""
        chosen = torch.arange(self.num_rows)[index]
        taken = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Rows):
                value = value.rows(chosen)
            elif isinstance(value, list):
                value = list(map(value.__getitem__, chosen.tolist()))
            elif isinstance(value, torch.Tensor):
                value = value[chosen] if field.metadata.get("axis", 0) == 0 else value[:, chosen]
            taken[field.name] = value
        return replace(self, **taken)

    def split(self, size: int | None) -> list[Self]:
        """Returns the rows in parts of ``size``, the last one possibly smaller; None: one part."""
        num_rows = self.num_rows
        if size is None or size >= num_rows:
            return [self]
        starts = range(0, num_rows, size)
        return [self.rows(slice(start, start + size)) for start in starts]


def by_chunks(
    function: Callable[[Any], torch.Tensor], rows: Rows, *, size: int, team: Team = ALONE
) -> torch.Tensor:
    """Returns a function's values [B, ...] for all B rows, computed ``size`` rows at a time.

    Each process of the team computes its share of every chunk; all get the whole result.
    """
    results = []
    for chunk in rows.split(size):
        if team.size == 1:
            results.append(function(chunk))
            continue
        own = chunk.rows(team.share(chunk.num_rows))
        with team.unanimous():
            result = function(own) if own.num_rows else None
        parts = [part for part in team.gather(result) if part is not None]
        results.append(torch.cat(parts).to(rows.device))
    return torch.cat(results)
