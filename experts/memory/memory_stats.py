"""What an expert memory has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Counts since the start; the memory fills it. An expert is needed once by a stage run."""

    budget_bytes: int = 0
    resident_bytes: int = 0
    num_visits: int = 0  # stage runs
    num_needed: int = 0  # experts that stage runs needed
    num_hits: int = 0  # of these, resident when the rows came
    num_late: int = 0  # of the others, already being read
    num_rows: int = 0  # (row, expert) pairs of stage runs
    num_row_hits: int = 0
    num_reads: int = 0
    bytes_read: int = 0  # packed
    num_prefetched: int = 0  # of the reads
    num_prefetch_hits: int = 0  # prefetched ones that were needed before they were evicted
    num_foretold: int = 0  # experts of which a next-layer predictor said that rows will need them
    num_foreseen: int = 0  # of these, needed
    num_passes: int = 0  # more than visits where not all that was needed fits
    wait_seconds: float = 0.0  # of stage runs, for experts

    @property
    def hit_rate(self) -> float:
        """Of needed experts; 1 where none was needed."""
        return self.num_hits / self.num_needed if self.num_needed else 1.0

    @property
    def row_hit_rate(self) -> float:
        return self.num_row_hits / self.num_rows if self.num_rows else 1.0

    def plus(self, other: MemoryStats) -> MemoryStats:
        """Of two processes together."""
        names = [field.name for field in fields(self)]
        return MemoryStats(**{n: getattr(self, n) + getattr(other, n) for n in names})

    def minus(self, earlier: MemoryStats) -> MemoryStats:
        """What came since; what is no count stays as it is."""
        names = [f.name for f in fields(self) if f.name not in ("budget_bytes", "resident_bytes")]
        changed = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return MemoryStats(
            budget_bytes=self.budget_bytes, resident_bytes=self.resident_bytes, **changed
        )
