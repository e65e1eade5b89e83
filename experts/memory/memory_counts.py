"""The counters of an expert memory, as they run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from experts.memory.memory_stats import MemoryStats


@dataclass(slots=True)
class MemoryCounts:
    """See MemoryStats for what each counts."""

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
