"""Counts for each tier how many requests kept their targets, and how late the others were.

Times are those of the engine's clock, as clients see them: pauses of the process count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_stats import TierCounts
from moe_serve.engine.request.standing import Standing


class Ledger:
    """The counts of all engines of a server, written by the engine's thread."""

    def __init__(self, tiers: Iterable[str]) -> None:
        self._tiers = tuple(tiers)
        self._counts: list[Counter[str]] = [Counter() for _ in self._tiers]
        self._tardiness_s = [0.0 for _ in self._tiers]

    def add(self, tier: int, what: str, count: int = 1) -> None:
        """Adds to a field of `TierCounts`."""
        self._counts[tier][what] += count

    def first_token(self, sequence: Sequence, standing: Standing, now: float) -> None:
        """Notes that a request got its first token."""
        standing.first_token_at = now
        service = sequence.request.service
        target_s, counts = service.targets.ttft_s, self._counts[standing.tier]
        if target_s is None:
            return
        late_s = now - sequence.request.arrival_time - target_s
        counts["num_with_ttft"] += 1
        counts["num_ttft_met"] += late_s <= 0.0
        self._tardiness_s[standing.tier] += service.weight * max(0.0, late_s)
        if standing.is_promised:
            counts["num_promises_kept" if late_s <= 0.0 else "num_promises_broken"] += 1

    def finished(self, sequence: Sequence, standing: Standing, now: float) -> bool:
        """Notes that an answer is complete. Returns whether it kept all its targets."""
        request, first_at = sequence.request, standing.first_token_at
        targets, counts = request.service.targets, self._counts[standing.tier]
        assert first_at is not None, f"{request.request_id} ended without a first token"
        is_good = targets.ttft_s is None or first_at - request.arrival_time <= targets.ttft_s
        num_more = sequence.num_output_tokens - 1
        if targets.tpot_s is not None:
            is_met = now - first_at <= targets.tpot_s * num_more
            counts["num_with_tpot"] += 1
            counts["num_tpot_met"] += is_met
            is_good &= is_met
        if targets.e2e_s is not None:
            late_s = now - request.arrival_time - targets.e2e_s
            counts["num_with_e2e"] += 1
            counts["num_e2e_met"] += late_s <= 0.0
            self._tardiness_s[standing.tier] += request.service.weight * max(0.0, late_s)
            is_good &= late_s <= 0.0
        counts["num_finished"] += 1
        if is_good:
            counts["num_good"] += 1
            counts["num_goodput_tokens"] += sequence.num_output_tokens
        return is_good

    def expired(self, sequence: Sequence, standing: Standing) -> None:
        """Notes that a strict request was ended, as its deadline had passed."""
        counts = self._counts[standing.tier]
        counts["num_finished"] += 1
        counts["num_expired"] += 1
        if standing.first_token_at is None and sequence.request.service.targets.ttft_s is not None:
            counts["num_with_ttft"] += 1
            counts["num_promises_broken"] += standing.is_promised

    def snapshot(self, num_refused: Iterable[int]) -> tuple[TierCounts, ...]:
        """Returns the counts. Safe from any thread."""
        rows = zip(self._tiers, self._counts, self._tardiness_s, num_refused, strict=True)
        return tuple(
            TierCounts(tier=tier, tardiness_s=late_s, num_refused=refused, **dict(counts))
            for tier, counts, late_s, refused in rows
        )
