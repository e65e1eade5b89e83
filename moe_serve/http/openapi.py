"""Corrects openapi.json where FastAPI does not know how our routes work.

The routes read their bodies themselves and answer errors with one envelope, never with FastAPI's
422. Some stream, and /metrics is text. Schemas with their own definitions ("$defs") get them moved
to the document's components, where references can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from moe_serve.http.gate.auth import ADMIN_PREFIX, OPEN_PATHS

_STREAMING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"}
)
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_ERRORS = {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
_RANGES = {
    "4XX": "The request is invalid or not allowed.",
    "5XX": "The server failed, or cannot serve requests now.",
}


def honest_openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Returns a function for `app.openapi` that makes FastAPI's document once and corrects it."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()  # FastAPI caches it, so this is done once
        components = document.setdefault("components", {})
        if "Error" not in components.get("schemas", {}):
            _put_right(document, components)
        return document

    return openapi


def _put_right(document: dict[str, Any], components: dict[str, Any]) -> None:
    schemas: dict[str, Any] = {**_ERRORS}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, operation["responses"])
            if path not in OPEN_PATHS:
                kind = "adminKey" if path.startswith(ADMIN_PREFIX) else "apiKey"
                operation["security"] = [{kind: []}, *([] if kind == "adminKey" else [{}])]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body:
                body["schema"] = _moved(body["schema"], operation["operationId"], schemas)
    components["schemas"] = schemas
    bearer = {"type": "http", "scheme": "bearer"}
    components["securitySchemes"] = {"apiKey": bearer, "adminKey": bearer}


def _responses(path: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The successful answers with their media types, and the error envelope for all others."""
    found = {status: dict(answer) for status, answer in known.items() if status.startswith("2")}
    for answer in found.values():
        if path in _STREAMING:
            stream = {"text/event-stream": {"schema": {"type": "string"}}}
            answer["content"] = {**answer.get("content", {}), **stream}
        elif path == "/metrics":
            answer["content"] = {"text/plain": {"schema": {"type": "string"}}}
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    envelope = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    for status, text in _RANGES.items():
        found[status] = {"description": text, "content": envelope}
    return found


def _moved(schema: dict[str, Any], owner: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Moves the definitions of the schema to `schemas`, under unique names."""
    names = {name: f"{owner}.{name}" for name in schema.get("$defs", {})}
    for name, definition in schema.get("$defs", {}).items():
        schemas[names[name]] = _renamed(definition, names)
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    moved: dict[str, Any] = _renamed(rest, names)
    return moved


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {key: _renamed(item, names) for key, item in value.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        name = reference.removeprefix("#/$defs/")
        renamed["$ref"] = f"#/components/schemas/{names[name]}"
    return renamed
