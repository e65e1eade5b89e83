"""Counts the moves of requests between cells by their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_serve.cache.histogram import Histogram, HistogramCounter

MoveKind = Literal[
    "hand_over",  # after the prompt
    "drain",  # of its cell or rank
    "pages",  # its rank was about to run out of pages
    "balance",  # steps of its cell took longer than those of another
]
MoveResult = Literal[
    "done",  # it runs at the target, nothing was computed again
    "failed",  # a parcel failed
    "timed_out",  # pages were on their way for too long
    "lost",  # the source or the target was lost
    "stayed",  # the target had no room for all its pages, or it lost its seat at the source
    "ended",  # the request ended at the source
    "aborted",  # the client went away
]

STEP_BOUNDS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 100.0)
SECOND_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovesStats:
    """A snapshot. A lease is a move from its beginning to its end."""

    begun: Mapping[MoveKind, int] = field(default_factory=dict)
    ended: Mapping[tuple[MoveKind, MoveResult], int] = field(default_factory=dict)
    num_leases: int = 0  # open now
    num_between: int = 0  # sequences that belong to no engine now
    num_pages: int = 0  # that arrived
    num_bytes: int = 0
    num_parcels: int = 0  # that arrived
    num_failed_parcels: int = 0
    num_late_parcels: int = 0  # that ended after their lease
    num_recomputed_tokens: int = 0  # of sequences whose pages were lost on the way
    downtime_steps: Histogram = field(default_factory=lambda: Histogram.empty(STEP_BOUNDS))
    downtime_s: Histogram = field(default_factory=lambda: Histogram.empty(SECOND_BOUNDS))


class MovesCounter:
    """Counts on the engine's thread; `snapshot` is for any thread."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._begun: Counter[MoveKind] = Counter()
        self._ended: Counter[tuple[MoveKind, MoveResult]] = Counter()
        self._steps = HistogramCounter(STEP_BOUNDS)
        self._seconds = HistogramCounter(SECOND_BOUNDS)
        self._num_pages = self._num_parcels = 0
        self.num_failed = self.num_late = self.num_recomputed = 0

    def begun(self, kind: MoveKind) -> None:
        self._begun[kind] += 1

    def ended(self, kind: MoveKind, result: MoveResult) -> None:
        self._ended[kind, result] += 1

    def parcel(self, num_pages: int) -> None:
        """Counts a parcel that arrived."""
        self._num_parcels += 1
        self._num_pages += num_pages

    def arrived(self, num_steps: int, seconds: float) -> None:
        """Counts a sequence that was between two engines for that long and missed `num_steps` steps
        of the target.
        """
        self._steps.count(num_steps)
        self._seconds.count(seconds)

    def snapshot(self, num_leases: int, num_between: int) -> MovesStats:
        return MovesStats(
            begun=dict(self._begun),
            ended=dict(self._ended),
            num_leases=num_leases,
            num_between=num_between,
            num_pages=self._num_pages,
            num_bytes=self._num_pages * self._page_bytes,
            num_parcels=self._num_parcels,
            num_failed_parcels=self.num_failed,
            num_late_parcels=self.num_late,
            num_recomputed_tokens=self.num_recomputed,
            downtime_steps=self._steps.snapshot(),
            downtime_s=self._seconds.snapshot(),
        )
