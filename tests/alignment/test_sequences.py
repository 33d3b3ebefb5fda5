"""Whatever belongs to a row follows it through every slicing."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from firm.alignment.sequences import BY_OBJECTIVE, SINGLE_PROCESS, Rows, by_chunks
from firm.federation import Team


@dataclass(frozen=True)
class Inner(Rows):
    texts: list[str]


@dataclass(frozen=True)
class Record(Rows):
    inner: Inner
    numbers: torch.Tensor
    losses: torch.Tensor = field(metadata=BY_OBJECTIVE)
    common: int = 7
    missing: torch.Tensor | None = None


NUM_ROWS = 6


@pytest.fixture
def record() -> Record:
    numbers = torch.arange(NUM_ROWS)
    return Record(Inner([str(n) for n in range(NUM_ROWS)]), numbers, torch.stack([numbers] * 2))


@pytest.mark.parametrize(
    "index", [slice(1, 4), np.array([5, 0, 0]), torch.tensor([2]), slice(0, 0), slice(None)]
)
def test_all_fields_of_a_row_stay_together(record, index):
    chosen = torch.arange(NUM_ROWS)[index].tolist()
    rows = record.rows(index)
    assert rows.num_rows == len(chosen)
    assert rows.numbers.tolist() == chosen
    assert rows.losses.tolist() == [chosen, chosen]
    assert rows.inner.texts == [str(n) for n in chosen]
    assert (rows.common, rows.missing) == (7, None)


def test_rows_of_rows_are_those_of_both_indices(record):
    once = record.rows(np.array([5, 3, 1])).rows(slice(1, 3))
    assert once.numbers.tolist() == [3, 1]


@pytest.mark.parametrize(("size", "sizes"), [(4, [4, 2]), (6, [6]), (9, [6]), (None, [6])])
def test_a_split_has_every_row_once_in_order(record, size, sizes):
    parts = record.split(size)
    assert [part.num_rows for part in parts] == sizes
    assert torch.cat([part.numbers for part in parts]).equal(record.numbers)


class WithIdle(Team):
    """A team whose other members have nothing to do."""

    def share(self, num_rows):
        return slice(0, num_rows)

    def gather(self, content):
        return [content, None]


@pytest.mark.parametrize("team", [SINGLE_PROCESS, WithIdle(0, 2)])
def test_chunks_give_what_the_whole_gives(record, team):
    sizes = []

    def doubled(rows: Record) -> torch.Tensor:
        sizes.append(rows.num_rows)
        return 2 * rows.numbers

    assert by_chunks(doubled, record, size=4, team=team).equal(2 * record.numbers)
    assert sizes == [4, 2]
    aside = by_chunks(lambda rows: doubled(rows)[None], record, size=4, team=team, dim=1)
    assert aside.equal(2 * record.numbers[None])
