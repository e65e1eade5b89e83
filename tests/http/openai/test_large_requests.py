"""Large requests are refused by their size, before their items take time on the event loop."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation import respond
from moe_serve.http.openai import answers as answer
from moe_serve.http.openai.bodies import ChatBody, CompletionBody
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import parse_json_object

MANY = 500_000
USER = {"role": "user", "content": "a"}

LONG = "x" * 5000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LONG}}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}


def names(count: int = MANY) -> dict[str, Any]:
    return dict.fromkeys(map(str, range(count)), [])  # one list: many would take seconds


# What fits into a body of 4 MiB: the fields, the one that is blamed, and why. Made when they are
# needed: millions of objects slow every other test of the process down.
BODIES: dict[str, tuple[Callable[[], dict[str, Any]], str | None, str]] = {
    "stop": (lambda: {"stop": [1] * 4 * MANY}, "stop", "0 to 16 strings, got 2000000"),
    "ids": (
        lambda: {"stop_token_ids": [[]] * 2 * MANY},
        "stop_token_ids",
        "0 to 128 ids, got 1000000",
    ),
    "biases": (lambda: {"logit_bias": names()}, "logit_bias", "0 to 1024 entries, got 500000"),
    "fields": (lambda: names(MANY - 1), None, "0 to 256 fields, got 500000"),
    "options": (
        lambda: {"stream_options": names()},
        "stream_options",
        "0 to 256 fields, got 500000",
    ),
    "messages": (
        lambda: {"messages": [{}] * 2 * MANY},
        "messages",
        "1 to 4096 messages, got 1000000",
    ),
    "bad messages": (
        lambda: {"messages": [names(256)] * 4096},
        "messages.0.role",
        "is missing",
    ),
    "a message": (
        lambda: {"messages": [{**USER, **names(MANY - 2)}]},
        "messages.0",
        "0 to 256 fields, got 500000",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_sizes_are_checked_before_items(name: str) -> None:
    make, param, words = BODIES[name]
    fields = make()
    start = time.thread_time()
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatBody, {"messages": [USER], **fields})
    assert time.thread_time() - start < 0.3, "this blocks the event loop"
    assert caught.value.param == param
    assert words in str(caught.value)


def test_garbage_is_not_looked_for_while_parsing() -> None:
    raw = b'{"stop":[' + b",".join([b"[]"] * MANY) + b"]}"
    collections: list[str] = []

    def note(phase: str, _: object) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        value = parse_json_object(raw)
        during = list(collections)
    finally:
        gc.callbacks.remove(note)
    assert len(during) <= 4  # one, as soon as it is on again; else hundreds
    assert len(value["stop"]) == MANY
    assert gc.isenabled()


def test_the_largest_lists_that_are_allowed() -> None:
    body = {
        "prompt": "a",
        "stop": ["x"] * 16,
        "stop_token_ids": [1] * 128,
        "logit_bias": {str(i): 1 for i in range(1024)},
    }
    params = parse_body(CompletionBody, body).options().params
    assert len(params.stop_token_ids) == 128
    assert len(params.logit_bias) == 1024


@pytest.mark.parametrize("prompt", [[1] * 1_000_000, [[1], ["a"] * 1_000_000], "a" * 1_000_000])
def test_long_prompts_are_refused_unread(client: TestClient, engine: Any, prompt: Any) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenized in spite of its length")

    engine.tokenizer.encode = encode
    response = client.post("/v1/completions", json={"prompt": prompt})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "512 tokens" in error["message"]


def test_long_chats_are_refused_unread(client: TestClient) -> None:
    messages = [{"role": "user", "content": "a" * 10_000}]
    error = client.post("/v1/chat/completions", json={"messages": messages}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "at least 1432 tokens" in error["message"]  # <|end|>, the longest token, has 7 bytes


def test_one_place_is_kept_for_the_next_token(client: TestClient) -> None:
    body = {"echo": True, "max_tokens": 0}
    fitting = client.post("/v1/completions", json={**body, "prompt": [1] * 511})
    assert fitting.status_code == 200
    error = client.post("/v1/completions", json={**body, "prompt": [1] * 512}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "(also with max_tokens 0): send at most 511" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_many_logprobs_are_written_off_the_event_loop(
    client: TestClient, engine: Any, monkeypatch: Any, route: str, is_stream: bool
) -> None:
    """32 choices x 40 tokens x (2 + 1) numbers; small answers stay on the loop."""
    loop_threads, writers = set(), set()
    real_submit, real_token_text = engine.submit, engine.tokenizer.token_text

    def submit(requests: Any) -> Any:
        loop_threads.add(threading.get_ident())
        return real_submit(requests)

    def token_text(token: int) -> str:
        writers.add(threading.get_ident())
        return str(real_token_text(token))

    engine.script = lambda request: "x" * 40
    engine.submit, engine.tokenizer.token_text = submit, token_text
    if is_stream:  # a reader that is behind gets all at once
        monkeypatch.setattr(respond, "MAX_INLINE_LOGPROBS", 10)
    is_chat = "chat" in route
    prompt = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    logprobs = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    body = {**prompt, **logprobs, "max_tokens": 40, "n": 32, "stream": is_stream}
    assert client.post(route, json=body).status_code == 200
    assert writers.isdisjoint(loop_threads)
    writers.clear()
    monkeypatch.undo()
    client.post(route, json={**body, "n": 1, "max_tokens": 2, "stream": False})
    assert writers == loop_threads
    assert answer.MAX_INLINE_LOGPROBS == respond.MAX_INLINE_LOGPROBS


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": LONG}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [{"role": "user", "content": LONG}]},
    ],
    ids=["reasoning", "arguments", "tools", "content"],
)
def test_long_chats_are_tokenized_off_the_event_loop(
    start_served: Any, fields: dict[str, Any]
) -> None:
    """The long text may be anywhere in the request."""
    template = "{% for m in messages %}{{ m }}{% endfor %}{{ tools }}<tool_call>"
    client, engine = start_served(template)
    encoders, loops = [], []
    real_submit, real_encode = engine.submit, engine.tokenizer.encode

    def encode(*arguments: Any, **options: Any) -> Any:
        encoders.append(threading.get_ident())
        return real_encode(*arguments, **options)

    def submit(requests: Any) -> Any:
        loops.append(threading.get_ident())
        return real_submit(requests)

    engine.submit, engine.tokenizer.encode = submit, encode
    body = {**fields, "max_tokens": 1, "truncate_prompt_tokens": 8}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert encoders[0] != loops[0]
