"""Predicts when a new request would get its first token, from a snapshot of an engine's queue.

    seats     the newcomer and the requests ahead of it need seats; one becomes free every `seat_s`
    reading   the prompts ahead of it and its own are read at the present rate
    first token = the later of the two, as seats become free while prompts are read

Requests that arrive later and go first are foreseen at the rate of the recent arrivals: while the
newcomer waits, it becomes more urgent, and fewer of them pass it. The engine publishes a snapshot
after each step. It is frozen, so any thread may read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.service.arrivals import ArrivalRates

Floats = NDArray[np.float64]
_EMPTY = np.zeros(0)
# Moments of its waiting at which the newcomer is looked at: multiples of the wait without arrivals.
_GRID = np.concatenate([[0.0], np.geomspace(0.25, 256.0, 41)])
_LEAST_WAIT_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The work ahead of a newcomer. Arrays are by waiting request, in no order.

    `keys` are those of `Order`, `num_left` the prompt tokens that each has to read.
    """

    turn: int = 0  # of the engine, when it was taken
    token_s: float = 0.0  # seconds to read one prompt token
    step_s: float = 0.0  # seconds of a step that reads nothing
    num_free_seats: int = 1
    seat_s: float = 0.0  # seconds between two seats that become free
    keys: Floats = field(default_factory=lambda: _EMPTY)
    num_left: Floats = field(default_factory=lambda: _EMPTY)
    reading_keys: Floats = field(default_factory=lambda: _EMPTY)  # of prompts that are being read
    reading_left: Floats = field(default_factory=lambda: _EMPTY)
    arrivals: ArrivalRates = ArrivalRates()
    share: float = 1.0  # of the arrivals that come to this engine

    def first_token_s(
        self,
        num_tokens: int,
        keys_at: Callable[[Floats], Floats],
        *,
        num_more: int = 0,
        num_more_tokens: int = 0,
    ) -> float:
        """Predict the seconds to the first token of a prompt of `num_tokens`. `keys_at` returns its
        keys after seconds of waiting.

        `num_more` and `num_more_tokens` are the requests that were accepted since the snapshot.
        """
        key = keys_at(np.zeros(1))[0]
        is_ahead = self.keys <= key
        num_ahead = int(np.count_nonzero(is_ahead)) + num_more
        num_to_read = float(self.num_left[is_ahead].sum()) + num_more_tokens
        num_to_read += float(self.reading_left[self.reading_keys <= key].sum())
        num_lacking = num_ahead + 1 - self.num_free_seats
        start_s = self._start_s(num_lacking, num_to_read, keys_at)
        return start_s + max(num_tokens * self.token_s, self.step_s)

    def _start_s(
        self, num_lacking: int, num_to_read: float, keys_at: Callable[[Floats], Floats]
    ) -> float:
        """Return when all that goes before the newcomer is served, as arrivals continue."""
        alone_s = max(0, num_lacking) * self.seat_s, num_to_read * self.token_s
        if max(alone_s) < _LEAST_WAIT_S or not len(self.arrivals.keys):
            return max(alone_s)
        times = _GRID * max(alone_s)
        requests, tokens = self.arrivals.per_s(keys_at(times))
        lacking = num_lacking + _integral(requests * self.share, times)
        reading = num_to_read + _integral(tokens * self.share, times)
        needed = np.maximum(np.maximum(lacking, 0.0) * self.seat_s, reading * self.token_s)
        is_done = needed <= times
        return float(times[is_done.argmax()] if is_done.any() else times[-1])


def _integral(rates: Floats, times: Floats) -> Floats:
    """Return the integral of rates from 0 to each time."""
    steps = np.diff(times) * (rates[1:] + rates[:-1]) / 2
    return np.concatenate([[0.0], np.cumsum(steps)])
