"""Counts drafts and their accepted tokens, for `/metrics` and dashboards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_serve.engine.request.request import DraftResult

MAX_DRAFT = 16  # tokens of one sequence in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """The drafts of one source since the start."""

    num_drafts: int = 0
    num_drafted: int = 0  # tokens
    num_accepted: int = 0  # of them published

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(
            num_drafts=self.num_drafts + other.num_drafts,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """A snapshot. `accepted_by_position[p]` drafts had their token p accepted, counted from 0."""

    by_source: Mapping[str, SourceCounts] = field(default_factory=dict)
    accepted_by_position: tuple[int, ...] = (0,) * MAX_DRAFT
    drafter_s: float = 0.0  # time spent on drafting, on the engine's thread

    @property
    def total(self) -> SourceCounts:
        return sum(self.by_source.values(), SourceCounts())

    def __add__(self, other: DraftCounts) -> DraftCounts:
        sources = dict(self.by_source)
        for source, counts in other.by_source.items():
            sources[source] = sources.get(source, SourceCounts()) + counts
        pairs = zip(self.accepted_by_position, other.accepted_by_position, strict=True)
        return DraftCounts(
            by_source=sources,
            accepted_by_position=tuple(own + its for own, its in pairs),
            drafter_s=self.drafter_s + other.drafter_s,
        )


class DraftCounter:
    """Counts on the engine's thread. `snapshot` is safe from any thread."""

    def __init__(self) -> None:
        self._drafts: Counter[str] = Counter()
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._by_length = [0] * (MAX_DRAFT + 1)  # drafts by the number of accepted tokens
        self._seconds = 0.0

    def note(self, result: DraftResult) -> None:
        self._drafts[result.source] += 1
        self._drafted[result.source] += result.num_drafted
        self._accepted[result.source] += result.num_accepted
        self._by_length[result.num_accepted] += 1

    def note_seconds(self, seconds: float) -> None:
        self._seconds += seconds

    def snapshot(self) -> DraftCounts:
        return DraftCounts(
            by_source={
                source: SourceCounts(
                    num_drafts=num_drafts,
                    num_drafted=self._drafted[source],
                    num_accepted=self._accepted[source],
                )
                for source, num_drafts in tuple(self._drafts.items())
            },
            accepted_by_position=tuple(
                sum(self._by_length[length:]) for length in range(1, MAX_DRAFT + 1)
            ),
            drafter_s=self._seconds,
        )
