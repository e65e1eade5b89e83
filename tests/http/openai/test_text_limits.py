"""Long texts, hostile templates and a tokenizer that crashes: each gets one answer."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ServerOverloadedError
from moe_serve.http.app import create_app
from moe_serve.http.generation import served_model
from moe_serve.http.generation.served_model import ServedModel, TextThreads
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

HUGE = "a" * 4_100_000
GO = {"messages": [{"role": "user", "content": "go"}]}
HOSTILE = "{% if messages[0].content == 'go' %}{{ lipsum(n=10**8) }}{% endif %}fine"
TEXT_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": HUGE},
    "/v1/completions/render": {"prompt": HUGE},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": HUGE}]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": HUGE}]},
    "/tokenize": {"prompt": HUGE},
    "/v1/messages": {"messages": [{"role": "user", "content": HUGE}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": HUGE}]},
    "/v1/responses": {"input": HUGE},
}
CHAT_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": GO,
    "/v1/chat/completions/render": GO,
    "/tokenize": GO,
    "/v1/messages": {**GO, "max_tokens": 1},
    "/v1/messages/count_tokens": GO,
    "/v1/responses": {"input": "go"},
}


@pytest.mark.parametrize(
    ("route", "limit"),
    [*((route, None) for route in TEXT_ROUTES), *((r, 10) for r in TEXT_ROUTES if "compl" in r)],
)
def test_a_text_that_cannot_fit_is_not_tokenized(
    client: TestClient, engine: Any, route: str, limit: int | None
) -> None:
    """With truncate_prompt_tokens such a text was tokenized once, and held the interpreter for 5.5
    s."""
    longest = 0
    real_encode = engine.tokenizer.encode

    def encode(text: str, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return real_encode(text, **options)

    engine.tokenizer.encode = encode
    body = {**TEXT_ROUTES[route], **({"truncate_prompt_tokens": limit} if limit else {})}
    answer = client.post(route, json=body)
    assert answer.status_code == 400
    told = ("context of this model is 512 tokens", "length is 512 tokens", "tokens > 511 maximum")
    assert any(words in answer.text for words in told), answer.text
    assert longest < 1000


def test_prompts_of_a_list_are_bounded_each(client: TestClient) -> None:
    body = {"prompt": ["a", "a" * 300_000], "truncate_prompt_tokens": 4}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "prompt.1"
    assert (
        "at most 262144 bytes are tokenized, also with truncate_prompt_tokens" in error["message"]
    )


def test_a_long_text_is_cut_as_before(client: TestClient, engine: Any) -> None:
    body = {"prompt": "b" + "a" * 100_000 + "c", "truncate_prompt_tokens": 3, "max_tokens": 1}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids) == "aac"


def test_a_tokenizer_without_a_bound_has_a_usual_one() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"abcd": 0, "?": 1}, unk_token="?"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.min_num_tokens("a" * 1000) == 0
    assert tokenizer.usual_bytes_per_token == 16


def test_each_size_has_threads_of_its_own() -> None:
    """A short text does not wait for a giant one, and giant texts are tokenized one at a time."""
    texts, go_on, running = TextThreads(), threading.Event(), []

    def giant() -> str:
        running.append(1)
        assert go_on.wait(60)
        running.pop()
        return f"giant beside {len(running)}"

    async def ask() -> list[str]:
        giants = [asyncio.ensure_future(texts.run(giant, 4_000_000)) for _ in range(3)]
        others = [await texts.run(lambda: "other", size) for size in (10, 5000, 70_000)]
        go_on.set()
        return [*others, *await asyncio.gather(*giants)]

    assert asyncio.run(ask()) == ["other"] * 3 + ["giant beside 0"] * 3


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model, "_MAX_WAITING_CHARS", 10_000)
    texts, go_on = TextThreads(), threading.Event()

    async def ask() -> bool:
        first = asyncio.ensure_future(texts.run(lambda: go_on.wait(60), 9000))
        await asyncio.sleep(0)
        with pytest.raises(ServerOverloadedError, match="9000 characters are waiting"):
            await texts.run(lambda: True, 5000)
        go_on.set()
        assert await first
        return await texts.run(lambda: True, 20_000)  # alone, however long

    assert asyncio.run(ask())


@pytest.fixture
def hostile_client(engine: Any, model: ServedModel) -> Any:
    template = ChatTemplate(HOSTILE, max_seconds=0.1)
    app: FastAPI = create_app(engine, replace(model, chat_template=template), ServerConfig())
    with TestClient(app) as client:
        yield client
    template.close()


def test_a_hostile_template_on_every_route(hostile_client: TestClient) -> None:
    for route, body in CHAT_ROUTES.items():
        answer = hostile_client.post(route, json=body)
        assert answer.status_code == 400, f"{route}: {answer.text}"
        assert "Rendering the chat took longer than 0.1 s." in answer.text
        fine = json.loads(json.dumps(body).replace('"go"', '"x"'))
        assert hostile_client.post(route, json=fine).status_code == 200


@pytest.fixture
def broken(tmp_path: Any) -> Tokenizer:
    """Makes the tokenizer's library panic: its post-processor names a missing token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    content = json.loads(backend.to_str())
    pieces = [
        {"SpecialToken": {"id": "gone", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


@pytest.mark.parametrize("length", [5, 20_000])
def test_a_panic_of_the_tokenizer_is_one_error(
    engine: Any,
    model: ServedModel,
    broken: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    length: int,
) -> None:
    """A panic once gave a plain 500 and 330 lines of log."""
    app = create_app(engine, replace(model, tokenizer=broken), ServerConfig())
    with TestClient(app) as client, caplog.at_level(logging.WARNING):
        body = {"prompt": "a" * length, "truncate_prompt_tokens": 5}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert error["code"] == "tokenizer_failed" and error["type"] == "server_error"
        assert f"fails on a text of {length} characters" in error["message"]
        (record,) = caplog.records
        assert "panicked" in record.getMessage() and record.exc_info is None
        assert client.get("/health/live").status_code == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_truncation_side(client: TestClient, engine: Any, route: str) -> None:
    """ "right" keeps the first tokens, "left" or no value the last, as in vLLM."""
    prompt = "<user>hi\n<assistant>"
    is_chat = "chat" in route
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    base = {**(base if is_chat else {"prompt": prompt}), "max_tokens": 1}
    for side, kept in (("right", prompt[:7]), ("left", prompt[-7:]), (None, prompt[-7:])):
        body = {**base, "truncate_prompt_tokens": 7, "truncation_side": side}
        assert client.post(route, json=body).status_code == 200
        assert engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids) == kept
        shown = client.post(f"{route}/render", json=body).json()
        assert (shown if is_chat else shown[0])["prompt"] == kept
    alone = client.post(route, json={**base, "truncation_side": "right"})
    assert alone.headers["X-Ignored-Parameters"] == "truncation_side"
    assert engine.tokenizer.decode(engine.submitted[-1].prompt_token_ids) == prompt
    error = client.post(route, json={**base, "truncation_side": "middle"}).json()["error"]
    assert error["param"] == "truncation_side"
    assert "'left' or 'right'" in error["message"]
