"""Every bad request gets the envelope, the field and the limit; the engine never sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.http.gate.auth import OPEN_PATHS, is_admin_path
from moe_serve.http.schema.api_error import is_anthropic
from moe_serve.text import stop_strings

MESSAGES = [{"role": "user", "content": "hi"}]
BOTH = ("/v1/chat/completions", "/v1/completions")


def body_for(route: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {"messages": MESSAGES} if "chat" in route else {"prompt": "hi"}
    return {**base, **fields}


def check_envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert isinstance(error["message"], str)
    assert len(error["message"]) < 700
    assert response.headers["x-request-id"]
    return error


@pytest.fixture(scope="module")
def refused(new_client: Callable[[], tuple[TestClient, Any]]) -> Iterator[tuple[TestClient, Any]]:
    """One server for all requests that it must refuse, and its engine, which gets none of them."""
    client, engine = new_client()
    with client:
        yield client, engine
        assert engine.submitted == []


@pytest.fixture
def refusing(refused: tuple[TestClient, Any]) -> TestClient:
    return refused[0]


COMMON = [
    ({"temperature": -3}, "temperature", "[0.0, 2.0]"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": True}, "temperature", "must be a number, got true"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"top_p": 0}, "top_p", "(0.0, 1.0]"),
    ({"top_p": 1.01}, "top_p", "(0.0, 1.0]"),
    ({"top_k": -2}, "top_k", "[-1,"),
    ({"top_k": 1.5}, "top_k", "an integer"),
    ({"min_p": 2}, "min_p", "[0.0, 1.0]"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2.0, 2.0]"),
    ({"frequency_penalty": -3}, "frequency_penalty", "[-2.0, 2.0]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "(0.0, 10.0]"),
    ({"n": 0}, "n", "[1, 128]"),
    ({"n": 129}, "n", "[1, 128]"),
    ({"n": 10**9}, "n", "[1, 128]"),
    ({"n": 10**30}, "n", ""),
    ({"n": "1"}, "n", "an integer"),
    ({"n": True}, "n", "an integer"),
    ({"n": 1.0}, "n", "an integer"),
    ({"best_of": 2}, "best_of", "must equal n"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": -1}, "max_tokens", ""),
    ({"max_tokens": 10**12}, "max_tokens", ""),
    ({"max_tokens": 600}, "max_tokens", "512"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "max_tokens (5)"),
    ({"min_tokens": -1}, "min_tokens", "[0,"),
    ({"seed": 2**63}, "seed", ""),
    ({"cache_salt": ""}, "cache_salt", "must hold 1 to 256 characters, got 0"),
    ({"cache_salt": "s" * 257}, "cache_salt", "must hold 1 to 256 characters, got 257"),
    ({"cache_salt": 5}, "cache_salt", "must be a string"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"stop": ["x"] * 17}, "stop", "0 to 16 strings"),
    ({"stop": [""]}, "stop", "[1, 1024]"),
    ({"stop": ["x" * 1025]}, "stop", "[1, 1024]"),
    ({"stop": [1]}, "stop.0", "a string"),
    ({"stop": {}}, "stop", "a list of strings"),
    ({"stop_token_ids": [257]}, "stop_token_ids", "[0, 256]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ""),
    ({"stop_token_ids": [2**31]}, "stop_token_ids", ""),
    ({"stop_token_ids": ["1"]}, "stop_token_ids.0", "an integer"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "[0, 256]"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "[-100.0, 100.0]"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", "a number"),
    ({"logit_bias": [1]}, "logit_bias", "an object"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"a": 1}}, "stream_options.a", "Unknown"),
    ({"priority": 2**31}, "priority", "less than or equal to 2147483647"),
    ({"priority": -(2**31) - 1}, "priority", "greater than or equal to -2147483648"),
    ({"priority": 2**63}, "priority", ""),
    ({"priority": 0.5}, "priority", "an integer"),
    ({"priority": "1"}, "priority", "an integer"),
    ({"priority": True}, "priority", "an integer"),
    ({"request_id": "a b"}, "request_id", "pattern"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "must be 0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not allowed with stream: true"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
    ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens", "at most 511"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "text", "a": 1}}, "response_format.a", "Unknown"),
    ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar", "send only one"),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", "a string"),
    ({"guided_choice": []}, "guided_choice", "1 to 1024 choices"),
    ({"regex": "x" * 70_000}, "regex", "at most 65536"),
    ({"allowed_token_ids": [257]}, "allowed_token_ids", "[0, 256]"),
    ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids", "0 to 16384 ids"),
    ({"bad_words": [""]}, "bad_words", "[1, 256]"),
    ({"guided_json": 3}, "guided_json", "must be an object"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "must be an object"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    ({"nonsense": 1}, "nonsense", "Unknown parameter"),
    ({"model": "other"}, "model", "'tiny'"),
    ({"model": 7}, "model", "a string"),
]


@pytest.mark.parametrize("route", BOTH)
@pytest.mark.parametrize(("fields", "param", "words"), COMMON, ids=lambda value: str(value)[:40])
def test_bad_fields(
    refused: tuple[TestClient, Any], route: str, fields: dict[str, Any], param: str, words: str
) -> None:
    refusing, engine = refused
    status = 404 if fields.get("model") == "other" else 400
    error = check_envelope(refusing.post(route, json=body_for(route, fields)), status)
    assert error["param"] == param
    assert words in error["message"]
    name = param.partition(".")[0]
    assert name in error["message"].replace("a stop token id", "stop_token_ids")
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [1]}, "messages.0"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "cook", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": "x", "a": 1}]}, "messages.1.a"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]},
            "messages.0.content.0.a",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls.0.function",
        ),
        ({"messages": [MESSAGES[0]] * 5000}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"messages": [{"role": "tool", "content": "x", "tool_calls": []}, 7]}, "messages.1"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_chats(refusing: TestClient, fields: dict[str, Any], param: str) -> None:
    body = body_for("chat", fields)
    assert check_envelope(refusing.post(BOTH[0], json=body), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt.0", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [True]}, "prompt.0", "invalid_type"),
        ({"prompt": ["a", 1]}, "prompt.1", "invalid_type"),
        ({"prompt": [[1], ["a"]]}, "prompt.1", "invalid_type"),
        ({"prompt": [1, 257]}, "prompt", "invalid_value"),
        ({"prompt": [2**63]}, "prompt", "invalid_value"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 100, "n": 2}, "n", "invalid_value"),
        ({"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "context_length_exceeded"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "unsupported_parameter"),
        ({"structural_tag": "{}"}, "structural_tag.structures", "invalid_grammar"),
        (
            {"routed_experts_prompt_start": 0},
            "routed_experts_prompt_start",
            "unsupported_parameter",
        ),
        ({"messages": []}, "messages", "unknown_parameter"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_completions(
    refused: tuple[TestClient, Any], fields: dict[str, Any], param: str, code: str
) -> None:
    refusing, engine = refused
    error = check_envelope(refusing.post(BOTH[1], json={"prompt": "hi", **fields}), 400)
    assert (error["param"], error["code"]) == (param, code)
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        (0, {"messages": []}, "messages must hold 1 to 4096 messages, got 0."),
        (0, {"messages": None}, "messages must be a list, got null."),
        (0, {"messages": [None]}, "messages.0 must be an object, got null."),
        (
            0,
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.content must be a string or a list of parts, got null.",
        ),
        (
            0,
            {"messages": [{"role": "user", "content": [{"type": None}]}]},
            'messages.0.content.0 must be {"type": "text", "text": a string}, '
            "as only text is served.",
        ),
        (
            0,
            {"messages": [{"role": "cook", "content": "x"}]},
            "messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool', "
            'got "cook".',
        ),
        (1, {"stream_options": 7}, "stream_options must be an object, got 7."),
        (
            1,
            {"prompt": None},
            "prompt must be a string, a list of strings, a list of token ids, "
            "or a list of lists of token ids.",
        ),
        (
            1,
            {"min_tokens": 30},
            "min_tokens (30) must not exceed max_tokens, which is 16 by default for this prompt.",
        ),
        (
            1,
            {"min_tokens": 3, "echo": True, "max_tokens": 0},
            "min_tokens (3) must not exceed max_tokens (0).",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_messages_speak_json(
    refusing: TestClient, route: int, fields: dict[str, Any], message: str
) -> None:
    response = refusing.post(BOTH[route], json=body_for(BOTH[route], fields))
    assert check_envelope(response, 400)["message"] == message


HOSTILE = "a\x1b[2J\x07\x9b31m\u202eb"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "model": HOSTILE}),
        ("/v1/completions", {"prompt": "a", HOSTILE: 1}),
        ("/v1/chat/completions", {"messages": [{"role": HOSTILE, "content": "a"}]}),
        ("/v1/responses", {"input": "a", "include": [HOSTILE]}),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "tool_choice": {"type": HOSTILE}}),
        ("/tokenize", {"prompt": "a", HOSTILE: 1}),
    ],
)
def test_errors_cannot_steer_the_terminal_that_shows_them(
    refusing: TestClient, path: str, body: dict[str, Any]
) -> None:
    response = refusing.post(path, json=body)
    assert response.status_code in (400, 404), response.text
    message = response.json()["error"]["message"]
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(message), repr(message)


@pytest.mark.parametrize("raw", [b"", b" \n"])
def test_an_empty_body_is_called_empty(refusing: TestClient, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    error = check_envelope(refusing.post(BOTH[0], content=raw, headers=headers), 400)
    assert error["message"] == "The body is empty: send a JSON object."


def test_missing_fields(refusing: TestClient) -> None:
    for route, param in zip(BOTH, ("messages", "prompt"), strict=True):
        error = check_envelope(refusing.post(route, json={}), 400)
        assert (error["param"], error["code"]) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","temperature":1e400}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:30]),
)
@pytest.mark.parametrize("route", BOTH)
def test_bad_json(refusing: TestClient, route: str, raw: bytes) -> None:
    response = refusing.post(route, content=raw, headers={"content-type": "application/json"})
    check_envelope(response, 400)


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data", ""])
def test_content_type(refusing: TestClient, content_type: str) -> None:
    headers = {"content-type": content_type}
    response = refusing.post(BOTH[0], content=b"{}", headers=headers)
    assert check_envelope(response, 415)["code"] == "unsupported_media_type"


def test_body_limit_by_header_and_by_counting(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(max_body_bytes=1000))
    headers = {"content-type": "application/json"}

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    for content in (b" " * 1001, chunks()):
        error = check_envelope(client.post(BOTH[1], content=content, headers=headers), 413)
        assert "1000 bytes" in error["message"]
    lying = {**headers, "content-length": "10"}
    error = check_envelope(client.post(BOTH[1], content=chunks(), headers=lying), 413)
    assert error["code"] == "body_too_large"
    padded = json.dumps({"prompt": "hi"}).encode().ljust(1000)
    assert client.post(BOTH[1], content=padded, headers=headers).status_code == 200


def test_unknown_route_method_and_model(client: TestClient) -> None:
    assert check_envelope(client.get("/v2/nothing"), 404)["code"] == "route_not_found"
    response = client.get(BOTH[0])
    assert check_envelope(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error = check_envelope(client.get("/v1/models/other/name"), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]


def test_models(client: TestClient) -> None:
    entry = client.get("/v1/models/tiny").json()
    assert entry["id"] == "tiny"
    assert entry["max_model_len"] == 512
    assert client.get("/v1/models").json() == {"object": "list", "data": [entry]}


@pytest.mark.parametrize("route", BOTH)
def test_overload_and_drain(client: TestClient, engine: Any, route: str) -> None:
    engine.max_requests = 0
    response = client.post(route, json=body_for(route, {"stream": True}))
    error = check_envelope(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "server_overloaded")
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-should-retry"] == "true"
    engine.is_draining = True
    response = client.post(route, json=body_for(route, {}))
    assert check_envelope(response, 503)["code"] == "server_draining"
    assert response.headers["retry-after"] == "2"
    engine.is_alive = False
    assert (
        check_envelope(client.post(route, json=body_for(route, {})), 503)["code"] == "engine_dead"
    )


@pytest.mark.parametrize("route", BOTH)
def test_engine_error_shows_no_internals(client: TestClient, engine: Any, route: str) -> None:
    engine.error_after = 2
    response = client.post(route, json=body_for(route, {}))
    assert check_envelope(response, 500)["code"] == "generation_failed"
    assert "secret" not in response.text
    text = client.post(route, json=body_for(route, {"stream": True, "n": 2})).text
    *_, error_event, done, rest = text.split("\n\n")
    assert json.loads(error_event.removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert (done, rest) == ("data: [DONE]", "")
    assert "secret" not in text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_death_of_the_engine_is_told(client: TestClient, engine: Any, is_stream: bool) -> None:
    """Each of its sequences ends with an error that does not blame the request."""

    def die(_: object) -> str:
        engine.is_alive, engine.error_after = False, 0
        return "x"

    engine.script = die
    response = client.post(BOTH[1], json={"prompt": "hi", "stream": is_stream})
    if is_stream:
        error = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))["error"]
    else:
        error = check_envelope(response, 503)
        assert response.headers["retry-after"]
    assert error["code"] == "engine_dead"


@pytest.mark.parametrize("n", [1, 8])
def test_stop_tables_are_built_once_per_request(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    built: list[str] = []
    real = stop_strings._fallback_table
    monkeypatch.setattr(
        stop_strings, "_fallback_table", lambda stop: built.append(stop) or real(stop)
    )
    body = {"prompt": "hi", "stop": ["lo", "xyz"], "n": n}
    choices = client.post(BOTH[1], json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hel"] * n
    assert sorted(built) == ["lo", "xyz"]


def test_a_bug_is_a_bare_500(make_app: Callable[..., FastAPI], engine: Any) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret internals")

    engine.submit = fail
    response = TestClient(make_app()).post(BOTH[1], json={"prompt": "hi"})
    assert check_envelope(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text


def test_lenient_mode_lists_unknown_fields(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(is_strict=False))
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part], "extra": 1}]
    body = {"messages": messages, "nonsense": 1, "bad\r\nname: x": 2, "ü": 3}
    response = client.post(BOTH[0], json=body)
    assert response.status_code == 200
    names = "?, messages.0.content.0.cache_control, messages.0.extra, nonsense"
    assert response.headers["x-ignored-parameters"] == names
    for name in ("audio", "documents"):  # they would change the answer
        refused = client.post(BOTH[0], json={"messages": MESSAGES, name: "{}"})
        assert check_envelope(refused, 400)["code"] == "unsupported_parameter"


def test_every_route_needs_the_key(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(api_keys=("one", "zwei-ü"))
    client = TestClient(app)
    paths = sorted(app.openapi()["paths"]) + [
        route.path for route in app.routes if _has_path(route)
    ]
    assert {"/v1/models", "/metrics", "/openapi.json", *BOTH, *OPEN_PATHS} <= set(paths)
    for path in {*paths, "/unknown", "/health/live/", "/health"}:
        for method in ("GET", "POST", "DELETE"):
            response = client.request(method, path)
            if path in OPEN_PATHS:
                assert response.status_code in (200, 405)
                continue
            if is_admin_path(path):  # has keys of its own; this server has none
                assert check_envelope(response, 403)["code"] == "admin_disabled", path
                continue
            if is_anthropic(path):  # errors as that API has them
                assert response.status_code == 401
                assert response.json()["error"]["details"]["error_code"] == "invalid_api_key"
            else:
                assert check_envelope(response, 401)["code"] == "invalid_api_key", path
            assert response.headers["www-authenticate"] == "Bearer"
    for value in ("Bearer wrong", "Bearer one2", "Bearer", "Basic one", "one", "Bearer \xff"):
        headers = {"authorization": value.encode("latin-1")}
        assert client.get("/v1/models", headers=headers).status_code == 401
    for key in ("one", "zwei-ü"):
        headers = {"authorization": b"bearer " + key.encode()}
        assert client.get("/v1/models", headers=headers).status_code == 200


def _has_path(route: object) -> bool:
    return isinstance(getattr(route, "path", None), str)


def test_request_ids(client: TestClient, engine: Any) -> None:
    for given, is_echoed in (("abc-1", True), ("x" * 129, False), ("a\x7fb", False), ("", False)):
        response = client.post(BOTH[1], json={"prompt": "hi"}, headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is is_echoed
    ids = [request.request_id for request in engine.submitted]
    assert len(set(ids)) == 4
    assert all(request_id.startswith("cmpl-") for request_id in ids)
