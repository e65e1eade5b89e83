"""The measurements of one engine, and the figures derived from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One engine in one duel. `error` is the reason if it could not finish; the other fields are
    then partial.
    """

    engine: str
    load_s: float = 0.0  # from the start of the process until it can take work
    peak_bytes: int = 0  # largest resident size, summed over its processes
    rest_bytes: int = 0  # proportional share of memory after the work
    cache_bytes: int | None = None  # of its KV cache, if it says
    versions: dict[str, str] = field(default_factory=dict)
    samples_s: dict[str, list[float]] = field(default_factory=dict)  # kind of work -> seconds
    answers: list[list[int]] = field(default_factory=list)  # the batch's, in the first timed round
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures from medians.

    The time of decoding alone is that of a long answer minus that of a one-token answer.
    """

    ttft_s: float  # one prompt of `single_prompt` tokens, alone
    single_decode_tok_s: float
    batch_total_tok_s: float  # all answers' tokens over the whole time, prompts included
    batch_decode_tok_s: float
    prefill_tok_s: float
    load_s: float
    peak_gib: float
    rest_gib: float


def figures_of(results: Sequence[Result], work: Work) -> Figures | None:
    """Computes an engine's figures over all its finished duels; None if no duel finished."""
    done = [result for result in results if result.error is None]
    if not done:
        return None

    def seconds(kind: str) -> float:
        return statistics.median([s for result in done for s in result.samples_s[kind]])

    ttft, batch = seconds("ttft"), seconds("batch")
    batch_more = work.batch_size * (work.batch_output - 1)
    return Figures(
        ttft_s=ttft,
        single_decode_tok_s=_rate(work.single_output - 1, seconds("single") - ttft),
        batch_total_tok_s=_rate(work.batch_size * work.batch_output, batch),
        batch_decode_tok_s=_rate(batch_more, batch - seconds("batch_first")),
        prefill_tok_s=_rate(work.prefill_prompt, seconds("prefill")),
        load_s=statistics.median(result.load_s for result in done),
        peak_gib=max(result.peak_bytes for result in done) / 2**30,
        rest_gib=max(result.rest_bytes for result in done) / 2**30,
    )


def _rate(num_tokens: int, seconds: float) -> float:
    """Returns the rate, or 0 if the work is too small compared with the noise of the clock."""
    return num_tokens / seconds if seconds > 0 else 0.0
