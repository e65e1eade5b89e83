"""Corrects predicted quantiles by how often recent answers exceeded them.

A predicted P90 should be exceeded by one answer in ten. If more exceed it, the corrected one is
taken at a higher level of the distribution (split conformal prediction on the newest answers, whose
level adapts: Gibbs and Candes, 2021).
"""

from __future__ import annotations

from collections import deque

import numpy as np

_NUM_RECENT = 1000
_EVERY = 10  # answers between two computations
_RATE = 0.005  # of the adaptation
_LEAST = 50  # answers before the first correction
_LOWEST, _HIGHEST = 0.01, 0.999


class Coverage:
    """The level at which a quantile is taken, so that a share `level` of answers is within it."""

    def __init__(self, level: float) -> None:
        self._level = self._aim = level
        self._taken = level  # where the distribution is read
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._is_within: deque[bool] = deque(maxlen=_NUM_RECENT)
        self._num_noted = 0

    @property
    def taken(self) -> float:
        """The level at which distributions must be read."""
        return self._taken

    @property
    def share(self) -> float | None:
        """The share of recent answers within their corrected quantile; None: no answer yet."""
        return sum(self._is_within) / len(self._is_within) if self._is_within else None

    def note(self, place: float, *, is_within: bool) -> None:
        """Adds an answer. `place` is the share of its predicted distribution that is shorter, and
        `is_within` says whether it was at most as long as the predicted, corrected quantile.
        """
        self._recent.append(place)
        self._is_within.append(is_within)
        self._aim += _RATE * (self._level - (1.0 if is_within else 0.0))
        self._aim = min(_HIGHEST, max(_LOWEST, self._aim))
        self._num_noted += 1
        if len(self._recent) >= _LEAST and self._num_noted % _EVERY == 0:
            found = float(np.quantile(np.array(self._recent), self._aim))
            self._taken = min(_HIGHEST, max(_LOWEST, found))
