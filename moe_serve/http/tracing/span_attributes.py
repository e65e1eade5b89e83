"""The attributes of spans: OpenTelemetry's names for HTTP and for generative models.

They never contain the texts of requests or answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_serve.http.metrics.finished_sequence import FinishedSequence

Attribute = str | int | float | Sequence[str]

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}


def request_attributes(
    method: str, route: str, status: int | None, request_id: str
) -> Mapping[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "http.request.method": method if method in METHODS else "_OTHER",
        "http.route": route,
        "moe_serve.request_id": request_id,
    }
    if status is not None:
        attributes["http.response.status_code"] = status
    if status is None or status >= 500:
        attributes["error.type"] = "client_closed_request" if status is None else str(status)
    if route in OPERATIONS:
        attributes["gen_ai.operation.name"] = OPERATIONS[route]
    return attributes


def sequence_attributes(
    sequences: Sequence[FinishedSequence], model_name: str
) -> Mapping[str, Attribute]:
    """The attributes of all sequences of a request: token counts are summed, times are of the
    slowest."""
    params = sequences[0].request.params
    prompts = [sequence for sequence in sequences if sequence.request.choice == 0]
    attributes: dict[str, Attribute] = {
        "gen_ai.provider.name": "moe_serve",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.finish_reasons": [sequence.reason.value for sequence in sequences],
        "gen_ai.usage.input_tokens": sum(len(s.request.prompt_token_ids) for s in prompts),
        "gen_ai.usage.cache_read.input_tokens": sum(s.num_cached_tokens for s in prompts),
        "gen_ai.usage.output_tokens": sum(sequence.num_tokens for sequence in sequences),
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return {**attributes, **_latencies(sequences)}


def _latencies(sequences: Sequence[FinishedSequence]) -> dict[str, Attribute]:
    """Latencies under the names that vLLM's traces use."""
    slowest = max(sequences, key=lambda s: s.ended - s.arrival)
    times = {
        "time_in_queue": (slowest.arrival, slowest.started),
        "time_to_first_token": (slowest.arrival, slowest.first_token),
        "time_in_model_prefill": (slowest.started, slowest.first_token),
        "time_in_model_decode": (slowest.first_token, slowest.ended),
        "time_in_model_inference": (slowest.started, slowest.ended),
        "e2e": (slowest.arrival, slowest.ended),
    }
    return {
        f"gen_ai.latency.{name}": end - start
        for name, (start, end) in times.items()
        if start is not None and end is not None
    }
