"""POST /tokenize, /detokenize and /render, GET /version and /load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve import __version__
from moe_serve.engine.request.stats import EngineLoad, RankLoad


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_there_and_back(client: TestClient, engine: Any, prefix: str) -> None:
    body = {"model": "tiny", "prompt": "hé", "return_token_strs": True}
    answer = client.post(f"{prefix}/tokenize", json=body).json()
    assert answer["count"] == 3 and answer["max_model_len"] == 512
    assert answer["tokens"] == engine.tokenizer.encode("hé")
    assert answer["token_strs"] == ["h", r"bytes:\xc3", r"bytes:\xa9"]
    back = client.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "hé"}
    assert not engine.submitted


def test_a_chat_goes_through_the_template(client: TestClient, engine: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = client.post("/tokenize", json={"messages": messages}).json()
    assert engine.tokenizer.decode(answer["tokens"]) == "<user>hi\n<assistant>"
    assert answer["token_strs"] is None
    body = {"messages": messages, "add_generation_prompt": False, "return_token_strs": True}
    answer = client.post("/tokenize", json=body).json()
    assert "".join(answer["token_strs"]) == "<user>hi\n"


def test_special_tokens_are_kept_unless_asked(client: TestClient) -> None:
    tokens = {"tokens": [256]}
    assert client.post("/detokenize", json=tokens).json() == {"prompt": "<|end|>"}
    tokens["skip_special_tokens"] = True  # type: ignore[assignment]
    assert client.post("/detokenize", json=tokens).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": 3}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour", "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "a" * 4000}, "prompt", "context_length_exceeded"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [257]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [True]}, "tokens.0", "invalid_type"),
        ("/detokenize", {"tokens": [2**63]}, "tokens.0", "invalid_value"),
        ("/detokenize", {"tokens": [1] * 262_145}, "tokens", "invalid_value"),
    ],
)
def test_what_is_refused(
    client: TestClient, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error


def test_special_tokens_with_messages_are_refused(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}
    response = client.post("/tokenize", json=body)
    assert response.json()["error"]["code"] == "unsupported_parameter"


def test_another_model_is_not_found(client: TestClient) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert client.post(path, json={"model": "other", **fields}).status_code == 404


def test_lenient_mode_names_what_it_ignores(make_app: Callable[..., FastAPI]) -> None:
    with TestClient(make_app(is_strict=False)) as client:
        response = client.post("/tokenize", json={"prompt": "a", "colour": 1})
    assert response.status_code == 200
    assert response.headers["X-Ignored-Parameters"] == "colour"


def test_all_of_them_need_the_key(make_app: Callable[..., FastAPI]) -> None:
    with TestClient(make_app(api_keys=("k",))) as client:
        for path in ("/tokenize", "/v1/detokenize"):
            assert client.post(path, json={}).status_code == 401
        for path in ("/version", "/load", "/server_info"):
            assert client.get(path).status_code == 401


def test_version_and_load(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}
    assert client.get("/load").json() == {
        "server_load": 0,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage": 0.0,
        "num_kv_pages": 10,
        "ranks": [],
    }


def test_server_info_names_the_model_for_the_sglang_gateway(client: TestClient) -> None:
    """Without `served_model_name` its workers serve an unknown model."""
    (model,) = client.get("/v1/models").json()["data"]
    assert client.get("/server_info").json() == {
        "model_path": model["root"],
        "served_model_name": model["id"],
        "version": __version__,
        "max_model_len": model["max_model_len"],
        "dp_size": 1,
    }


def test_the_load_of_each_rank(
    client: TestClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = EngineLoad(num_running=2, num_waiting=1, num_pages=8, num_free_pages=6)
    stats = replace(engine.stats(), ranks=(RankLoad(name="a1", load=load),))
    monkeypatch.setattr(engine, "stats", lambda: stats)
    assert client.get("/load").json()["ranks"] == [
        {
            "rank": "a1",
            "num_requests_running": 2,
            "num_requests_waiting": 1,
            "kv_cache_usage": 0.25,
            "num_kv_pages": 8,
        }
    ]


def test_a_chat_is_rendered_and_not_answered(client: TestClient, engine: Any) -> None:
    path = "/v1/chat/completions/render"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    prompt = "<user>hi\n<assistant>"
    assert client.post(path, json=body).json() == {
        "model": "tiny",
        "prompt": prompt,
        "token_ids": engine.tokenizer.encode(prompt),
        "count": len(prompt),
        "max_model_len": 512,
    }
    assert client.post(path, json={**body, "temperature": 9}).status_code == 400
    long = {"messages": [{"role": "user", "content": "a" * 600}]}
    assert client.post(path, json=long).json()["error"]["code"] == "context_length_exceeded"
    shown = client.post(path, json={**long, "truncate_prompt_tokens": 20}).json()
    assert shown["count"] == 20 and shown["prompt"].endswith("a\n<assistant>")
    assert not engine.submitted


def test_prompts_are_rendered(client: TestClient, engine: Any) -> None:
    rendered = client.post("/v1/completions/render", json={"prompt": ["a", "bc"]}).json()
    assert [(entry["prompt"], entry["count"]) for entry in rendered] == [("a", 1), ("bc", 2)]
    (ids,) = client.post("/v1/completions/render", json={"prompt": [64, 65]}).json()
    assert ids["token_ids"] == [64, 65] and not engine.submitted
    assert client.post("/v1/completions/render", json={"prompt": []}).status_code == 400


def test_llm_d_s_token_producer_gets_token_ids(client: TestClient, engine: Any) -> None:
    """The bodies are those that it sends to a vLLM."""
    body: dict[str, Any] = {"model": "tiny", "prompt": "abc"}
    (entry,) = client.post("/v1/completions/render", json=body).json()
    assert entry["token_ids"] == engine.tokenizer.encode("abc")
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "messages": messages, "add_generation_prompt": True}
    answer = client.post("/v1/chat/completions/render", json=body)
    assert answer.json()["token_ids"] == engine.tokenizer.encode("<user>hi\n<assistant>")


def test_the_document_knows_both_forms(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for path in ("/tokenize", "/v1/tokenize"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        names = [each["$ref"].rpartition("/")[2] for each in body["schema"]["anyOf"]]
        required = [document["components"]["schemas"][name]["required"] for name in names]
        assert required == [["prompt"], ["messages"]]
