"""Gathers the latencies of a run's requests from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_serve.bench.figures.record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Latencies of the answered requests, in seconds. R = requests, G = gaps between tokens."""

    ttft_R: np.ndarray
    tpot_R: np.ndarray
    e2e_R: np.ndarray
    itl_G: np.ndarray

    @classmethod
    def of(cls, records: Sequence[RequestRecord], *, is_from_start: bool = False) -> Samples:
        """Gathers latencies from the time requests were due, or with `is_from_start` from the time
        they were sent."""
        ok = [record for record in records if record.is_ok]
        late = [record.lateness_s if is_from_start else 0.0 for record in ok]
        ttfts = [
            record.ttft_s - less
            for record, less in zip(ok, late, strict=True)
            if record.ttft_s is not None
        ]
        return cls(
            ttft_R=np.array(ttfts),
            tpot_R=np.array([r.tpot_s for r in ok if r.tpot_s is not None]),
            e2e_R=np.array([r.e2e_s - less for r, less in zip(ok, late, strict=True)]),
            itl_G=itl_of(ok),
        )


def itl_of(records: Sequence[RequestRecord]) -> np.ndarray:
    """Returns one value per token if the server reported tokens per event, else one per event.

    An event with k tokens after a gap g gives k values of g / k.
    """
    parts = [np.zeros(0)]
    for record in records:
        gaps = np.frombuffer(record.gaps_s, dtype=np.float64) if record.gaps_s else np.zeros(0)
        if record.gap_tokens:
            counts = np.array(record.gap_tokens, dtype=np.int64)
            gaps = np.repeat(gaps / np.maximum(counts, 1), counts)
        parts.append(gaps)
    return np.concatenate(parts)
