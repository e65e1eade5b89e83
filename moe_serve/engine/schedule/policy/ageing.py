"""Limits how often and how long a waiting sequence may be passed over."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items

from moe_serve.clock import Clock


class Ageing:
    """Counts, for each waiting sequence, the later ones that started first. A sequence that reaches
    a bound is next; among several, the first to arrive."""

    def __init__(self, max_passed_over: int, max_age_s: float, clock: Clock) -> None:
        self._max_passed, self._max_age_s, self._clock = max_passed_over, max_age_s, clock
        self._passed: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self.num_passed_over = 0

    def see(self, newest_first: Iterable[int], first: Iterable[int] = ()) -> None:
        """Records the waiting sequences; a sequence's age starts at its first record.
        `newest_first` is read only up to the first known one. `first` are those at the front, where
        preempted ones return."""
        now, since = self._clock(), self._since
        for key in newest_first:
            if key in since:
                break
            since[key] = now
        for key in first:
            since.setdefault(key, now)

    def urgent(self, sequence_ids: Iterable[int]) -> list[int]:
        """Returns the indices of the sequences that can wait no longer."""
        start, most, passed = self._clock() - self._max_age_s, self._max_passed, self._passed
        since, never = self._since, math.inf
        return [
            index
            for index, key in enumerate(sequence_ids)
            if passed.get(key, 0) >= most or since.get(key, never) <= start
        ]

    def pass_over(self, sequence_ids: Items[int]) -> list[int]:
        """Records that a later sequence starts before these. Returns those that now can wait no
        longer.
        """
        passed, late = self._passed, []
        for key in sequence_ids:
            passed[key] = count = passed.get(key, 0) + 1
            if count == self._max_passed:
                late.append(key)
        self.num_passed_over += len(sequence_ids)
        return late

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops sequences that no longer wait."""
        for key in sequence_ids:
            self._passed.pop(key, None)
            self._since.pop(key, None)
