"""Token counts and times that an answer reports about itself.

The times have the names of vLLM and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_serve.http.metrics.finished_sequence import DraftTally, FinishedSequence

Timing = Mapping[str, object]  # null: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionUsage:
    """The drafted tokens of a client's prediction. The accepted ones are tokens of the answer."""

    num_accepted: int = 0
    num_rejected: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one HTTP request. A prompt with n choices counts once.

    `reasoning_tokens` are the completion tokens that are reasoning; None if it is not a chat.
    `timing` and `llama_timings` are set for a request with a single finished sequence, if the
    configuration enables them.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tier_tokens: int = 0  # those of the cached tokens that came from a disk
    kv_dropped_tokens: int | None = None  # tokens that the answers no longer saw at their ends
    reasoning_tokens: int | None = None
    prediction: PredictionUsage | None = None  # None: the client sent no prediction
    timing: Timing | None = None
    llama_timings: Mapping[str, float] | None = None


def timing_of(sequence: FinishedSequence) -> Timing:
    """Returns vLLM's `metrics`. As in vLLM, the first token is timed from the first step, not from
    arrival. A server that verifies drafts adds their figures.
    """
    inference_ms = _ms(sequence.inference_s)
    tpot_s, drafts = sequence.tpot_s, sequence.drafts
    return {
        "time_to_first_token_ms": _ms(sequence.prefill_s),
        "generation_time_ms": _ms(sequence.decode_s),
        "queue_time_ms": _ms(sequence.queue_s),
        "mean_itl_ms": None if tpot_s is None else round(tpot_s * 1e3, 3),
        "tokens_per_second": (
            round(sequence.num_tokens / inference_ms * 1e3, 3) if inference_ms else None
        ),
        **({} if drafts is None else {"speculative_decoding": _draft_figures(drafts)}),
    }


def _draft_figures(drafts: DraftTally) -> Mapping[str, object]:
    """Returns vLLM's figures of a request's drafts. The mean also counts the token that a step
    makes without a draft.
    """
    num_drafts, num_drafted = drafts.num_drafts, drafts.num_drafted
    accepted = drafts.num_accepted
    return {
        "mean_acceptance_length": round(1 + accepted / num_drafts, 3) if num_drafts else None,
        "draft_acceptance_rate": round(accepted / num_drafted, 3) if num_drafted else None,
        "num_spec_steps": num_drafts,
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": accepted,
        "acceptance_histogram": list(drafts.steps_by_accepted),
    }


def llama_timings(sequence: FinishedSequence) -> Mapping[str, float] | None:
    """Returns llama.cpp's `timings`, or None if there is no first token.

    "prompt" covers the prompt tokens that were not cached, until the first token of the answer;
    "predicted" covers the answer's tokens after that.
    """
    prompt_ms, predicted_ms = _ms(sequence.prefill_s), _ms(sequence.decode_s)
    prompt_n = sequence.num_computed_tokens
    if prompt_ms is None or predicted_ms is None or prompt_n is None:
        return None
    return {
        "cache_n": sequence.num_cached_tokens,
        **_rates("prompt", prompt_n, prompt_ms),
        **_rates("predicted", sequence.num_tokens, predicted_ms),
    }


def _rates(name: str, count: int, ms: float) -> Mapping[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": round(ms / max(1, count), 3),
        f"{name}_per_second": round(count / ms * 1e3, 3) if ms else 0.0,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
