"""Measures the arriving work by urgency, so that a forecast includes the requests that will go
first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NUM_RECENT = 512
_NUM_NEEDED = 16
_EVERY = 16  # arrivals between two snapshots


@dataclass(frozen=True, slots=True)
class ArrivalRates:
    """The recent arrivals by their keys when they arrived, the most urgent first.

    keys        -3.0   0.2   0.9   5.0       2 s
    num_tokens    64   128    64   256       a request whose key is 0.5 is passed by 96 tokens and
    requests       1     1     1     1       1 request in a second
    """

    keys: Floats = field(default_factory=lambda: np.zeros(0))
    sum_tokens: Floats = field(default_factory=lambda: np.zeros(1))  # of the first n
    span_s: float = 1.0

    def per_s(self, keys: Floats) -> tuple[Floats, Floats]:
        """Returns the requests and the prompt tokens in a second that are more urgent than each
        key."""
        places = np.searchsorted(self.keys, keys, side="left")
        return places / self.span_s, self.sum_tokens[places] / self.span_s


class RecentArrivals:
    """Records arrivals on the engine's thread; `rates` may be read by any thread."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_NUM_RECENT)
        self._num_noted = 0
        self.rates = ArrivalRates()

    def note(self, at_s: float, key: float, num_tokens: int) -> None:
        """Adds a request that arrived."""
        self._recent.append((at_s, key, float(num_tokens)))
        self._num_noted += 1
        if len(self._recent) < _NUM_NEEDED or self._num_noted % _EVERY:
            return
        table = np.array(self._recent)
        table = table[np.argsort(table[:, 1], kind="stable")]
        span_s = max(1e-3, float(table[:, 0].max() - table[:, 0].min()))
        self.rates = ArrivalRates(
            keys=table[:, 1],
            sum_tokens=np.concatenate([[0.0], np.cumsum(table[:, 2])]),
            span_s=span_s,
        )
