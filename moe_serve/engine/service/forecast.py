"""Predicts when a new request would get its first token, from a snapshot of an engine's queue.

    seats     the newcomer and the requests ahead of it need seats; one becomes free every `seat_s`
    reading   the prompts ahead of it and its own are read at the present rate
    first token = the later of the two, as seats become free while prompts are read

Requests that arrive later and go first are not foreseen; `Calibration` accounts for them. The
engine publishes a snapshot after each step. It is frozen, so any thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_EMPTY = np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """What is ahead of a newcomer. Arrays are by waiting request, in no order.

    `keys` are those of `Order`, `num_left` the prompt tokens that each has to read.
    """

    turn: int = 0  # of the engine, when it was taken
    token_s: float = 0.0  # seconds to read one prompt token
    step_s: float = 0.0  # seconds of a step that reads nothing
    num_free_seats: int = 1
    seat_s: float = 0.0  # seconds between two seats that become free
    num_reading: int = 0  # tokens that running requests still have to read
    keys: Floats = field(default_factory=lambda: _EMPTY)
    num_left: Floats = field(default_factory=lambda: _EMPTY)

    def first_token_s(
        self, num_tokens: int, key: float, *, num_more: int = 0, num_more_tokens: int = 0
    ) -> float:
        """Predict the seconds to the first token of a prompt of `num_tokens` whose key is `key`.

        `num_more` and `num_more_tokens` are the requests that were accepted since the snapshot.
        """
        is_ahead = self.keys <= key
        num_ahead = int(np.count_nonzero(is_ahead)) + num_more
        num_to_read = self.num_reading + float(self.num_left[is_ahead].sum()) + num_more_tokens
        num_lacking = max(0, num_ahead + 1 - self.num_free_seats)
        start_s = max(num_lacking * self.seat_s, num_to_read * self.token_s)
        return start_s + max(num_tokens * self.token_s, self.step_s)
