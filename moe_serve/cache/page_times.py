"""Measures how long pages stay in the prefix cache, on a sample of pages.

    handed out      found      found            evicted
       |             |  reuse_gap |     idle       |
       |                 lifetime                  |

A page is sampled when it is handed out, by a separate random generator, so answers do not depend on
it. A page that becomes free without being evicted is dropped from the sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_serve.cache.histogram import Histogram, HistogramCounter
from moe_serve.clock import REAL_CLOCK, Clock

BOUNDS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0),
)
_EMPTY = Histogram.empty(BOUNDS_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTimes:
    """Seconds measured on the sampled pages. Filled by SampledPages."""

    lifetime: Histogram = _EMPTY  # from handing a page out to its eviction
    idle: Histogram = _EMPTY  # since a sequence last found it, or since it was handed out
    reuse_gap: Histogram = _EMPTY  # between two sequences that found it

    def __add__(self, other: PageTimes) -> PageTimes:
        return PageTimes(
            lifetime=self.lifetime + other.lifetime,
            idle=self.idle + other.idle,
            reuse_gap=self.reuse_gap + other.reuse_gap,
        )


@dataclass(slots=True)
class _Page:
    handed_out: float
    found: float | None = None  # time of the last find


class SampledPages:
    """The sampled pages that are not free.

    Counts on the engine's thread; any thread may call `snapshot`.
    """

    def __init__(
        self,
        rate: float,
        clock: Clock = REAL_CLOCK,
        draw: Callable[[], float] | None = None,
    ) -> None:
        """`rate`: the share of pages to sample, 0 to 1.

        `draw`: returns a random number in [0, 1).
        """
        self._rate, self._clock = rate, clock
        self._draw = random.Random().random if draw is None else draw
        self._pages: dict[int, _Page] = {}
        self._lifetime = HistogramCounter(BOUNDS_S)
        self._idle = HistogramCounter(BOUNDS_S)
        self._reuse_gap = HistogramCounter(BOUNDS_S)

    def __len__(self) -> int:
        return len(self._pages)

    def handed_out(self, pages: Iterable[int]) -> None:
        if self._rate == 0.0:
            return
        drawn = [page for page in pages if self._draw() < self._rate]
        if drawn:
            now = self._clock()
            self._pages |= {page: _Page(now) for page in drawn}

    def found(self, pages: Iterable[int]) -> None:
        """Notes that a sequence uses pages that others computed."""
        if not self._pages:
            return
        for page in pages:
            state = self._pages.get(page)
            if state is not None:
                now = self._clock()
                if state.found is not None:
                    self._reuse_gap.count(now - state.found)
                state.found = now

    def evicted(self, page: int) -> None:
        state = self._pages.pop(page, None)
        if state is not None:
            now = self._clock()
            self._lifetime.count(now - state.handed_out)
            self._idle.count(now - (state.handed_out if state.found is None else state.found))

    def freed(self, pages: Iterable[int]) -> None:
        """Drops pages that were freed for another reason than a lack of pages."""
        if self._pages:
            for page in pages:
                self._pages.pop(page, None)

    def snapshot(self) -> PageTimes:
        return PageTimes(
            lifetime=self._lifetime.snapshot(),
            idle=self._idle.snapshot(),
            reuse_gap=self._reuse_gap.snapshot(),
        )

    def check_integrity(self, num_references: Callable[[int], int]) -> None:
        """Checks that no sampled page is free."""
        lost = [page for page in self._pages if num_references(page) == 0]
        assert not lost, f"free pages {lost[:5]} are still sampled"
