"""The admin routes are closed without a key of their own; their answers with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig, TraceConfig
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.tracing import Tracing
from moe_serve.errors import ConfigError
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from routing_predictor.traces.recording import TraceHeader

HEADER = TraceHeader(num_experts=8, layers=(0,))
ADMIN, USER = {"Authorization": "Bearer root"}, {"Authorization": "Bearer user"}


@pytest.fixture
def admin(engine: EngineClient, model: ServedModel, tmp_path: Path) -> Iterator[TestClient]:
    tracing = Tracing(TraceConfig(directory=str(tmp_path)), RouteListeners(), lambda: HEADER)
    config = ServerConfig(api_keys=("user",), admin_keys=("other", "root"))
    with TestClient(create_app(engine, model, config, tracing)) as client:
        yield client
    tracing.close()


def test_without_admin_keys_there_are_no_admin_routes(
    engine: EngineClient, model: ServedModel, tmp_path: Path
) -> None:
    tracing = Tracing(TraceConfig(directory=str(tmp_path)), RouteListeners(), lambda: HEADER)
    with TestClient(create_app(engine, model, ServerConfig(), tracing)) as client:
        answer = client.post("/admin/trace/start", json={})
    assert answer.status_code == 403
    assert "server.admin_keys is not configured" in answer.json()["error"]["message"]
    assert not tracing.status().is_recording


@pytest.mark.parametrize("headers", [{}, USER, {"Authorization": "Bearer "}])
def test_another_key_does_not_open_them(admin: TestClient, headers: dict[str, str]) -> None:
    for method, verb in (("POST", "start"), ("POST", "stop"), ("GET", "status")):
        answer = admin.request(method, f"/admin/trace/{verb}", headers=headers)
        assert answer.status_code == 401
        assert "valid admin key" in answer.json()["error"]["message"]


def test_an_admin_key_opens_nothing_else(admin: TestClient) -> None:
    assert admin.get("/v1/models", headers=ADMIN).status_code == 401
    assert admin.get("/v1/models", headers=USER).status_code == 200


def test_start_status_stop(admin: TestClient, tmp_path: Path) -> None:
    body = {"sample_rate": 1, "weights": True}
    started = admin.post("/admin/trace/start", json=body, headers=ADMIN)
    assert started.status_code == 200 and started.json()["is_recording"]
    assert started.json()["sample_rate"] == 1 and started.json()["has_weights"]
    assert started.json()["folder"].startswith(str(tmp_path))
    again = admin.post("/admin/trace/start", json={}, headers=ADMIN)
    assert again.status_code == 409 and again.json()["error"]["code"] == "tracing_conflict"
    assert admin.get("/admin/trace/status", headers=ADMIN).json()["is_recording"]
    metrics = admin.get("/metrics", headers=USER).text
    assert 'moe_serve:trace_recording{model_name="tiny"} 1.0' in metrics
    for name in ("trace_tokens", "trace_bytes", "trace_dropped_parts", "trace_lost_tokens"):
        assert f'moe_serve:{name}_total{{model_name="tiny"}} 0.0' in metrics
    assert not admin.post("/admin/trace/stop", headers=ADMIN).json()["is_recording"]
    assert admin.post("/admin/trace/stop", headers=ADMIN).status_code == 409


def test_a_configuration_that_is_wrong_by_now_is_told(
    engine: EngineClient, model: ServedModel, tmp_path: Path
) -> None:
    """If the placement's file is gone, the answer is 400, and nothing is recorded."""

    def gone() -> TraceHeader:
        raise ConfigError("plan.json cannot be read: No such file or directory.")

    tracing = Tracing(TraceConfig(directory=str(tmp_path)), RouteListeners(), gone)
    config = ServerConfig(admin_keys=("root",))
    with TestClient(create_app(engine, model, config, tracing)) as client:
        before = client.get("/admin/trace/status", headers=ADMIN).json()
        answer = client.post("/admin/trace/start", json={"sample_rate": 1}, headers=ADMIN)
        assert answer.status_code == 400
        told = "Nothing is recorded: plan.json cannot be read: No such file or directory."
        assert answer.json()["error"]["message"] == told
        assert client.get("/admin/trace/status", headers=ADMIN).json() == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sample_rate": "all"}, "sample_rate must be a number"),
        ({"sample_rate": 10**400}, "sample_rate must be in"),
        ({"sample_rate": 0}, "sample_rate must be in"),
        ({"weights": 1}, "weights must be true or false"),
        ({"folder": "/etc"}, "Unknown field 'folder'. The known fields are sample_rate, weights"),
    ],
)
def test_a_wrong_body(admin: TestClient, body: dict[str, object], message: str) -> None:
    answer = admin.post("/admin/trace/start", json=body, headers=ADMIN)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
