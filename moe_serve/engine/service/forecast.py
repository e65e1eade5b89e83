"""Predicts when a new request would get its first token, from a snapshot of an engine's queue.

    seats     the newcomer and the requests ahead of it need seats; these become free as answers end
    reading   the prompts ahead of it and its own are read

The next steps are predicted one by one (`near_steps.py`), and a longer wait from rates: one seat
becomes free every `seat_s`, and a prompt token takes `token_s`. Requests that arrive later and go
first are expected at the rate of the recent arrivals: while the newcomer waits, it becomes more
urgent, and fewer of them pass it. The engine publishes a snapshot when a step begins. It is frozen,
so any thread may read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.service.arrivals import ArrivalRates
from moe_serve.engine.service.near_steps import MOST_STEPS, NearSteps, Remaining

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_EMPTY, _NOW = np.zeros(0), np.zeros(1)
# Moments of its waiting at which the newcomer is looked at: multiples of the wait without arrivals.
_GRID = np.concatenate([[0.0], np.geomspace(0.25, 256.0, 41)])
_LEAST_WAIT_S = 1e-3
_MIDDLE = 0.3  # the median of the n-th end: it comes when about n - 0.3 ends are expected


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """Describes the work ahead of a newcomer. Arrays are by waiting request, in no order.

    `keys` are those of `Order`, `num_left` the prompt tokens that each has to read.
    """

    turn: int = 0  # number of steps of all cells that had ended when it was taken
    cell: int = 0  # of the engine
    token_s: float = 0.0  # seconds to read one prompt token
    step_s: float = 0.0  # seconds of a step that reads nothing
    more_s: float = 0.0  # seconds that one more prompt token adds to a step
    usual_step_s: float = 0.0
    budget: float = math.inf  # prompt tokens of a step
    bucket_s: float = 0.0  # keys that differ by less are equally urgent
    is_calm: bool = False  # requests are served in order of arrival, which meets all targets now
    num_free_seats: int = 1
    remaining: Remaining | None = None  # answers that are being generated
    seat_s: float = 0.0  # seconds between two seats that become free
    keys: Floats = field(default_factory=lambda: _EMPTY)
    floors: Floats = field(default_factory=lambda: np.full(1, -np.inf))  # keys fall to these
    num_left: Floats = field(default_factory=lambda: _EMPTY)
    reading_keys: Floats = field(default_factory=lambda: _EMPTY)  # of prompts that are being read
    reading_left: Floats = field(default_factory=lambda: _EMPTY)
    uncached: float = 1.0  # share of the recent prompts' tokens that were not in the cache
    arrivals: ArrivalRates = ArrivalRates()
    share: float = 1.0  # of the arrivals that come to this engine
    # Tier and tenant that have had more than their share -> the key behind the others of the tier.
    behind: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def after(self, num_steps: int) -> QueueSnapshot:
        """Returns what a newcomer finds some steps later, if nothing came or started: running
        answers are longer, prompts are read on, and those that wait are more urgent."""
        if not num_steps:
            return self
        waited_s, read = num_steps * self.usual_step_s, num_steps * self.budget
        order = np.argsort(self.reading_keys, kind="stable")
        whole, left = self.reading_left[order], np.empty_like(self.reading_left)
        left[order] = np.minimum(whole, np.maximum(0.0, np.cumsum(whole) - read))
        return replace(
            self,
            remaining=None if self.remaining is None else self.remaining.after(num_steps),
            keys=np.maximum(self.keys - waited_s, self.floors),
            reading_keys=self.reading_keys - waited_s,
            reading_left=left,
        )

    def first_token_s(
        self,
        num_tokens: float,
        keys_at: Callable[[Floats], Floats],
        *,
        num_more: float = 0.0,
        num_more_tokens: float = 0.0,
    ) -> float:
        """Predicts the seconds from the end of the step under way to the first token of a prompt of
        `num_tokens`. `keys_at` returns its keys after seconds of waiting.

        `num_more` and `num_more_tokens` are the more urgent requests accepted since the snapshot.
        """
        near_s = self._near_s(num_tokens, float(keys_at(_NOW)[0]), num_more, num_more_tokens)
        if near_s is not None:
            return near_s
        start_s = self._start_s(num_more, num_more_tokens, keys_at)
        return start_s + self.read_s(num_tokens)

    def in_order_s(
        self, num_tokens: float, *, num_more: float = 0.0, num_more_tokens: float = 0.0
    ) -> float:
        """Predicts the same if requests are served in order of arrival."""
        ahead = float(self.num_left.sum()) + float(self.reading_left.sum()) + num_more_tokens
        lacking = len(self.num_left) + num_more + 1 - self.num_free_seats
        near_s = self._stepwise_s(num_tokens, ahead, 0.0, lacking, (0.0, 0.0))
        if near_s is not None:
            return near_s
        start_s = max(max(0.0, lacking) * self.seat_s, ahead * self.token_s)
        return start_s + self.read_s(num_tokens)

    def read_s(self, num_tokens: float) -> float:
        """Predicts the seconds in which a prompt is read once it is its turn."""
        return max(num_tokens * self.token_s, self.step_s + num_tokens * self.more_s)

    def _near_s(
        self, num_tokens: float, key: float, num_more: float, num_more_tokens: float
    ) -> float | None:
        """Predicts from the next steps; None if the first token comes after them."""
        waits_first, reads_first = self._go_first(num_tokens, key)
        ahead = float(self.num_left[waits_first].sum()) + num_more_tokens
        ahead += float(self.reading_left[reads_first].sum())
        behind = float(self.reading_left[~reads_first].sum())
        num_first = float(np.count_nonzero(waits_first)) + num_more
        lacking = num_first + 1 - self.num_free_seats
        if lacking < 0 and not waits_first.all():  # others have seats, too, and fill the steps
            seated = min(1.0, -lacking / np.count_nonzero(~waits_first))
            behind += seated * float(self.num_left[~waits_first].sum())
        requests, tokens = self.arrivals.per_s(np.array([key]))
        per_s = float(requests[0]) * self.share, float(tokens[0]) * self.share
        return self._stepwise_s(num_tokens, ahead, behind, lacking, per_s)

    def _stepwise_s(
        self, own: float, ahead: float, behind: float, lacking: float, per_s: tuple[float, float]
    ) -> float | None:
        """Predicts the next steps for a prompt of `own` tokens. `per_s`: requests and tokens that
        come later and are served first, per second."""
        steps = NearSteps(step_s=self.step_s, more_s=self.more_s, budget=self.budget)
        if ahead + own > steps.most_tokens:
            return None
        first = 0.0 if lacking <= 0 else self._seat_after(lacking, per_s[0])
        if first > MOST_STEPS:
            return None
        return steps.first_token_s(ahead, own, behind, first, per_s[1])

    def _go_first(self, num_tokens: float, key: float) -> tuple[Flags, Flags]:
        """Returns which of the waiting prompts, and which of those that are being read, go before a
        newcomer: shorter ones of its bucket do, and what is being read yields only by a bucket."""
        bucket_s = self.bucket_s
        if not bucket_s:
            return self.keys <= key, self.reading_keys <= key
        base = min(float(self.keys.min(initial=key)), key)
        begin = base + math.floor((key - base) / bucket_s) * bucket_s
        is_shorter = (self.keys < begin + bucket_s) & (self.num_left <= num_tokens)
        first = (self.keys < begin) | is_shorter
        return first, self.reading_keys - bucket_s <= key

    def _seat_after(self, lacking: float, arriving_per_s: float) -> float:
        """Returns the steps until the last of some lacking seats is free, while requests arrive
        that take one first; infinite if the running answers do not tell."""
        if self.remaining is None or not len(self.remaining.num_tokens):
            return lacking * self.seat_s / max(self.step_s, _LEAST_WAIT_S)
        arriving = arriving_per_s * self.usual_step_s
        return self.remaining.steps_until(lacking - _MIDDLE, arriving)

    def _start_s(
        self, num_more: float, num_more_tokens: float, keys_at: Callable[[Floats], Floats]
    ) -> float:
        """Returns the time at which everything ahead of the newcomer is served, while arrivals
        continue."""

        def work(waited_s: float, key: float) -> tuple[float, float]:
            requests, tokens = self._ahead(waited_s, key)
            return requests + num_more + 1 - self.num_free_seats, tokens + num_more_tokens

        def needed_s(lacking: float, tokens: float) -> float:
            return max(max(0.0, lacking) * self.seat_s, tokens * self.token_s)

        alone_s = needed_s(*work(0.0, float(keys_at(_NOW)[0])))
        if alone_s < _LEAST_WAIT_S:
            return alone_s
        times = _GRID * alone_s
        keys = keys_at(times)
        requests, tokens = self.arrivals.per_s(keys)
        requests = _integral(requests * self.share, times)
        tokens = _integral(tokens * self.share, times)

        def excess_s(place: int) -> float:
            lacking, ahead = work(times[place], keys[place])
            return needed_s(lacking + requests[place], ahead + tokens[place]) - float(times[place])

        return _crossing(times, excess_s)

    def _ahead(self, waited_s: float, key: float) -> tuple[float, float]:
        """Returns the requests that wait, and the tokens to read, before one that then has
        `key`."""
        is_ahead = np.maximum(self.keys - waited_s, self.floors) <= key
        being_read = float(self.reading_left[self.reading_keys - waited_s <= key].sum())
        return float(np.count_nonzero(is_ahead)), float(self.num_left[is_ahead].sum()) + being_read


def _crossing(times: Floats, excess_s: Callable[[int], float]) -> float:
    """Returns when the excess, which is above zero at the first time, becomes zero; the last time
    if it does not."""
    low, high = 0, len(times) - 1
    after, before = excess_s(high), excess_s(low)
    if after > 0.0:
        return float(times[-1])
    while high - low > 1:
        middle = (low + high) // 2
        found = excess_s(middle)
        if found > 0.0:
            low, before = middle, found
        else:
            high, after = middle, found
    share = before / (before - after) if before > after else 0.0
    return float(times[low] + share * (times[high] - times[low]))


def _integral(rates: Floats, times: Floats) -> Floats:
    """Returns the integral of rates from 0 to each time."""
    steps = np.diff(times) * (rates[1:] + rates[:-1]) / 2
    return np.concatenate([[0.0], np.cumsum(steps)])
