"""The times of one request in its own answer, by the names that vLLM gives them."""

from __future__ import annotations

from collections.abc import Mapping

from moe_serve.http.finished_sequence import FinishedSequence

Timing = Mapping[str, float | None]  # null: not known


def timing_of(sequence: FinishedSequence) -> Timing:
    """As in vLLM the first token is counted from the first step, not from the request."""
    started, first, ended = sequence.started, sequence.first_token, sequence.ended
    inference_ms = _ms(started, ended)
    tpot_s = sequence.tpot_s
    return {
        "time_to_first_token_ms": _ms(started, first),
        "generation_time_ms": _ms(first, ended),
        "queue_time_ms": _ms(sequence.arrival, started),
        "mean_itl_ms": None if tpot_s is None else round(tpot_s * 1e3, 3),
        "tokens_per_second": (
            round(sequence.num_tokens / inference_ms * 1e3, 3) if inference_ms else None
        ),
    }


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start) * 1e3, 3)
