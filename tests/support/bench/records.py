"""Records and reports with the fields that a test sets."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from moe_serve.bench.client.load_client import ClientHealth
from moe_serve.bench.figures.request_record import RequestRecord, RunTimeline
from moe_serve.bench.figures.summary import Samples, quantiles_ms, summarize
from moe_serve.bench.report.report import Report


def record(**fields: Any) -> RequestRecord:
    """Makes the record of an answered request; the gaps give the times of its tokens."""
    values: dict[str, Any] = {
        "index": 0, "scheduled_s": 0.0, "started_s": 0.0, "first_s": 1.0, "end_s": 2.0,
        "prompt_tokens": 5, "output_tokens": 1,
    }  # fmt: skip
    values |= fields
    if "last_s" not in values and values["first_s"] is not None:
        values["last_s"] = values["first_s"] + sum(values.get("gaps_s", array("d")))
    return RequestRecord(**values)


def report(records: Sequence[RequestRecord], **fields: Any) -> Report:
    summary = summarize(records, peak_in_flight=2)
    samples = Samples.of(records)
    values: dict[str, Any] = {
        "url": "http://host:1",
        "model": "m",
        "created": "2026-01-01T00:00:00+00:00",
        "moe_serve_version": "0",
        "workload": {"mode": "closed loop, 2 at once", "is_open": False, "seed": 1},
        "client": {"cores": "2"},
        "summary": summary,
        "health": ClientHealth(cpu=0.1, loop_lag=None, lateness=None),
        "timeline": RunTimeline.of(records, summary.duration_s),
        "quantiles_ms": {
            "ttft": quantiles_ms(samples.ttft_R),
            "tpot": quantiles_ms(samples.tpot_R),
            "itl": quantiles_ms(samples.itl_G),
            "e2e": quantiles_ms(samples.e2e_R),
        },
        "records": tuple(records),
    }
    return Report(**values | fields)
