"""The waiting requests of one engine as columns, so that thousands are ordered in one go.

Rows are in no order: a row that is removed is replaced by the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence

_FLOATS = ("queued", "deadline", "due", "num_left", "log_weight", "priority", "id", "log_left")
_FIRST_CAPACITY = 64


class WaitingTable:
    """The columns. `version` changes with every row that comes or goes."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._row_of: dict[int, int] = {}  # by sequence id
        self._floats = np.zeros((len(_FLOATS), _FIRST_CAPACITY))
        self._ints = np.zeros((2, _FIRST_CAPACITY), dtype=np.int64)
        self._flags = np.zeros((3, _FIRST_CAPACITY), dtype=np.bool_)
        self.num_preempted = self.num_demoted = 0
        self.version = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def _column(self, index: int) -> NDArray[np.float64]:
        return self._floats[index, : len(self.sequences)]

    @property
    def queued(self) -> NDArray[np.float64]:
        return self._column(0)

    @property
    def deadline(self) -> NDArray[np.float64]:
        return self._column(1)

    @property
    def due(self) -> NDArray[np.float64]:
        """The moment at which each strict request ends; infinite for others."""
        return self._column(2)

    @property
    def num_left(self) -> NDArray[np.float64]:
        """Tokens that each has to compute before its next token."""
        return self._column(3)

    @property
    def log_weight(self) -> NDArray[np.float64]:
        return self._column(4)

    @property
    def priority(self) -> NDArray[np.float64]:
        return self._column(5)

    @property
    def id(self) -> NDArray[np.float64]:
        """The ids of the sequences, which grow in the order of their arrival."""
        return self._column(6)

    @property
    def log_left(self) -> NDArray[np.float64]:
        """The logarithms of `num_left`."""
        return self._column(7)

    @property
    def tier(self) -> NDArray[np.int64]:
        return self._ints[0, : len(self.sequences)]

    @property
    def tenant(self) -> NDArray[np.int64]:
        return self._ints[1, : len(self.sequences)]

    @property
    def is_preempted(self) -> NDArray[np.bool_]:
        """True for requests that ran before: they go first, unless they are demoted."""
        return self._flags[0, : len(self.sequences)]

    @property
    def is_demoted(self) -> NDArray[np.bool_]:
        """True for requests whose answers are runaways: they go last in their tier."""
        return self._flags[2, : len(self.sequences)]

    @property
    def is_late(self) -> NDArray[np.bool_]:
        """True for requests that can no longer meet their target. Written by `StartOrder`."""
        return self._flags[1, : len(self.sequences)]

    @is_late.setter
    def is_late(self, value: NDArray[np.bool_]) -> None:
        self._flags[1, : len(self.sequences)] = value

    def add(self, sequence: Sequence) -> None:
        """Adds a row."""
        standing, request, row = sequence.standing, sequence.request, len(self.sequences)
        assert standing is not None, f"sequence {sequence.id} was not given a standing"
        if row == self._floats.shape[1]:
            self._grow()
        self._floats[:, row] = (
            standing.queued_s,
            standing.deadline_s,
            standing.due_s,
            standing.num_left,
            math.log(request.service.weight),
            request.priority,
            sequence.id,
            math.log(max(1, standing.num_left)),
        )
        self._ints[:, row] = standing.tier, standing.tenant
        is_preempted = sequence.num_preemptions > 0 or sequence.num_output_tokens > 0
        self._flags[:, row] = is_preempted, standing.is_relegated, standing.is_demoted
        self.num_preempted += is_preempted
        self.num_demoted += standing.is_demoted
        self.sequences.append(sequence)
        self._row_of[sequence.id] = row
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        """Removes a row: O(1)."""
        row, last = self._row_of.pop(sequence.id), len(self.sequences) - 1
        self.num_preempted -= int(self._flags[0, row])
        self.num_demoted -= int(self._flags[2, row])
        if row != last:
            for block in (self._floats, self._ints, self._flags):
                block[:, row] = block[:, last]
            moved = self.sequences[row] = self.sequences[last]
            self._row_of[moved.id] = row
        self.sequences.pop()
        self.version += 1

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Asserts that the rows are those of the waiting sequences."""
        ids = {sequence.id for sequence in waiting}
        assert ids == self._row_of.keys(), f"{ids ^ self._row_of.keys()} wait or have rows"
        for key, row in self._row_of.items():
            assert self.sequences[row].id == key, f"row {row} is not that of sequence {key}"
        assert self.num_preempted == int(self.is_preempted.sum()), "preempted rows are miscounted"
        assert self.num_demoted == int(self.is_demoted.sum()), "demoted rows are miscounted"

    def _grow(self) -> None:
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
        self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)], axis=1)
        self._flags = np.concatenate([self._flags, np.zeros_like(self._flags)], axis=1)
