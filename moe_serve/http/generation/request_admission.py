"""Gives new requests to the engine, or refuses them: the engine has stopped, the server shuts down,
the queue is full, or a target cannot be met.

Answers say when the first token is expected, and refusals when to try again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.first_token import Refusal
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.errors import ServerOverloadedError
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.schema.api_error import (
    NO_RETRY,
    ApiError,
    draining_error,
    engine_dead_error,
    retry_headers,
)

PREDICTED_HEADER = "X-Predicted-Ttft-Ms"
DEADLINE_EXCEEDED = "deadline_exceeded"
_LONGEST_RETRY_S = 60.0  # longest time that a full queue names; clients do not wait longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Requests that were queued. `headers` are for the answer."""

    queue: DeltaQueue
    headers: Mapping[str, str]


class RequestAdmission:
    """Queues the requests of one HTTP request, or raises the error that refuses them and counts
    it."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine, self._metrics = engine, metrics

    def submit(self, requests: Sequence[GenerationRequest], *, is_draining: bool) -> Admitted:
        """Queues all requests or none."""
        if not self._engine.is_alive:
            self._metrics.count_rejection("engine_dead")
            raise engine_dead_error()
        if is_draining:
            self._metrics.count_rejection("draining")
            raise draining_error("The server is shutting down and accepts no new requests.")
        predicted_s = self._predicted_s(requests[0])
        self._check_targets(requests)
        try:
            queue = self._engine.submit(requests)
        except ServerOverloadedError as error:
            self._metrics.count_rejection("draining" if error.is_draining else "queue_full")
            raise _with_honest_retry(error, predicted_s) from None
        headers = {} if predicted_s is None else {PREDICTED_HEADER: f"{_ms(predicted_s):.10g}"}
        return Admitted(queue=queue, headers=headers)

    def _predicted_s(self, request: GenerationRequest) -> float | None:
        admission = self._engine.admission
        if admission is None:
            return None
        num_tokens = len(request.prompt_token_ids)
        forecast = admission.forecast(request.service, num_tokens, request.priority)
        return None if forecast is None else forecast.predicted_s

    def _check_targets(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises the 429 of a sequence that may be refused and whose target cannot be met."""
        admission = self._engine.admission
        if admission is None:
            return
        for request in requests:
            num_tokens = len(request.prompt_token_ids)
            refusal = admission.check(request.service, num_tokens, request.priority)
            if refusal is not None:
                self._metrics.count_rejection("deadline_unmeetable")
                raise _refused(refusal, request)


def exceeded(delta: TokenDelta) -> ApiError:
    """Returns the error of a strict request that was ended because it missed its target."""
    message = f"The answer has missed its deadline and was ended: {delta.error}."
    return ApiError(504, message, code=DEADLINE_EXCEEDED, headers=NO_RETRY)


def _with_honest_retry(
    error: ServerOverloadedError, predicted_s: float | None
) -> ServerOverloadedError:
    """Returns the error of a full queue, with the time until the queued requests have begun."""
    if predicted_s is None or error.is_draining:
        return error
    seconds = min(max(predicted_s, error.retry_after_s), _LONGEST_RETRY_S)
    return ServerOverloadedError(str(error), retry_after_s=seconds)


def _refused(refusal: Refusal, request: GenerationRequest) -> ApiError:
    predicted, target = _ms(refusal.predicted_ttft_s), _ms(refusal.target_ttft_s)
    why = "slo.strict" if request.service.targets.is_strict else "its tier"
    return ApiError(
        429,
        f"The first token is expected after {predicted:.10g} ms, but the target is {target:.10g} "
        f"ms, and {why} prefers a refusal to a late answer. Try again in "
        f"{refusal.retry_after_s:.1f} s.",
        code="deadline_unmeetable",
        headers={**retry_headers(refusal.retry_after_s), "x-should-retry": "true"},
        details={"predicted_ttft_ms": predicted, "target_ttft_ms": target},
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
