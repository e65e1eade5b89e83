"""Service level objectives, and the number of answers that met them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.errors import BenchError

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
                    f"--slo cannot be {text!r}: it takes ttft=500ms,tpot=50ms,e2e=5s, "
                    "or some of these, each once."
                )
            limits[match[1]] = float(match[2]) / (1e3 if match[3] == "ms" else 1.0)
        return cls(ttft_s=limits.get("ttft"), tpot_s=limits.get("tpot"), e2e_s=limits.get("e2e"))

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the request met the limits, counted from when it was due. A failed request never
        does.

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
