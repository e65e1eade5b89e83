"""Computes the figures of an entrant from its times: rates, and their share of the device's
limits.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from gpu_bench.job import Outcome
from harness.machine import MachineLimits
from harness.model_size import ModelSize
from harness.roofline import roofline
from harness.work import Work

RATES = ("single_decode_tok_s", "batch_decode_tok_s", "batch_total_tok_s", "prefill_tok_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures from medians; None if not measured.

    The time of decoding alone is that of a long answer minus that of a one-token answer.
    """

    ttft_s: float | None
    batch_first_s: float | None  # until every prompt of the batch has its first token
    single_decode_tok_s: float | None
    batch_decode_tok_s: float | None
    batch_total_tok_s: float | None
    prefill_tok_s: float | None


def figures_of(outcome: Outcome, work: Work) -> Figures:
    def seconds(kind: str) -> float | None:
        samples = outcome.samples_s.get(kind)
        return statistics.median(samples) if samples else None

    first, batch_first = seconds("ttft"), seconds("batch_first")
    single, batch = seconds("single"), seconds("batch")
    return Figures(
        ttft_s=first,
        batch_first_s=batch_first,
        single_decode_tok_s=_rate(work.single_output - 1, single, first),
        batch_decode_tok_s=_rate(work.batch_size * (work.batch_output - 1), batch, batch_first),
        batch_total_tok_s=_rate(work.batch_size * work.batch_output, batch, 0.0),
        prefill_tok_s=_rate(work.prefill_prompt, seconds("prefill"), 0.0),
    )


def limits_of(machine: MachineLimits, size: ModelSize, work: Work) -> dict[str, float]:
    """Returns the best possible tokens per second: activated weights and KV over the bandwidth."""
    best = roofline(machine, size, work)
    return {name: float(getattr(best, name)) for name in RATES}


def _rate(num_tokens: int, seconds: float | None, less: float | None) -> float | None:
    """Returns the rate, or None if the noise of the clock is larger than the work."""
    if seconds is None or less is None or seconds <= less:
        return None
    return num_tokens / (seconds - less)
