"""Histograms of finished sequences: the times of their stages, and their sizes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from moe_serve.http.metrics.finished_sequence import FinishedSequence

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_PREEMPTIONS = (0, 1, 2, 3, 5, 10, 20)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_queue_time_seconds": ("From the request to its first step.", _SECONDS),
    "request_prefill_time_seconds": ("From its first step to its first token.", _SECONDS),
    "request_decode_time_seconds": ("From its first token to its last.", _SECONDS),
    "request_inference_time_seconds": ("From its first step to its last token.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean of the tokens after the first.", _TPOT),
    "request_prompt_tokens": ("Tokens of the prompt, cached or not.", _TOKENS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens that were not found in the prefix cache.",
        _TOKENS,
    ),
    "request_num_preemptions": (
        "Times that the sequence was preempted because no KV page was free.",
        _PREEMPTIONS,
    ),
    "request_generation_tokens": ("Tokens of the answer.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a prompt's longest choice.", _TOKENS),
    "request_params_n": ("Choices requested for a prompt.", _CHOICES),
    "request_params_max_tokens": ("Maximum answer length that was requested, in tokens.", _TOKENS),
}


class RequestHistograms:
    """Observes each value of a finished sequence that is known."""

    def __init__(self, registry: CollectorRegistry, prefix: str, model_name: str) -> None:
        self._histograms = {
            name: Histogram(
                prefix + name, text, ["model_name"], registry=registry, buckets=buckets
            ).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def observe(self, sequence: FinishedSequence) -> None:
        for name, value in _values(sequence).items():
            if value is not None:
                self._histograms[name].observe(value)

    def observe_longest(self, num_tokens: int) -> None:
        """Observed once per prompt, when its last choice has ended."""
        self._histograms["request_max_num_generation_tokens"].observe(num_tokens)


def _values(sequence: FinishedSequence) -> dict[str, float | None]:
    params, is_first = sequence.request.params, sequence.request.choice == 0
    started, first = sequence.started, sequence.first_token
    return {
        "request_queue_time_seconds": _between(sequence.arrival, started),
        "request_prefill_time_seconds": _between(started, first),
        "request_decode_time_seconds": _between(first, sequence.ended),
        "request_inference_time_seconds": _between(started, sequence.ended),
        "request_time_per_output_token_seconds": sequence.tpot_s,
        "request_prompt_tokens": len(sequence.request.prompt_token_ids),
        "request_prefill_kv_computed_tokens": sequence.num_computed_tokens,
        "request_num_preemptions": sequence.num_preemptions,
        "request_generation_tokens": sequence.num_tokens,
        "request_params_n": params.n if is_first else None,
        "request_params_max_tokens": sequence.request.rules.max_tokens,
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
