"""Remembers how long the answers to each tenant, and to each beginning of a prompt, were.

Old answers count less and less. The number of keys is bounded: the one that was used least recently
is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from moe_serve.engine.service.lengths.censoring import hazards_of, shares_of
from moe_serve.engine.service.lengths.length_bins import (
    NUM_BINS,
    Floats,
    LengthBins,
    LengthDistribution,
)

_KEEP = 0.99  # weight of the past at each new answer
_MOST_KEYS = 4096


class PastLengths:
    """The answers by key, and those of all keys together."""

    def __init__(self, bins: LengthBins, most_keys: int = _MOST_KEYS) -> None:
        self._bins, self._most = bins, most_keys
        self._by_key: OrderedDict[str, Floats] = OrderedDict()  # [2, B]: ended, reached
        self._all: Floats = np.zeros((2, NUM_BINS))

    def __len__(self) -> int:
        return len(self._by_key)

    def note(self, key: str, length: int, *, is_cut: bool) -> None:
        """Adds an answer. One that was cut off reached its bin, and is not known to end there."""
        index = int(self._bins.bins_of([length])[0])
        counts = self._by_key.pop(key, None)
        counts = np.zeros((2, NUM_BINS)) if counts is None else counts
        self._by_key[key] = counts
        if len(self._by_key) > self._most:
            self._by_key.popitem(last=False)
        for each in (counts, self._all):
            each *= _KEEP
            each[1, : index + (not is_cut)] += 1.0
            each[0, index] += not is_cut

    def count(self, key: str) -> float:
        """Returns the number of answers of a key, old ones counting less."""
        counts = self._by_key.get(key)
        return 0.0 if counts is None else float(counts[1, 0])

    def distribution(self, key: str) -> LengthDistribution:
        """Returns the lengths of a key's answers; with few of them, mostly those of all."""
        shares_B = shares_of(hazards_of(self._all[0].copy(), self._all[1]))
        counts = self._by_key.get(key)
        if counts is not None:
            own_B = shares_of(hazards_of(counts[0].copy(), counts[1]))
            trust = counts[1, 0] / (counts[1, 0] + 10.0)
            shares_B = trust * own_B + (1.0 - trust) * shares_B
        return LengthDistribution(self._bins, shares_B)
