"""OpenTelemetry spans of requests, from an exporter in memory and from a collector."""

from __future__ import annotations

import asyncio
import http.server
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.http import spans as span_export
from moe_serve.http.app import create_app
from moe_serve.http.generation.answer_sequence import current_trace
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.spans import SpanExport, make_span_export
from tests.support.adapters.small_registry import small_registry, write_small

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
Spans = Callable[[], dict[str, ReadableSpan]]


@pytest.fixture(autouse=True)
def _no_sender_is_left() -> Iterator[None]:
    """Waits until the sender's thread has ended. It would disturb later tests: its retries use
    `random`, which Hypothesis refuses."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("Otel")]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left), f"{left} are still there"


@pytest.fixture
def traced(engine: Any, model: ServedModel) -> Iterator[tuple[TestClient, Spans]]:
    """A client, and its spans by name after a flush."""
    exporter = InMemorySpanExporter()
    spans = SpanExport(exporter, model.name)
    app = create_app(engine, model, ServerConfig(), spans=spans)

    def finished() -> dict[str, ReadableSpan]:
        spans._provider.force_flush()
        return {span.name: span for span in exporter.get_finished_spans()}

    with TestClient(app, raise_server_exceptions=False) as client:
        yield client, finished
    spans.close()


def test_the_spans_of_a_request(traced: tuple[TestClient, Spans]) -> None:
    client, finished = traced
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "max_tokens": 3}
    headers = {"traceparent": TRACEPARENT, "X-Request-Id": "mine"}
    assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    spans = finished()
    assert spans.keys() == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    whole = spans.pop("POST /v1/chat/completions")
    assert f"{whole.context.trace_id:032x}" == TRACE_ID
    assert whole.parent is not None and f"{whole.parent.span_id:016x}" == PARENT_ID
    attributes = dict(whole.attributes or {})
    latencies = {k: attributes.pop(k) for k in list(attributes) if "latency" in k}
    assert len(latencies) == 6 and all(isinstance(v, float) and v >= 0 for v in latencies.values())
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "moe_serve.request_id": "mine",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "moe_serve",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len("<user>hi\n<assistant>"),
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
    }
    times = [(spans[n].start_time, spans[n].end_time) for n in ("queue", "prefill", "decode")]
    assert [t for pair in times for t in pair] == sorted(t for pair in times for t in pair)
    assert (whole.start_time or 0) <= (times[0][0] or 0)
    assert (times[2][1] or 0) <= (whole.end_time or 0)
    for stage in spans.values():
        assert stage.parent is not None and stage.parent.span_id == whole.context.span_id
    assert current_trace() is None


def test_an_adapter_is_named(engine: Any, model: ServedModel, tmp_path: Path) -> None:
    registry = small_registry()
    version = registry.load("sql", write_small(tmp_path / "sql"))
    exporter = InMemorySpanExporter()
    spans = SpanExport(exporter, model.name)
    app = create_app(engine, replace(model, adapters=registry), ServerConfig(), spans=spans)
    with TestClient(app) as client:
        body = {"model": "sql", "prompt": "hi", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        spans._provider.force_flush()
    spans.close()
    whole = next(s for s in exporter.get_finished_spans() if s.parent is None)
    attributes = whole.attributes or {}
    assert attributes["gen_ai.response.model"] == "sql"
    assert attributes["moe_serve.adapter_digest"] == version.digest.hex()


def test_streams_choices_and_refusals(traced: tuple[TestClient, Spans]) -> None:
    client, finished = traced
    body = {"prompt": "hi", "n": 2, "max_tokens": 2, "stream": True}
    assert "[DONE]" in client.post("/v1/completions", json=body).text
    whole = finished()["POST /v1/completions"]
    assert whole.parent is None, "nobody sent a context"
    attributes = whole.attributes or {}
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.usage.input_tokens"] == 2, "a prompt counts once"
    assert client.post("/v1/chat/completions", json={}).status_code == 400
    refused = finished()["POST /v1/chat/completions"].attributes or {}
    assert refused["http.response.status_code"] == 400
    assert "gen_ai.usage.output_tokens" not in refused


def test_names_of_spans_come_from_a_closed_set(traced: tuple[TestClient, Spans]) -> None:
    client, finished = traced
    for i in range(3):
        client.request(f"ODD{i}", f"/odd/{i}", headers={"traceparent": "no-context"})
    assert finished().keys() == {"HTTP other"}


def test_probes_make_no_spans(traced: tuple[TestClient, Spans]) -> None:
    client, finished = traced
    for path in ("/health/live", "/health/ready", "/metrics", "/dashboard/state"):
        client.get(path)
    assert finished() == {}


def test_a_collector_gets_them(
    engine: Any, model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The protocol's own classes read the requests at a real OTLP receiver."""
    monkeypatch.setattr(span_export, "_CLOSE_TIMEOUT_S", 60.0)  # however busy the machine is
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(content)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        spans = make_span_export(f"http://127.0.0.1:{collector.server_port}", model.name)
        assert spans is not None
        with TestClient(create_app(engine, model, ServerConfig(), spans=spans)) as client:
            assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        spans.close()
        collector.shutdown()
        thread.join()
    assert "did not reach" not in caplog.text
    ((path, request),) = received
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "moe-serve"
    (scope,) = resource.scope_spans
    assert {s.name for s in scope.spans} == {"POST /v1/completions", "queue", "prefill", "decode"}


def test_a_collector_that_is_away_fails_no_request(engine: Any, model: ServedModel) -> None:
    """The collector accepts connections and never answers, which is the worst kind."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        spans = make_span_export(f"http://127.0.0.1:{deaf.getsockname()[1]}/x", model.name)
        assert spans is not None
        app = create_app(engine, model, ServerConfig(), spans=spans)

        async def ask() -> None:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as one:
                for _ in range(600):  # more than a batch: the sending thread is at it
                    assert (await one.get("/v1/models")).status_code == 200

        asyncio.run(ask())
        spans.close()


def test_the_end_waits_for_no_collector_and_says_what_is_lost(
    engine: Any, model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(span_export, "_CLOSE_TIMEOUT_S", 0.05)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        spans = make_span_export(f"http://127.0.0.1:{deaf.getsockname()[1]}/x", model.name)
        assert spans is not None
        with TestClient(create_app(engine, model, ServerConfig(), spans=spans)) as client:
            assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
            unsampled = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00"}
            client.post("/v1/completions", json={"prompt": "hi"}, headers=unsampled)
        spans.close()
    said = [r.getMessage() for r in caplog.records if r.name == span_export.__name__]
    assert said == ["4 of 4 spans did not reach the OpenTelemetry collector"]


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://h:4317", "http://", "nonsense"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as"):
        make_span_export(url, "m")


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        make_span_export("http://user:hunter2@127.0.0.1:4318", "m")
    assert "hunter2" not in str(caught.value)


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-serve\[otel\]'"):
        make_span_export("http://127.0.0.1:4318", "m")
    assert make_span_export(None, "m") is None
