"""The figures of one run: the spread of each latency, and the answers that met the limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.errors import BenchError

PERCENTILES = (50, 90, 95, 99)
# The quantiles a report keeps, enough to draw a distribution: every half percent.
QUANTILE_STEPS = tuple(i / 200 for i in range(201))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles of a latency. Percentiles between two values are interpolated, as numpy
    does by default."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_s: Sequence[float] | np.ndarray) -> Spread | None:
        """Computes the spread of values in seconds; None if there are none."""
        if len(values_s) == 0:
            return None
        values_ms = np.asarray(values_s, dtype=np.float64) * 1e3
        p50, p90, p95, p99 = np.percentile(values_ms, PERCENTILES)
        return cls(
            num=len(values_ms),
            mean=float(values_ms.mean()),
            p50=float(p50),
            p90=float(p90),
            p95=float(p95),
            p99=float(p99),
            max=float(values_ms.max()),
        )


def quantiles_ms(values_s: Sequence[float] | np.ndarray) -> list[float]:
    """Returns the quantiles at QUANTILE_STEPS; empty if there are no values."""
    if len(values_s) == 0:
        return []
    values_ms = np.asarray(values_s, dtype=np.float64) * 1e3
    return [round(float(value), 4) for value in np.quantile(values_ms, QUANTILE_STEPS)]


_TERM = re.compile(r"(ttft|tpot|e2e)=([0-9]+(?:\.[0-9]+)?)(ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency limits in seconds; None sets no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses "ttft=500ms,tpot=50ms,e2e=5s" or some of these terms."""
        limits: dict[str, float] = {}
        for term in text.replace(" ", "").split(","):
            match = _TERM.fullmatch(term)
            if match is None or match[1] in limits:
                raise BenchError(
                    "--slo must be ttft=500ms,tpot=50ms,e2e=5s or some of these limits, "
                    f"each at most once; got {text!r}."
                )
            limits[match[1]] = float(match[2]) / (1e3 if match[3] == "ms" else 1.0)
        return cls(ttft_s=limits.get("ttft"), tpot_s=limits.get("tpot"), e2e_s=limits.get("e2e"))

    def is_met(self, record: RequestRecord) -> bool:
        """Returns whether the request met the limits, counted from when it was due. A failed
        request never does.

        A latency that an answer does not have cannot miss its limit: an answer of one token has no
        TPOT.
        """
        pairs = (
            (record.ttft_s, self.ttft_s),
            (record.tpot_s, self.tpot_s),
            (record.e2e_s, self.e2e_s),
        )
        return record.is_ok and all(
            value is None or limit is None or value <= limit for value, limit in pairs
        )

    def __str__(self) -> str:
        limits = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s))
        return ", ".join(f"{name} {1e3 * s:g} ms" for name, s in limits if s is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The share and rate of requests that met the limits, among all that ended, failed ones
    included."""

    slo: str
    num_good: int
    share: float
    requests_per_s: float

    @classmethod
    def of(cls, slo: Slo, records: Sequence[RequestRecord], duration_s: float) -> Goodput:
        num_good = sum(slo.is_met(record) for record in records)
        return cls(
            slo=str(slo),
            num_good=num_good,
            share=num_good / len(records) if records else 0.0,
            requests_per_s=num_good / duration_s if duration_s > 0 else 0.0,
        )


_MANY_TOKENS_PER_EVENT = 1.2
_SHORT_ANSWERS = 0.9
_MUCH_CACHED = 0.05
_CHANCE_TOKENS = 8  # first words that prompts share by chance


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run.

    Latencies are of answered requests, counted from when they were due; `*_sent` counts from when
    they were sent, which differs in an open loop only. None means that there was nothing to
    measure.
    """

    duration_s: float  # from the start to the last end
    num_ok: int
    num_failed: int
    num_unfinished: int  # in flight when the run was interrupted
    peak_in_flight: int
    prompt_tokens: int
    output_tokens: int
    wanted_tokens: int  # tokens that the answered requests asked for
    cached_tokens: int | None  # prompt tokens that the server had already
    has_usage: bool  # else output tokens are events, and prompt tokens are not known
    tokens_per_event: float | None
    has_event_usage: bool  # the server said with each event how many tokens it had made
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    ttft_sent_ms: Spread | None
    e2e_sent_ms: Spread | None
    goodput: Goodput | None = None
    errors: dict[str, int] = field(default_factory=dict)  # kind -> times
    error_examples: dict[str, str] = field(
        default_factory=dict
    )  # kind -> first message of that kind

    @property
    def requests_per_s(self) -> float:
        return self._rate(self.num_ok)

    @property
    def input_tok_s(self) -> float:
        return self._rate(self.prompt_tokens)

    @property
    def output_tok_s(self) -> float:
        return self._rate(self.output_tokens)

    @property
    def error_rate(self) -> float:
        num_ended = self.num_ok + self.num_failed
        return self.num_failed / num_ended if num_ended else 0.0

    @property
    def cached_share(self) -> float | None:
        """The share of the prompt tokens that came from the server's cache."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    def _rate(self, num: int) -> float:
        return num / self.duration_s if self.duration_s > 0 else 0.0


def summarize(
    records: Sequence[RequestRecord],
    *,
    slo: Slo | None = None,
    num_unfinished: int = 0,
    peak_in_flight: int = 0,
) -> Summary:
    ok = [record for record in records if record.is_ok]
    failed = [record for record in records if not record.is_ok]
    duration = max((record.end_s for record in records), default=0.0)
    due, sent = Samples.of(records), Samples.of(records, is_from_start=True)
    cached = [r.cached_tokens for r in ok if r.cached_tokens is not None]
    num_events = sum(record.num_events for record in ok)
    output_tokens = sum(record.counted_tokens for record in ok)
    examples: dict[str, str] = {}
    for record in failed:
        examples.setdefault(record.error or "", record.detail)
    return Summary(
        duration_s=duration,
        num_ok=len(ok),
        num_failed=len(failed),
        num_unfinished=num_unfinished,
        peak_in_flight=peak_in_flight,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in ok),
        output_tokens=output_tokens,
        wanted_tokens=sum(record.wanted_tokens for record in ok),
        cached_tokens=sum(cached) if cached else None,
        has_usage=bool(ok) and all(record.output_tokens is not None for record in ok),
        tokens_per_event=output_tokens / num_events if num_events else None,
        has_event_usage=any(record.gap_tokens for record in ok),
        ttft_ms=Spread.of(due.ttft_R),
        tpot_ms=Spread.of(due.tpot_R),
        itl_ms=Spread.of(due.itl_G),
        e2e_ms=Spread.of(due.e2e_R),
        ttft_sent_ms=Spread.of(sent.ttft_R),
        e2e_sent_ms=Spread.of(sent.e2e_R),
        goodput=None if slo is None else Goodput.of(slo, records, duration),
        errors=dict(Counter(record.error or "" for record in failed).most_common()),
        error_examples=examples,
    )


def notes_of(summary: Summary, *, shares_prompts: bool, ignores_eos: bool) -> list[str]:
    """Returns sentences about conditions that the reader of the figures should know; empty if there
    are none."""
    notes = []
    if summary.num_ok and not summary.has_usage:
        notes.append(
            "the server gives no usage: output tokens are events, of which each may hold several, "
            "and prompt tokens are not known."
        )
    per_event = summary.tokens_per_event or 0.0
    if summary.has_usage and per_event > _MANY_TOKENS_PER_EVENT and not summary.has_event_usage:
        notes.append(
            f"an event holds {per_event:.2f} tokens: ITL is between events, TPOT is per token "
            "(--event-usage asks for the number with each event)."
        )
    share = summary.cached_share
    is_chance = (summary.cached_tokens or 0) < _CHANCE_TOKENS * summary.num_ok
    if share is not None and share > _MUCH_CACHED and not (shares_prompts or is_chance):
        notes.append(
            f"{share:.0%} of the prompt tokens came from the server's prefix cache although the "
            "workload shares none: it has seen these prompts before; take another --seed."
        )
    if summary.wanted_tokens and summary.output_tokens < _SHORT_ANSWERS * summary.wanted_tokens:
        why = "the server ended them early" if ignores_eos else "models stop when they are done"
        notes.append(
            f"answers have {summary.output_tokens / summary.wanted_tokens:.0%} of the tokens that "
            f"were asked for: {why}."
        )
    return notes
