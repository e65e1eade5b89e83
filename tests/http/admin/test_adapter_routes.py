"""Adapters over HTTP: names in every API, the list of models, loading and unloading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from tests.support.adapters.small_registry import small_registry, write_small

ADMIN, USER = {"Authorization": "Bearer root"}, {"Authorization": "Bearer user"}
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}


@pytest.fixture
def registry(tmp_path: Path) -> AdapterRegistry:
    registry = small_registry(root=str(tmp_path / "root"))
    registry.load("fine", write_small(tmp_path / "root" / "first", 1))
    return registry


@pytest.fixture
def client(make_app: Callable[..., FastAPI], registry: AdapterRegistry) -> Iterator[TestClient]:
    app = make_app(adapters=registry, api_keys=("user",), admin_keys=("root",))
    with TestClient(app, headers=USER) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["fine", "tiny:fine"])
def test_every_route_takes_the_name_of_an_adapter(
    client: TestClient, engine: Any, registry: AdapterRegistry, route: str, name: str
) -> None:
    answer = client.post(route, json={"model": name, **ROUTES[route]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "fine"
    held = engine.submitted[-1].adapter
    assert held.version is registry.version("fine")
    assert engine.submitted[-1].adapter_digest == held.weights.digest
    for model in ({"model": "tiny"}, {}) if route != "/v1/messages" else ({"model": "tiny"},):
        assert client.post(route, json={**model, **ROUTES[route]}).json()["model"] == "tiny"
        assert engine.submitted[-1].adapter is None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["other", "fine ", "Fine", "x:fine", "tiny:", "tiny:other"])
def test_an_unknown_name_never_falls_back_to_the_base(
    client: TestClient, engine: Any, route: str, name: str
) -> None:
    answer = client.post(route, json={"model": name, **ROUTES[route]})
    assert answer.status_code == 404
    assert "does not exist; this server serves 'tiny' and 1 adapters" in answer.text
    assert not engine.submitted


def test_models_are_listed_with_their_parents(client: TestClient) -> None:
    base, fine = client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("tiny", None)
    assert (fine["id"], fine["parent"], fine["root"]) == ("fine", "tiny", "first")
    assert client.get("/v1/models/fine").json() == fine
    assert client.get("/v1/models/tiny").json() == base
    assert client.get("/v1/models/none").status_code == 404


def test_load_reload_and_unload(client: TestClient, engine: Any, tmp_path: Path) -> None:
    write_small(tmp_path / "root" / "second", 2)
    body: dict[str, Any] = {"lora_name": "more", "lora_path": "second"}
    loaded = client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert loaded.status_code == 200 and loaded.json()["lora_name"] == "more"
    client.post("/v1/completions", json={"model": "more", "prompt": "hi"})
    first = engine.submitted[-1].adapter
    write_small(tmp_path / "root" / "second", 3)
    body["pinned"] = True
    again = client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert (loaded.json()["pinned"], again.json()["pinned"]) == (False, True)
    assert again.json()["digest"] != loaded.json()["digest"] == first.version.digest.hex()
    names = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert names == ["tiny", "fine", "more"]
    fine, more = client.get("/dashboard/state").json()["adapters"]["adapters"]
    assert (fine["name"], fine["is_pinned"], fine["state"]) == ("fine", False, "in memory")
    assert more["version"] == again.json()["digest"][:8] and more["is_pinned"]
    assert more["running"] + more["waiting"] == 0 < more["bytes"]
    text = client.get("/metrics").text
    assert 'lora_requests_info{max_lora="1000",model_name="tiny",running_lora_adapters=""' in text
    assert "moe_serve:adapter_names{" in text and "adapter_loads_total{" in text
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "more"}, headers=ADMIN)
    assert gone.status_code == 200
    assert client.post("/v1/completions", json={"model": "more", "prompt": "x"}).status_code == 404
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "more"}, headers=ADMIN)
    assert gone.status_code == 404


@pytest.mark.parametrize("headers", [{}, USER])
@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_only_an_admin_key_changes_adapters(
    client: TestClient, route: str, headers: dict[str, str]
) -> None:
    answer = client.post(route, json={"lora_name": "fine"}, headers=headers)
    assert answer.status_code == 401 and "valid admin key" in answer.text
    assert client.get("/v1/models/fine").status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "a"}, "lora_path must be a string"),
        ({"lora_name": 3, "lora_path": "first"}, "lora_name must be a string"),
        ({"lora_name": "a", "lora_path": "first", "x": 1}, "Unknown field 'x'"),
        ({"lora_name": "a", "lora_path": "first", "pinned": 1}, "pinned must be true or false"),
        ({"lora_name": "tiny", "lora_path": "first"}, "the name of the model itself"),
        ({"lora_name": "tiny:sql", "lora_path": "first"}, "begin with it and a colon"),
        ({"lora_name": "a", "lora_path": "../outside"}, "must be a folder below adapters.root"),
        ({"lora_name": "a", "lora_path": "/etc"}, "must be a folder below adapters.root"),
        ({"lora_name": "a", "lora_path": "nothing"}, "is not a folder"),
    ],
)
def test_bodies_that_are_refused(client: TestClient, body: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_server_without_adapters_says_so(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(admin_keys=("root",)))
    body = {"lora_name": "a", "lora_path": "b"}
    answer = client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert answer.status_code == 400 and "start it with --enable-lora" in answer.text


def test_metrics_name_the_adapters_of_open_requests(
    make_app: Callable[..., FastAPI], registry: AdapterRegistry
) -> None:
    app = make_app(adapters=registry)
    params = SamplingParams(max_tokens=3)

    async def look() -> list[list[list[str]]]:
        generations = app.state.generations
        request = GenerationRequest(
            request_id="r",
            prompt_token_ids=(1,),
            params=params,
            adapter=registry.acquire("fine"),
        )
        generation, seen = generations.start([request]), []

        def names() -> list[list[str]]:
            return [list(generations.adapters(has_begun=has_begun)) for has_begun in (True, False)]

        seen.append(names())
        async for _ in generation:
            seen.append(names())
        generation.close()
        return [*seen, names()]

    seen = asyncio.run(look())
    assert seen[0] == [[], ["fine"]] and seen[1] == [["fine"], []] and seen[-1] == [[], []]
