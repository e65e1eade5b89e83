"""Compares what tenants got while both had requests waiting.

A tenant is *backlogged* while one of its requests is due and has no first token. The gap of two
tenants over a time in which both are backlogged is the difference of the service they got in it,
in weighted tokens: 1 for a prompt token that was computed, 2 for a token of an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from moe_serve.bench.figures.request_record import RequestRecord

READ, WRITTEN = 1.0, 2.0
Floats = NDArray[np.float64]
Span = tuple[float, float]


class TenantService:
    """The service of one tenant over time, and when it was backlogged."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        at: list[float] = []
        amounts: list[float] = []
        for record in records:
            if record.first_s is None:
                continue
            at.append(record.first_s)
            amounts.append(
                READ * ((record.prompt_tokens or 0) - (record.cached_tokens or 0)) + WRITTEN
            )
            later = record.first_s + np.cumsum(np.array(record.gaps_s, dtype=np.float64))
            at += later.tolist()
            amounts += [WRITTEN] * len(later)
        order = np.argsort(at)
        self._at: Floats = np.array(at, dtype=np.float64)[order]
        self._sums: Floats = np.concatenate(
            [np.zeros(1), np.cumsum(np.array(amounts, dtype=np.float64)[order])]
        )
        waits = [(r.scheduled_s, r.first_s) for r in records if r.first_s is not None]
        self.backlogged = _union(waits)

    def between(self, start: float, end: float) -> float:
        first, last = np.searchsorted(self._at, [start, end])
        return float(self._sums[last] - self._sums[first])


def _union(spans: Sequence[Span]) -> list[Span]:
    """Joins spans that overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _both(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    found = [(max(s, t), min(e, u)) for s, e in a for t, u in b]
    return [(start, end) for start, end in found if start < end]


def largest_gap(records: Sequence[RequestRecord], until_s: float) -> float:
    """Returns the largest gap of two tenants of one tier, over spans that end by `until_s`: the
    arrivals' end, after which a queue only empties."""
    by_tenant = defaultdict[tuple[str, str], list[RequestRecord]](list)
    for record in records:
        by_tenant[record.tier, record.tenant].append(record)
    services = {key: TenantService(rows) for key, rows in by_tenant.items()}
    largest = 0.0
    for one, other in combinations(services, 2):
        if one[0] != other[0]:
            continue
        a, b = services[one], services[other]
        for start, end in _both(a.backlogged, b.backlogged):
            end = min(end, until_s)
            if start < end:
                largest = max(largest, abs(a.between(start, end) - b.between(start, end)))
    return largest
