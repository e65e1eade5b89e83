"""How long somebody who waits may be passed over: so many times, or so many seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items


class Ageing:
    """Counts, for each that waits, how many later ones were let go first. Whoever reached a bound
    is next; if several have, the first to arrive."""

    def __init__(self, max_passed_over: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self._max_passed, self._max_age_s, self._clock = max_passed_over, max_age_s, clock
        self._passed: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self.num_passed_over = 0

    def see(self, newest_first: Iterable[int], first: Iterable[int] = ()) -> None:
        """Who waits; an age starts the first time. Of the newest as far as there are new ones: they
        come at the end. `first`: those in front, where somebody may come back to."""
        now, since = self._clock(), self._since
        for key in newest_first:
            if key in since:
                break
            since[key] = now
        for key in first:
            since.setdefault(key, now)

    def urgent(self, sequence_ids: Iterable[int]) -> list[int]:
        """The indices of those of these that can wait no longer."""
        start, most, passed = self._clock() - self._max_age_s, self._max_passed, self._passed
        since, never = self._since, math.inf
        return [
            index
            for index, key in enumerate(sequence_ids)
            if passed.get(key, 0) >= most or since.get(key, never) <= start
        ]

    def pass_over(self, sequence_ids: Items[int]) -> list[int]:
        """A later one goes before these -> those of them that can wait no longer by now."""
        passed, late = self._passed, []
        for key in sequence_ids:
            passed[key] = count = passed.get(key, 0) + 1
            if count == self._max_passed:
                late.append(key)
        self.num_passed_over += len(sequence_ids)
        return late

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """They wait no longer."""
        for key in sequence_ids:
            self._passed.pop(key, None)
            self._since.pop(key, None)
