"""Who waits by choice: not for want of a seat or of pages, but because somebody else went first."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from moe_serve.engine.request.sequence import Sequence


class LeftAside:
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
