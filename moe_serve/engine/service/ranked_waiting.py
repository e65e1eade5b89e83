"""The waiting requests of one step by urgency, sorted only as far as they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.order import Floats, is_aged
from moe_serve.engine.service.waiting_table import WaitingTable

_NUM_FIRST = 64  # requests that are sorted at first, at most
_MOST_IDS = 2.0**31  # of sequences that wait at once, from the first to the last


class _RankedPlace(NamedTuple):
    """A waiting request in the order. Those that go by age alone have no bucket."""

    key: float
    bucket: float
    sequence: Sequence


class RankedWaiting:
    """Requests go by their bucket; in a bucket by the tokens that are left, then by arrival. A
    large bucket comes in several groups.

    Groups are taken one after the other, also by several callers in one step. Meanwhile requests
    may leave the table, but none may come.
    """

    def __init__(self, table: WaitingTable, keys: Callable[[], Floats], bucket_s: float) -> None:
        self._table, self._keys, self._bucket_s = table, keys, bucket_s
        first = keys()
        self._base = float(first.min(initial=math.inf))  # where the first bucket begins
        by_age = is_aged(first) if is_aged(np.array(self._base)) else None
        if by_age is not None:
            self._base = float(first.min(where=~by_age, initial=math.inf))
        rows = self._first_rows(first, by_age)
        self._places = self._sorted(first, rows)
        self._is_partial = len(rows) < len(first)
        self._next = 0

    @property
    def first(self) -> tuple[float, Sequence] | None:
        """The first one that was not yielded in a group yet, and its key."""
        place = self._place()
        return None if place is None else (place.key, place.sequence)

    def put_first(self, sequence: Sequence) -> None:
        """Moves a sequence to the front, in a group of its own."""
        others = [each for each in self._places[self._next :] if each.sequence is not sequence]
        self._places = [_RankedPlace(-math.inf, -math.inf, sequence), *others]
        self._next = 0

    def groups(self, until: float) -> Iterator[list[Sequence]]:
        """Yields the next groups of equally urgent sequences, as far as they begin with a key below
        `until`."""
        while (place := self._place()) is not None and place.key < until:
            group = [place.sequence]
            self._next += 1
            while (
                place.bucket >= 0.0
                and self._next < len(self._places)
                and self._places[self._next].bucket == place.bucket
            ):
                group.append(self._places[self._next].sequence)
                self._next += 1
            yield group

    def _place(self) -> _RankedPlace | None:
        """Returns the next place; sorts all waiting ones if the first ones are used up."""
        if self._next >= len(self._places) and self._is_partial:
            taken = {each.sequence.id for each in self._places}
            self._is_partial = False
            keys = self._keys()
            rest = self._sorted(keys, np.arange(len(keys)))
            self._places += [each for each in rest if each.sequence.id not in taken]
        return self._places[self._next] if self._next < len(self._places) else None

    def _first_rows(self, keys: Floats, by_age: NDArray[np.bool_] | None) -> NDArray[np.intp]:
        """Returns the rows of the first requests: of the oldest that go by age alone, else (None)
        of the shortest prompts of the first bucket."""
        table = self._table
        if by_age is not None:
            rows = np.flatnonzero(by_age)
            places = keys[rows]
        else:
            rows = np.flatnonzero(keys < self._base + self._bucket_s)
            ids = table.id[rows]
            places = table.num_left[rows] * _MOST_IDS + (ids - ids.min(initial=math.inf))
        if len(rows) > _NUM_FIRST:
            rows = rows[places <= np.partition(places, _NUM_FIRST - 1)[_NUM_FIRST - 1]]
        return rows

    def _sorted(self, keys: Floats, rows: NDArray[np.intp]) -> list[_RankedPlace]:
        """Returns the places of rows, in their order."""
        table, some = self._table, keys[rows]
        by_age = is_aged(some)
        bucket = np.where(by_age, -1.0, np.floor((some - self._base) / self._bucket_s))
        within = np.where(by_age, some, table.num_left[rows])
        order = np.lexsort((table.id[rows], within, bucket))
        sequences = [table.sequences[row] for row in rows[order].tolist()]
        found = zip(some[order].tolist(), bucket[order].tolist(), sequences, strict=True)
        return list(map(_RankedPlace._make, found))
