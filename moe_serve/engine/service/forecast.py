"""Predicts when a new request would get its first token, from a snapshot of the queue.

    seats     the requests ahead of it and the newcomer need seats; one becomes free every `seat_s`
    reading   the prompts ahead of it and its own are read at a measured rate
    first token = the later of the two, as seats become free while prompts are read

The engine publishes a snapshot after each step. It is frozen, so any thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.first_token import FirstTokenForecast

Floats = NDArray[np.float64]
_EMPTY = np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """What is ahead of a newcomer. Arrays are by waiting request, in no order.

    `deadlines` are virtual deadlines on the engine's clock, `seconds` the predicted seconds of
    reading each prompt.
    """

    version: int = 0
    at_s: float = 0.0  # on the engine's clock
    token_s: float = 0.0  # predicted seconds to read one prompt token; 0: not measured yet
    step_s: float = 0.0  # predicted seconds of a step without prompts
    num_free_seats: int = 1
    seat_s: float = 0.0  # seconds between two seats that become free
    reading_s: float = 0.0  # predicted seconds to read what running requests still have to read
    deadlines: Floats = field(default_factory=lambda: _EMPTY)
    seconds: Floats = field(default_factory=lambda: _EMPTY)
    p90_ratio: float = 1.0  # actual over predicted, calibrated

    @property
    def is_measured(self) -> bool:
        return self.token_s > 0.0

    def first_token(
        self, num_tokens: int, slack_s: float, *, more_s: float = 0.0, num_more: int = 0
    ) -> FirstTokenForecast:
        """Predict for a prompt of `num_tokens` whose virtual deadline is `slack_s` from now.

        `more_s` and `num_more` are the reading seconds and the number of requests that were
        accepted after the snapshot was taken.
        """
        own_s = num_tokens * self.token_s
        is_ahead = self.deadlines <= self.at_s + slack_s
        num_ahead = int(np.count_nonzero(is_ahead)) + num_more
        ahead_s = float(self.seconds[is_ahead].sum()) + more_s
        num_lacking = max(0, num_ahead + 1 - self.num_free_seats)
        start_s = max(num_lacking * self.seat_s, self.reading_s + ahead_s)
        predicted_s = start_s + own_s + self.step_s
        return FirstTokenForecast(predicted_s=predicted_s, p90_s=predicted_s * self.p90_ratio)
