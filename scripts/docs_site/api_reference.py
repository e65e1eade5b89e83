"""Generates the page of the HTTP API: every route with its fields, from the server's own
schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from moe_serve.config.sections import ServerConfig, TraceConfig
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.tracing import Tracing
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.http.app import Operations, create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.text.tokenizer import Tokenizer
from routing_predictor.traces.recording import TraceHeader

INTRODUCTION = """\
# HTTP API: reference

This page lists every route and every field, from the server's own `/openapi.json`. [The HTTP
API](http-api.md) explains them with examples.
"""
_METHODS = ("get", "post", "put", "delete", "patch")


class NoEngine:
    """A stand-in engine with just enough state to list the routes of a server."""

    max_model_len = 2048
    vocab_size = 2
    is_alive = True
    admission = None

    def submit(self, requests: Sequence[GenerationRequest]) -> DeltaQueue:
        raise AssertionError("the list of routes needs no engine")

    def abort(self, request_id: str) -> None:
        raise AssertionError("the list of routes needs no engine")

    def begin_drain(self) -> None:
        raise AssertionError("the list of routes needs no engine")

    def stats(self) -> EngineStats:
        return EngineStats()


def openapi() -> dict[str, Any]:
    """Returns the answer of a server with default settings to GET /openapi.json."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    model = ServedModel(
        name="model",
        tokenizer=Tokenizer(backend, eos_token_ids=[1]),
        chat_template=None,
        created=0,
        max_model_len=NoEngine.max_model_len,
    )
    engine, tracing = NoEngine(), Tracing(TraceConfig(), RouteListeners(), _no_header)
    hangs = HangWatch(engine, None, after_s=60.0, directory=None)
    try:
        app = create_app(engine, model, ServerConfig(), tracing, operations=Operations(hangs=hangs))
        return app.openapi()
    finally:
        hangs.close()


def _no_header() -> TraceHeader:
    raise AssertionError("nothing is recorded for a list of routes")


def render() -> str:
    spec = openapi()
    schemas: Mapping[str, Any] = spec.get("components", {}).get("schemas", {})
    parts = [INTRODUCTION]
    for path, routes in spec["paths"].items():
        for method in _METHODS:
            if method in routes:
                parts.append("\n".join(_route(method, path, routes[method], schemas)))
    return "\n".join(parts)


def _route(
    method: str, path: str, route: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[str]:
    yield f"## {method.upper()} {path}"
    yield ""
    if text := route.get("description") or "":
        yield from (_cell(text), "")
    if parameters := route.get("parameters"):
        yield from ("| parameter | in | takes | |", "|---|---|---|---|")
        for entry in parameters:
            takes = _kind(entry.get("schema", {}), schemas)
            text = _cell(entry.get("description", ""))
            yield f"| `{entry['name']}` | {entry['in']} | {takes} | {text} |"
        yield ""
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "schema" in body:
        yield from _fields(body["schema"], schemas)
    statuses = sorted(route.get("responses", {}))
    if statuses:
        yield from (f"Answers: {', '.join(statuses)}.", "")


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    known = {**schemas, **schema.get("$defs", {})}
    whole = _resolved(schema, known)
    required = set(whole.get("required", ()))
    yield from ("| field | takes | default |", "|---|---|---|")
    for name, field in whole.get("properties", {}).items():
        default = "required" if name in required else _default(field)
        yield f"| `{name}` | {_kind(field, known)} | {default} |"
    yield ""


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


def _resolved(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return known[reference.rpartition("/")[2]] if reference else schema


def _kind(schema: Mapping[str, Any], known: Mapping[str, Any], depth: int = 0) -> str:
    """Returns a short description of the values that a field takes."""
    schema = _resolved(schema, known)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        kinds = [_kind(o, known, depth) for o in options if o.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = schema.get("type", "any")
    if kind == "array":
        inner = _kind(schema.get("items", {}), known, depth + 1)
        return f"array{_range(schema, 'minItems', 'maxItems')} of {inner}"
    if kind == "object" and "properties" in schema and depth < 2:
        names = ", ".join(f"`{name}`" for name in schema["properties"])
        return f"object of {names}"
    return f"{kind}{_range(schema, 'minimum', 'maximum')}{_range(schema, 'minLength', 'maxLength')}"


def _range(schema: Mapping[str, Any], low: str, high: str) -> str:
    ends = [_end(schema.get(low)), _end(schema.get(high))]
    return f" ({ends[0]} to {ends[1]})" if ends[0] and ends[1] else _half_range(*ends)


def _half_range(low: str, high: str) -> str:
    if low:
        return f" (at least {low})"
    return f" (at most {high})" if high else ""


def _end(value: float | None) -> str:
    """Returns a bound as text; bounds of 64 bits are left out."""
    return "" if value is None or abs(value) >= 2**53 else f"{value:g}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
