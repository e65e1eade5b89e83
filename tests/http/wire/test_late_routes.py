"""Routes that are built when they are needed: by their first request, or all by the document."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.testclient import TestClient

from moe_serve.http.wire.late_routes import LateRoute


def _built(app: FastAPI) -> set[str]:
    late = [route for route in app.routes if isinstance(route, LateRoute)]
    assert len(late) > 30
    return {route.path for route in late if "app" in vars(route)}


def test_a_route_is_built_by_its_first_request(make_app: Callable[..., FastAPI]) -> None:
    app = make_app()
    client = TestClient(app)
    assert _built(app) == set()
    assert client.get("/nothing/here").status_code == 404
    assert client.delete("/v1/responses").status_code == 405
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert _built(app) == {"/v1/models/{model_id:path}"}
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"


def test_the_document_builds_every_route(make_app: Callable[..., FastAPI]) -> None:
    app = make_app()
    paths = app.openapi()["paths"]
    shown = {route.path_format for route in app.routes if isinstance(route, LateRoute)}
    assert {"/v1/chat/completions", "/metrics", "/admin/cells/{index}"} <= set(paths) <= shown
    assert {"/v1/chat/completions", "/metrics"} <= _built(app)
