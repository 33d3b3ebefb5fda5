"""Records of rows: whatever belongs to a prompt or a reply is sliced with it, in one place."""

from collections.abc import Callable
from dataclasses import Field, dataclass, fields, replace
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


def _row_axis(column: Field) -> int:
    return column.metadata.get("axis", 0)


@dataclass(frozen=True)
class Rows:
    """B rows: tensors [B, ...] (or ``BY_OBJECTIVE``), lists of length B, and records of B rows.

    Fields of other types are common to all rows.
    """

    @property
    def num_rows(self) -> int:
        """B."""
        first = fields(self)[0]
        value = getattr(self, first.name)
        if isinstance(value, Rows):
            return value.num_rows
        return len(value) if isinstance(value, list) else value.size(_row_axis(first))

    @property
    def device(self) -> torch.device:
        """Where the first tensor is."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor | Rows):
                return value.device
        return torch.device("cpu")

    def rows(self, index: Index) -> Self:
        """Returns the record of some of the rows, in the order of the index; tensors are copied."""
        chosen = torch.arange(self.num_rows)[index]

        def taken(value: Any, axis: int) -> Any:
            if isinstance(value, Rows):
                return value.rows(chosen)
            if isinstance(value, list):
                return [value[row] for row in chosen.tolist()]
            if isinstance(value, torch.Tensor):
                return value[chosen] if axis == 0 else value[:, chosen]
            return value

        return replace(
            self, **{f.name: taken(getattr(self, f.name), _row_axis(f)) for f in fields(self)}
        )

    def split(self, size: int | None) -> list[Self]:
        """Returns the rows in parts of ``size``, of which the last may be smaller; None: whole."""
        num_rows = self.num_rows
        size = size or num_rows
        return [self.rows(slice(start, start + size)) for start in range(0, num_rows, size)]


def by_chunks(
    function: Callable[[Any], torch.Tensor], rows: Rows, *, size: int, team: Team = ALONE
) -> torch.Tensor:
    """Returns what a function of rows gives, shape [B, ...], computed in chunks.

    Args:
        function: From a record of b rows to a tensor [b, ...].
        rows: B rows.
        size: Rows of a chunk.
        team: Processes of which each computes its share of every chunk; all get the whole.
    """
    return torch.cat([_by_team(function, chunk, team) for chunk in rows.split(size)])


def _by_team(function: Callable[[Any], torch.Tensor], rows: Rows, team: Team) -> torch.Tensor:
    if team.size == 1:
        return function(rows)
    own = rows.rows(team.share(rows.num_rows))
    result = team.together(lambda: function(own) if own.num_rows else None)
    parts = [part for part in team.gather(result) if part is not None]
    return torch.cat(parts).to(rows.device)
