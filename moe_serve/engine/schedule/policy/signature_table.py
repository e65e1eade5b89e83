"""Stores the signatures of a server's sequences as rows that a search can read at once.

A signature has a dimension for each expert of each layer, thousands in a large model. Only a few of
them decide which requests suit each other: the table offers the D dimensions in which signatures
differ most, and chooses them again whenever the number of signatures seen has doubled.

L layers, E experts, R rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

import numpy as np

from moe_serve.engine.schedule.policy.concave_cost import MOST_CERTAIN, ConcaveCost, Floats

_FIRST_CHOICE = 16  # signatures seen
_LAST_CHOICE = 4096
_FIRST_CAPACITY = 64


class SignatureTable:
    """Signatures by sequence id. A sequence without one reads as the mean of the others."""

    def __init__(self, cost: ConcaveCost, max_dimensions: int = 64) -> None:
        self._cost, self._max = cost, max_dimensions
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._full = np.zeros((0, 0), dtype=np.float32)  # [slots, L * E]
        self._spared = np.zeros((0, 0), dtype=np.float32)  # log(1 - full), made on first use
        self._x = np.zeros((0, 0), dtype=np.float32)  # [slots, D]
        self._stamps = np.zeros(0, dtype=np.int64)
        self._dimensions = np.zeros(0, dtype=np.int64)
        self._mean = np.zeros(0, dtype=np.float32)  # features of a sequence without a signature
        self._num_seen, self._clock, self._next_choice = 0, 0, _FIRST_CHOICE

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slots

    @property
    def scale(self) -> float:
        """The approximate ratio of the full cost to the cost in the table's dimensions."""
        return self._full.shape[1] / max(1, self._x.shape[1])

    def put(self, sequence_ids: Items[int], signatures_RLE: Floats) -> None:
        """Adds or replaces signatures."""
        if not sequence_ids:
            return
        flat = signatures_RLE.reshape(len(sequence_ids), -1)
        if not self._full.shape[1]:
            self._resize(_FIRST_CAPACITY, flat.shape[1])
        assert flat.shape[1] == self._full.shape[1], (
            f"signatures of {flat.shape[1]} dimensions, not {self._full.shape[1]}"
        )
        slots = [self._slot(key) for key in sequence_ids]
        self._full[slots] = flat
        if self._spared.shape == self._full.shape:
            self._spared[slots] = _log_spared(flat)
        self._num_seen += len(slots)
        self._clock += 1
        self._stamps[slots] = self._clock
        if self._num_seen >= self._next_choice:
            self._choose()
        else:
            self._x[slots] = self._cost.features(self._full[slots][:, self._dimensions])
        self._mean = np.asarray(self._x[list(self._slots.values())].mean(axis=0))

    def rows(self, sequence_ids: Items[int]) -> Floats:
        """Returns [R, D]: what these sequences add to the cost of a group."""
        if not len(self._x):
            return np.zeros((len(sequence_ids), 0), dtype=np.float32)
        slots = np.array([self._slots.get(key, -1) for key in sequence_ids], dtype=np.int64)
        x_RD = self._x[slots]
        x_RD[slots < 0] = self._mean
        return x_RD

    def stamp(self, sequence_ids: Iterable[int]) -> int:
        """Returns a number that grows when a signature of these is replaced, or when the dimensions
        change."""
        slots = [self._slots[key] for key in sequence_ids if key in self._slots]
        return int(self._stamps[slots].max()) if slots else 0

    def signature(self, sequence_id: int) -> Floats | None:
        """Returns the signature [L * E] as it was put."""
        slot = self._slots.get(sequence_id)
        return None if slot is None else self._full[slot]

    def needed(self, num_tokens: Mapping[int, int]) -> Floats | None:
        """Returns [L * E]: the probability that one of each sequence's given number of tokens
        chooses an expert.

        It is 1 - prod (1 - p), or None while there is no signature. Worked example, p of two
        sequences 0.5 and 0.2, one token of the first and two of the second: 1 - 0.5 * 0.8 * 0.8.
        """
        known = [key for key in num_tokens if key in self._slots]
        if not known:
            return None
        if self._spared.shape != self._full.shape:  # the first time, or the table has grown
            self._spared = _log_spared(self._full)
        rest = self._spared[[self._slots[key] for key in known]]
        counts = np.array([num_tokens[key] for key in known], dtype=np.float32)
        log = counts @ rest + (sum(num_tokens.values()) - counts.sum()) * rest.mean(axis=0)
        return np.asarray(1 - np.exp(log), dtype=np.float32)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops sequences. Unknown ones are ignored."""
        for key in sequence_ids:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def _slot(self, key: int) -> int:
        if key not in self._slots:
            if not self._free:
                self._resize(2 * len(self._full), self._full.shape[1])
            self._slots[key] = self._free.pop()
        return self._slots[key]

    def _resize(self, capacity: int, width: int) -> None:
        old = len(self._full)
        if not self._dimensions.size:  # until enough signatures are known: spread over all layers
            count = min(self._max, width)
            self._dimensions = np.arange(count, dtype=np.int64) * width // count
        shape = ((0, capacity - old), (0, width - self._full.shape[1]))
        self._full = np.pad(self._full, shape)
        self._x = np.pad(
            self._x, ((0, capacity - old), (0, len(self._dimensions) - self._x.shape[1]))
        )
        self._stamps = np.pad(self._stamps, (0, capacity - old))
        self._free += range(old, capacity)

    def _choose(self) -> None:
        """Chooses the dimensions with most variance among the present signatures."""
        self._next_choice = min(2 * self._num_seen, self._num_seen + _LAST_CHOICE)
        slots = list(self._slots.values())
        order = np.argsort(-self._full[slots].var(axis=0), kind="stable")
        self._dimensions = np.sort(order[: len(self._dimensions)])
        self._x = self._cost.features(self._full[:, self._dimensions])
        self._stamps[slots] = self._clock


def _log_spared(full: Floats) -> Floats:
    return np.asarray(np.log(1 - np.minimum(full, np.float32(MOST_CERTAIN))))
