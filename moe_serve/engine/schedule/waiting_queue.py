"""Holds the waiting sequences, and records those that the policy skipped.

The line is in order of arrival, with preempted sequences in front. `Urgency` decides which of them
start first; equally urgent ones start in the line's order.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items

from moe_serve.clock import Clock
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.urgency import Urgency


class ArrivalLine(Items[Sequence]):
    """Sequences in an order that only changes at its ends and by removals, each in O(1). Other
    threads may read the length and the first one."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._by_id.values())

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and sequence.id in self._by_id

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        """Returns one sequence, or a list for a slice. Fast for the first one only."""
        return list(self._by_id.values())[index]

    @property
    def first(self) -> Sequence | None:
        """The first sequence; None if the line is empty. Safe from any thread."""
        while True:
            try:
                return next(iter(self._by_id.values()), None)
            except RuntimeError:  # another thread changed the line in between
                continue

    def append(self, sequence: Sequence) -> None:
        self._by_id[sequence.id] = sequence

    def appendleft(self, sequence: Sequence) -> None:
        self._by_id[sequence.id] = sequence
        self._by_id.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> None:
        del self._by_id[sequence.id]


class WaitingQueue:
    """The scheduler's waiting sequences. Only the length and `line.first` may be read from other
    threads."""

    def __init__(self, urgency: Urgency, clock: Clock) -> None:
        self._urgency, self._clock = urgency, clock
        self._line = ArrivalLine()
        self._num_of: Counter[int] = Counter()  # waiting sequences by their level

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    @property
    def line(self) -> ArrivalLine:
        """The sequences in order of arrival, after preempted ones."""
        return self._line

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence at the end."""
        self._line.append(sequence)
        self._num_of[self._urgency.level(sequence)] += 1
        self._urgency.joined(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a preempted sequence, ahead of all equally urgent ones."""
        sequence.waits_since = self._clock()
        self._line.appendleft(sequence)
        self._num_of[self._urgency.level(sequence)] += 1
        self._urgency.joined(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)
        level = self._urgency.level(sequence)
        self._num_of[level] -= 1
        if not self._num_of[level]:
            del self._num_of[level]
        self._urgency.left(sequence)

    def groups(self, until: float = math.inf) -> Iterator[Items[Sequence]]:
        """Yields groups of equally urgent sequences, see `Urgency.groups`. `until`: only those with
        smaller keys, for orders by deadlines."""
        if until < math.inf:
            return self._urgency.groups_before(until)
        return self._urgency.groups(self._line, self._num_of, self._clock())

    def check_integrity(self) -> None:
        """Asserts that the counts match the line."""
        counts = Counter(map(self._urgency.level, self._line))
        assert counts == self._num_of, f"{counts} wait, and {self._num_of} are counted"


class Skipped:
    """Sequences skipped by policy, as opposed to blocked by missing seats or pages.

    A sequence counts as skipped if, when last examined, a running sequence was computing its next
    page, or a later one started before it. This stays so while there is no seat, as none is
    examined then. A sequence that lacks pages, is removed or starts is not skipped.
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
        """Records the outcome for the examined ones of all `waiting` sequences, given in order."""
        not_theirs = {s.id for s in (*started, *lacking)}
        self._ids -= not_theirs
        self._ids |= {s.id for s in awaiting}
        to_come = {s.id for s in started}
        for sequence in itertools.takewhile(lambda _: to_come, waiting):
            to_come.discard(sequence.id)
            if sequence.id not in not_theirs:
                self._ids.add(sequence.id)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drops sequences that have ended."""
        self._ids.difference_update(s.id for s in sequences)

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Asserts that only waiting sequences are skipped."""
        lost = self._ids - {s.id for s in waiting}
        assert not lost, f"sequences {lost} are skipped but do not wait"
