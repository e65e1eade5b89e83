"""Who waits, and in which order they may start.

A line in order of arrival; who was put back stands in front. Of it, the most urgent come first (the
lowest `priority`), and among the equally urgent the line's order stands. Each `step_s` of waiting
is worth one of priority, so an endless flow of urgent requests starves nobody:

    line          a 0   b 2   c 0   d 2      (b has waited for two steps)
    groups        [a b c]  [d]
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Items

from moe_serve.engine.request.sequence import Sequence


class WaitingQueue:
    """The scheduler's, on its thread but for the length and `line`."""

    def __init__(self, step_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_s, self._clock = step_s, clock
        self._line: deque[Sequence] = deque()
        self._num_of: Counter[int] = Counter()  # by priority, of those who wait

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    @property
    def line(self) -> Items[Sequence]:
        """In order of arrival, behind those who were put back. On any thread."""
        return self._line

    def add(self, sequence: Sequence) -> None:
        """It came last."""
        self._line.append(sequence)
        self._num_of[sequence.request.priority] += 1

    def put_back(self, sequence: Sequence) -> None:
        """It ran, and waits from now on, before all who are as urgent."""
        sequence.waits_since = self._clock()
        self._line.appendleft(sequence)
        self._num_of[sequence.request.priority] += 1

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)
        priority = sequence.request.priority
        self._num_of[priority] -= 1
        if not self._num_of[priority]:
            del self._num_of[priority]

    def groups(self) -> Iterator[Items[Sequence]]:
        """Those who are equally urgent, the most urgent first; each group in the line's order. With
        one priority, or if waiting is worth everything, this is the line itself."""
        if len(self._num_of) < 2 or self._step_s == 0:
            yield self._line
            return
        now = self._clock()
        groups: dict[int, list[Sequence]] = {}
        for sequence in self._line:
            num_steps = int((now - sequence.waits_since) / self._step_s)
            groups.setdefault(sequence.request.priority - num_steps, []).append(sequence)
        for urgency in sorted(groups):
            yield groups[urgency]

    def check_integrity(self) -> None:
        """The counts are those of the line."""
        counts = Counter(s.request.priority for s in self._line)
        assert counts == self._num_of, f"{counts} wait, and {self._num_of} are counted"


class Skipped:
    """Of those who wait, those who were left aside when they were last looked at: as a sequence
    that runs is computing their next page, or as a later one started and they did not.

    It stays so while there is no seat, as nobody is looked at then. Who is found to lack pages, is
    taken out again or starts is not left aside.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def note(
        self,
        waiting: Iterable[Sequence],
        *,
        started: Collection[Sequence],
        lacking: Collection[Sequence],
        awaiting: Collection[Sequence],
    ) -> None:
        """What came of those who were looked at, of all who waited in this order."""
        not_theirs = {s.id for s in (*started, *lacking)}
        self._ids -= not_theirs
        self._ids |= {s.id for s in awaiting}
        to_come = {s.id for s in started}
        for sequence in itertools.takewhile(lambda _: to_come, waiting):
            to_come.discard(sequence.id)
            if sequence.id not in not_theirs:
                self._ids.add(sequence.id)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """They have ended."""
        self._ids.difference_update(s.id for s in sequences)

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Only who waits is left aside."""
        lost = self._ids - {s.id for s in waiting}
        assert not lost, f"sequences {lost} do not wait and are left aside"
