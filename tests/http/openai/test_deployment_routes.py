"""Routes for hosting platforms: /invocations, the load in a header, forced usage, and the
tokenizer's configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.cli.serve.model_files import ModelFiles
from moe_serve.config.sections import Config, EngineConfig, ModelConfig, ServerConfig
from moe_serve.http.app import create_app
from moe_serve.http.openai.bodies import ChatBody
from moe_serve.model.checkpoint.checkpoint import demo_model_folder

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"
Make = Callable[..., FastAPI]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def without_ids(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}])
def test_invocations_answer_as_the_route_of_the_body(
    client: TestClient, route: str, fields: dict[str, Any]
) -> None:
    body = {**BODIES[route], **fields}
    one, other = client.post("/invocations", json=body), client.post(route, json=body)
    assert one.status_code == other.status_code == 200
    assert one.headers["content-type"] == other.headers["content-type"]
    if "stream" in fields:
        pairs = [[without_ids(event) for event in events(got.text)] for got in (one, other)]
        assert sorted(map(str, pairs[0])) == sorted(map(str, pairs[1]))
    else:
        assert without_ids(one.json()) == without_ids(other.json())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"inputs": "Hi"}, "prompt"),
        ({**CHAT, **TEXT}, "prompt"),
        ({**CHAT, "temperature": 9}, "temperature"),
        ({**TEXT, "max_tokens": "x"}, "max_tokens"),
    ],
)
def test_wrong_invocations(client: TestClient, body: dict[str, Any], param: str) -> None:
    response = client.post("/invocations", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_invocations_need_a_key_like_the_others(make_app: Make) -> None:
    client = TestClient(make_app(api_keys=("secret-key-of-a-test",)))
    response = client.post("/invocations", json=CHAT, headers={ASKED: "TEXT"})
    assert response.status_code == 401 and TOLD not in response.headers
    key = {"Authorization": "Bearer secret-key-of-a-test"}
    assert client.post("/invocations", json=CHAT, headers=key).status_code == 200


def test_openapi_has_the_route(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    answer = paths["/invocations"]["post"]["responses"]["200"]["content"]
    assert "text/event-stream" in answer
    assert "/tokenizer_info" not in paths
    assert "logprob_token_ids" in ChatBody.model_json_schema()["properties"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize("route", [*BODIES, "/invocations", "/v1/responses", "/v1/messages"])
def test_the_load_in_a_header(
    client: TestClient, engine: Any, route: str, fields: dict[str, Any]
) -> None:
    engine.num_waiting = 3
    body = BODIES.get(route, CHAT)
    if route == "/v1/responses":
        body = {"input": "Hi"}
    if route == "/v1/messages":
        body = {**CHAT, "max_tokens": 5}
    body = {**body, **fields}
    text = client.post(route, json=body, headers={ASKED: "text"}).headers[TOLD]
    kind, _, values = text.partition(" ")
    named = dict(part.split("=") for part in values.split(", "))
    assert kind == "TEXT" and set(named) == {
        "named_metrics.kv_cache_usage_perc",
        "named_metrics.num_requests_waiting",
    }
    assert named["named_metrics.num_requests_waiting"] == "3.0"
    asked = client.post(route, json=body, headers={ASKED: "JSON"}).headers[TOLD]
    kind, _, report = asked.partition(" ")
    told = json.loads(report)["named_metrics"]
    assert kind == "JSON" and told["num_requests_waiting"] == 3.0
    assert 0 <= told["kv_cache_usage_perc"] <= 1
    for headers in ({}, {ASKED: "BIN"}, {ASKED: ""}):
        assert TOLD not in client.post(route, json=body, headers=headers).headers


def test_no_load_with_errors_and_elsewhere(client: TestClient) -> None:
    wrong = client.post("/v1/completions", json={"prompt": 3}, headers={ASKED: "TEXT"})
    assert wrong.status_code == 400 and TOLD not in wrong.headers
    assert TOLD not in client.get("/v1/models", headers={ASKED: "TEXT"}).headers


@pytest.mark.parametrize("route", [*BODIES, "/invocations"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_forced_usage(make_app: Make, route: str, options: Any) -> None:
    body = {**BODIES.get(route, CHAT), "stream": True, "n": 2, "stream_options": options}
    chunks = events(TestClient(make_app(force_include_usage=True)).post(route, json=body).text)
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    plain = events(TestClient(make_app()).post(route, json=body).text)
    assert not any(chunk.get("usage") for chunk in plain)


def test_the_tokenizer_s_configuration_is_told_where_it_may_be(engine: Any, model: Any) -> None:
    info = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ x }}"}
    told = TestClient(create_app(engine, replace(model, tokenizer_info=info), ServerConfig()))
    assert told.get("/tokenizer_info").json() == info
    assert told.post("/tokenizer_info").status_code == 405
    silent = TestClient(create_app(engine, model, ServerConfig()))
    assert silent.get("/tokenizer_info").status_code == 404


def test_what_the_tokenizer_s_configuration_says(tmp_path: Path) -> None:
    """Everything is shown except file names of the machine that made the checkpoint."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text("utf-8")), "vocab_file": "/home/me/vocab.json"}
    path.write_text(json.dumps(config), "utf-8")
    model = ModelConfig(path=str(folder))
    info = ModelFiles.load(Config(engine=EngineConfig(model=model))).tokenizer_info()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["eos_token"] == "<|im_end|>" and "messages" in info["chat_template"]
    assert "vocab_file" not in info and str(tmp_path) not in json.dumps(info)
