"""The measurements of one request, and of a run over time.

A timeline has the requests in flight and the tokens per second, in even bins.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

REFUSED = "deadline_unmeetable"  # the kind of a request whose target could not be met
EXPIRED = "deadline_exceeded"  # the kind of a strict request that was ended at its deadline
_MAX_BINS = 300
_MIN_BIN_S = 0.1


def _no_floats() -> array[float]:
    return array("d")


def _no_counts() -> array[int]:
    return array("L")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The times of one request, in seconds since the run began; the client fills it when the answer
    ended or failed.

    `scheduled_s` is when the request was due: in an open loop the workload's time, in a closed loop
    the moment at which the client was free, which is `started_s`. Every latency has two forms: from
    `scheduled_s`, as a user sees it, and from `started_s`, as the server does.
    """

    index: int
    scheduled_s: float
    started_s: float  # the client began: connecting, if it must, is part of the latency
    end_s: float  # the end of the answer, or when it failed
    first_s: float | None = None  # first and last event with tokens; None without streaming
    last_s: float | None = None
    gaps_s: array[float] = field(default_factory=_no_floats)  # between events with tokens
    gap_tokens: array[int] = field(default_factory=_no_counts)  # of each gap; empty: not known
    first_tokens: int = 1  # tokens of the first event, as far as the server says
    wanted_tokens: int = 0
    prompt_tokens: int | None = None  # these three from the server's usage
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None  # the kind: a short name, the same for the same cause
    detail: str = ""  # message of the server or the system
    tier: str = ""  # these three as the workload has them
    tenant: str = ""
    session: str = ""
    predicted_ttft_s: float | None = None  # what the server promised when it accepted the request

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def lateness_s(self) -> float:
        """The delay between due and sent, which the client caused."""
        return self.started_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def num_events(self) -> int:
        """The number of events that carried tokens."""
        return 0 if self.first_s is None else 1 + len(self.gaps_s)

    @property
    def counted_tokens(self) -> int:
        """The number of tokens from usage, or without it the number of events, each of one token or
        more."""
        return self.num_events if self.output_tokens is None else self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """The time per token after the first event; None if there are no such tokens."""
        if self.first_s is None or self.last_s is None or not self.gaps_s:
            return None
        num_later = self.counted_tokens - self.first_tokens
        return (self.last_s - self.first_s) / num_later if num_later > 0 else None


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
