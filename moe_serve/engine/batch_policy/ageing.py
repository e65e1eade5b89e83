"""How long somebody who waits may be passed over: so many times, or so many seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Ageing:
    """Counts, for each that waits, how many later ones were let go first. Whoever reached a bound
    is next; if several have, the first to arrive."""

    def __init__(self, max_passed_over: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self._max_passed, self._max_age_s, self._clock = max_passed_over, max_age_s, clock
        self._passed: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self.num_passed_over = 0

    def see(self, sequence_ids: Iterable[int]) -> None:
        """They wait; their age starts the first time."""
        now = self._clock()
        for key in sequence_ids:
            self._since.setdefault(key, now)

    def first_urgent(self, sequence_ids: Iterable[int]) -> int | None:
        """The index of the first of these that can wait no longer."""
        start, most, passed = self._clock() - self._max_age_s, self._max_passed, self._passed
        for index, key in enumerate(sequence_ids):
            since = self._since.get(key)
            if passed.get(key, 0) >= most or (since is not None and since <= start):
                return index
        return None

    def pass_over(self, sequence_ids: Iterable[int]) -> None:
        """A later one goes before these."""
        for key in sequence_ids:
            self._passed[key] = self._passed.get(key, 0) + 1
            self.num_passed_over += 1

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """They wait no longer."""
        for key in sequence_ids:
            self._passed.pop(key, None)
            self._since.pop(key, None)
