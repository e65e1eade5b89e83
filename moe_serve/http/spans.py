"""Sends spans of requests to an OpenTelemetry collector, by OTLP over HTTP. Needs the extra `otel`.

The spans of a request are written after its end, from times recorded while it was served:

    POST /v1/chat/completions         server span, child of the client's span given in `traceparent`
      queue | prefill | decode        for each sequence

Their attributes have OpenTelemetry's names for HTTP and for generative models, and never contain
the texts of requests or answers. Spans wait in a bounded buffer for a sending thread. If the
collector is not available, spans are lost, but requests are not affected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_serve import __version__
from moe_serve.errors import ConfigError
from moe_serve.http.generation.answer_sequence import RequestTrace, open_trace
from moe_serve.http.metrics.finished_sequence import FinishedSequence
from moe_serve.http.metrics.metrics import route_label

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

_LOGGER = logging.getLogger(__name__)
_UNTRACED = ("/health", "/metrics", "/ping", "/dashboard")  # polled every few seconds
_CONTEXT_HEADERS = ("traceparent", "tracestate")


class CountedExporter:
    """Implements SpanExporter without its base class, which needs the extra `otel`.

    The sending thread writes `num_sent`.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


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
    """Returns the attributes of all sequences of a request: token counts are summed, and times are
    those of the slowest.
    """
    params, adapter = sequences[0].request.params, sequences[0].request.adapter
    name = model_name if adapter is None else adapter.name
    prompts = [sequence for sequence in sequences if sequence.request.choice == 0]
    attributes: dict[str, Attribute] = {
        "gen_ai.provider.name": "moe_serve",
        "gen_ai.request.model": name,
        "gen_ai.response.model": name,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.finish_reasons": [sequence.reason.value for sequence in sequences],
        "gen_ai.usage.input_tokens": sum(len(s.request.prompt_token_ids) for s in prompts),
        "gen_ai.usage.cache_read.input_tokens": sum(s.num_cached_tokens for s in prompts),
        "gen_ai.usage.output_tokens": sum(sequence.num_tokens for sequence in sequences),
    }
    if (max_tokens := sequences[0].request.rules.max_tokens) is not None:
        attributes["gen_ai.request.max_tokens"] = max_tokens
    if adapter is not None:
        attributes["moe_serve.adapter_digest"] = adapter.version.digest.hex()
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


_log = logging.getLogger(__name__)
DEFAULT_PATH = "/v1/traces"
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = (
    1.0  # time to send the rest at the server's end; spans are not worth a longer wait
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """One HTTP request that has been answered. Times are of `time.monotonic`."""

    method: str
    route: str  # one of a closed set
    status: int | None  # None: the client disconnected before an answer
    request_id: str
    begun: float
    ended: float
    trace_context: Mapping[str, str]  # the headers traceparent and tracestate, if sent
    sequences: Sequence[FinishedSequence]


class SpanExport:
    """Turns served requests into spans and sends them on its own thread."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = Resource({"service.name": "moe-serve", "service.version": __version__})
        # the operator's names take precedence
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter, self._num_made = CountedExporter(exporter), 0
        self._provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", self._exporter)))
        self._tracer = self._provider.get_tracer("moe_serve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def export(self, request: ServedRequest) -> None:
        """Queues the spans of a request. It never waits for the collector."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        to_wall = _WallClock()
        span = self._tracer.start_span(
            f"{request.method} {request.route}",
            context=self._propagator.extract(dict(request.trace_context)),
            kind=SpanKind.SERVER,
            start_time=to_wall(request.begun),
            attributes=request_attributes(
                request.method, request.route, request.status, request.request_id
            ),
        )
        if request.sequences:
            span.set_attributes(sequence_attributes(request.sequences, self._model_name))
        if request.status is None or request.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        parent = set_span_in_context(span)
        for sequence in request.sequences:
            self._export_stages(sequence, parent, to_wall)
        self._end(span, to_wall(request.ended))

    def close(self) -> None:
        """Sends the remaining spans, for a second at most, and logs how many were lost."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)
        if num_lost := self._num_made - self._exporter.num_sent:
            _log.warning(
                "%d of %d spans did not reach the OpenTelemetry collector",
                num_lost,
                self._num_made,
            )

    def _end(self, span: Span, at: int) -> None:
        self._num_made += span.is_recording()  # unsampled spans are not counted
        span.end(at)

    def _export_stages(self, sequence: FinishedSequence, parent: Any, to_wall: _WallClock) -> None:
        ends = (sequence.arrival, sequence.started, sequence.first_token, sequence.ended)
        for name, start, end in zip(("queue", "prefill", "decode"), ends, ends[1:], strict=False):
            if start is None:
                return
            is_last = end is None
            stage_end = sequence.ended if end is None else end
            stage = self._tracer.start_span(
                name,
                context=parent,
                start_time=to_wall(start),
                attributes={"moe_serve.choice": sequence.request.choice},
            )
            self._end(stage, to_wall(max(start, stage_end)))
            if is_last:
                return


class _WallClock:
    """Converts seconds of `time.monotonic` to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def __call__(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset_ns


def make_span_export(endpoint: str | None, model_name: str) -> SpanExport | None:
    """Returns None if no endpoint is set. Raises ConfigError for an invalid URL or missing
    packages."""
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "server.otlp_traces_endpoint must be a URL such as http://127.0.0.1:4318/v1/traces "
            f"(OTLP over HTTP; gRPC is not supported), got {endpoint!r}."
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "server.otlp_traces_endpoint must not contain a user name or password, because logs "
            "would show it. Set the variable OTEL_EXPORTER_OTLP_HEADERS to Authorization=Basic "
            "... instead."
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "server.otlp_traces_endpoint is set, but the OpenTelemetry packages are not "
            f"installed ({error}). Run pip install 'moe-serve[otel]', or remove the setting."
        ) from error
    has_path = parts.path.strip("/") != ""
    url = endpoint if has_path else endpoint.rstrip("/") + DEFAULT_PATH
    return SpanExport(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S), model_name)


class SpanMiddleware:
    """The outermost middleware: exports a span of each request.

    Left out are those of probes, Prometheus and the dashboard.
    """

    def __init__(self, app: ASGIApp, spans: SpanExport) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_UNTRACED):
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        start: Message = {}

        async def send_and_look(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        with open_trace() as trace:
            try:
                await self._app(scope, receive, send_and_look)
            finally:
                self._export(scope, start, begun, trace)

    def _export(self, scope: Scope, start: Message, begun: float, trace: RequestTrace) -> None:
        """Exports one request. An error in tracing never affects the request."""
        headers = Headers(scope=scope)
        answered = Headers(raw=list(start.get("headers", ())))
        method = scope["method"] if scope["method"] in METHODS else "HTTP"
        request = ServedRequest(
            method=method,
            route=route_label(scope["path"]),
            status=start.get("status"),
            request_id=answered.get("x-request-id", ""),
            begun=begun,
            ended=time.monotonic(),
            trace_context={name: headers[name] for name in _CONTEXT_HEADERS if name in headers},
            sequences=tuple(trace.sequences),
        )
        try:
            self._spans.export(request)
        except Exception:  # a tracing library may raise anything
            _LOGGER.exception("the span of a request could not be exported")
