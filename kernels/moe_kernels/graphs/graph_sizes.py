"""Chooses the sizes of decode steps to record as CUDA graphs, and the size that serves a step.

A graph launches what it was recorded with. So a step is padded to a recorded size: rows (one token
of one sequence each), and keys, as the splits of the keys decide how many programs attend.

    recorded: 1, 2, 4, 8, 16 rows x 512, 2048 keys a row
    5 sequences with 300 to 900 tokens, 2900 in all  ->  8 rows x 2048, as 2900 / 5 is above 512
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

_FIRST_ROWS = (1, 2, 4)
_ROWS_STEP = 8
_FIRST_CONTEXT = 512
_CONTEXT_FACTOR = 4


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """Room for `num_rows` rows that see up to `context` keys each on average."""

    num_rows: int
    context: int

    @property
    def num_keys(self) -> int:
        return self.num_rows * self.context


class GraphSizes:
    """The sizes that are recorded."""

    def __init__(self, sizes: Iterable[GraphSize]) -> None:
        self._contexts: dict[int, list[int]] = {}
        for size in sorted(set(sizes)):
            self._contexts.setdefault(size.num_rows, []).append(size.context)
        self._rows = list(self._contexts)

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows, ascending."""
        return tuple(self._rows)

    @property
    def contexts(self) -> tuple[int, ...]:
        """The contexts that any number of rows is recorded with, ascending."""
        return tuple(sorted({context for each in self._contexts.values() for context in each}))

    def choose(self, num_rows: int, num_keys: int) -> GraphSize | None:
        """Returns the fewest rows that hold `num_rows`, and with them the least context that holds
        `num_keys` over all rows; None if nothing recorded does.

        Rows of padding are copies of the row with the fewest keys, so they do not raise the mean.
        """
        rows = smallest(self._rows, num_rows)
        if rows is None:
            return None
        mean = -(-num_keys // max(1, num_rows))
        context = smallest(self._contexts[rows], mean)
        return None if context is None else GraphSize(rows, context)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then every multiple of 8, up to `max_rows` and with it."""
    assert max_rows > 0, f"a graph has a row, not {max_rows}"
    steps = (*_FIRST_ROWS, *range(_ROWS_STEP, max_rows, _ROWS_STEP))
    return (*(rows for rows in steps if rows < max_rows), max_rows)


def captured_rows(num_rows: int) -> int:
    """Returns the number of rows of the graph that serves a step, if graphs are recorded for all
    `row_buckets` up to a multiple of 8."""
    for rows in _FIRST_ROWS:
        if num_rows <= rows:
            return rows
    return -(-num_rows // _ROWS_STEP) * _ROWS_STEP


def context_buckets(max_positions: int) -> tuple[int, ...]:
    """512, 2048, 8192 and so on, up to `max_positions` and with it: a step may launch four times
    the programs that it needs, most of which end at once, and the graphs stay few."""
    contexts = []
    context = _FIRST_CONTEXT
    while context < max_positions:
        contexts.append(context)
        context *= _CONTEXT_FACTOR
    return (*contexts, max_positions)


def smallest(buckets: list[int] | tuple[int, ...], number: int) -> int | None:
    """Returns the first of ascending buckets that holds `number`; None if none does."""
    index = bisect_left(buckets, number)
    return buckets[index] if index < len(buckets) else None
