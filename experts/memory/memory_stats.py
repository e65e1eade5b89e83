"""The counters of an expert memory: as they run, and as a record to report."""

from __future__ import annotations

import operator
from dataclasses import asdict, astuple, dataclass, replace


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Counts since the start, filled by the memory. A stage run needs an expert once, however many
    rows choose it."""

    budget_bytes: int = 0
    resident_bytes: int = 0
    num_visits: int = 0  # stage runs
    num_needed: int = 0  # experts that stage runs needed
    num_hits: int = 0  # needed experts that were resident when the rows came
    num_late: int = 0  # needed experts that were being read when the rows came
    num_rows: int = 0  # (row, expert) pairs of stage runs
    num_row_hits: int = 0
    num_reads: int = 0
    bytes_read: int = 0  # of packed weights
    num_prefetched: int = 0  # reads made ahead of need
    num_prefetch_hits: int = 0  # prefetched experts that were needed before they were evicted
    num_foretold: int = 0  # experts that the next-layer predictor announced as needed
    num_foreseen: int = 0  # announced experts that were needed
    num_passes: int = 0  # larger than num_visits if needed experts did not all fit
    wait_seconds: float = 0.0  # time that stage runs waited for experts

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that were resident; 1 if none was needed."""
        return self.num_hits / self.num_needed if self.num_needed else 1.0

    @property
    def row_hit_rate(self) -> float:
        return self.num_row_hits / self.num_rows if self.num_rows else 1.0

    def __add__(self, other: MemoryStats) -> MemoryStats:
        """Adds the counts of two processes."""
        return MemoryStats(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, earlier: MemoryStats) -> MemoryStats:
        """Returns the counts since an earlier snapshot; the two byte sizes stay as they are now."""
        return replace(
            MemoryStats(*map(operator.sub, astuple(self), astuple(earlier))),
            budget_bytes=self.budget_bytes,
            resident_bytes=self.resident_bytes,
        )


@dataclass(slots=True)
class MemoryCounts:
    """Mutable counters; MemoryStats explains each."""

    num_visits: int = 0
    num_needed: int = 0
    num_hits: int = 0
    num_late: int = 0
    num_rows: int = 0
    num_row_hits: int = 0
    num_reads: int = 0
    bytes_read: int = 0
    num_prefetched: int = 0
    num_prefetch_hits: int = 0
    num_foretold: int = 0
    num_foreseen: int = 0
    num_passes: int = 0
    wait_seconds: float = 0.0

    def stats(self, *, budget_bytes: int, resident_bytes: int) -> MemoryStats:
        return MemoryStats(budget_bytes=budget_bytes, resident_bytes=resident_bytes, **asdict(self))
