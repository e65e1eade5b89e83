"""A run over time: requests in flight and tokens per second, in even bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_serve.bench.figures.request_record import RequestRecord

_MAX_BINS = 300
_MIN_BIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """The run in B bins of `bin_s` seconds each, from its beginning."""

    bin_s: float
    in_flight_B: tuple[float, ...]  # mean over the bin
    output_tok_s_B: tuple[float, ...]
    sent_B: tuple[int, ...]
    failed_B: tuple[int, ...]

    @classmethod
    def of(cls, records: Sequence[RequestRecord], duration_s: float) -> RunTimeline:
        bin_s = max(_MIN_BIN_S, duration_s / _MAX_BINS)
        num_bins = max(1, int(np.ceil(duration_s / bin_s)))
        edges = np.arange(num_bins + 1) * bin_s
        edges[-1] = max(edges[-1], duration_s)  # rounded, it may lie before the last end
        at, tokens = _tokens(records)
        ends = np.array([r.end_s for r in records if not r.is_ok])
        starts = np.array([r.started_s for r in records])
        output_B = np.histogram(at, edges, weights=tokens)[0] / bin_s
        return cls(
            bin_s=bin_s,
            in_flight_B=tuple(_in_flight(records, edges, bin_s)),
            output_tok_s_B=tuple(round(float(rate), 3) for rate in output_B),
            sent_B=tuple(int(n) for n in np.histogram(starts, edges)[0]),
            failed_B=tuple(int(n) for n in np.histogram(ends, edges)[0]),
        )


def _tokens(records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (when, how many): an answer's tokens shared evenly among its events, or placed at its
    end."""
    at: list[np.ndarray] = [np.zeros(0)]
    counts: list[np.ndarray] = [np.zeros(0)]
    for record in records:
        if record.first_s is None:
            at.append(np.array([record.end_s]))
            counts.append(np.array([float(record.output_tokens or 0)]))
            continue
        gaps = np.array(record.gaps_s, dtype=np.float64)
        at.append(record.first_s + np.concatenate([np.zeros(1), np.cumsum(gaps)]))
        share = record.counted_tokens / record.num_events
        counts.append(np.full(record.num_events, share))
    return np.concatenate(at), np.concatenate(counts)


def _in_flight(records: Sequence[RequestRecord], edges: np.ndarray, bin_s: float) -> list[float]:
    """Returns the request time in each bin divided by the length of the bin.

    The time before t is the sum over requests of clip(t - start, 0, end - start): with starts and
    ends sorted apart, that is two cumulative sums.
    """

    def spent_after(moments: np.ndarray) -> np.ndarray:
        ordered = np.sort(moments)
        sums = np.concatenate([np.zeros(1), np.cumsum(ordered)])
        num = np.searchsorted(ordered, edges)
        return np.asarray(num * edges - sums[num])

    starts = np.array([r.started_s for r in records])
    ends = np.array([r.end_s for r in records])
    spent = spent_after(starts) - spent_after(ends)
    return [round(float(value), 4) for value in np.diff(spent) / bin_s]
