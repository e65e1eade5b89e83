"""Tags in the answers of the demonstration model, whose free text soon contains a trigger."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, ServerConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import build_engine
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "e<weather>", "schema": SCHEMA, "end": "</weather>"},
        {"begin": "e<time>", "schema": {"type": "array", "maxItems": 0}, "end": "</time>"},
    ],
    "triggers": ["e"],
}
JSON = r'\{\s*"city"\s*:\s*"(Rome|Paris)"\s*,\s*"days"\s*:\s*(true|false)\s*\}'
TAG = rf"e(<weather>{JSON}</weather>|<time>\[\s*\]</time>)"
WHOLE = rf"[^e]*({TAG}[^e]*)*"


@pytest.fixture(scope="module")
def served(serve_live: Any) -> Iterator[httpx.Client]:
    folder = demo_model_folder()
    config = EngineConfig(model=ModelConfig(path=str(folder)), cache=CacheConfig(num_pages=256))
    built = build_engine(config)
    engine = AsyncEngine(built, config.scheduler)
    model = ServedModel(
        name="demo",
        tokenizer=Tokenizer.load(folder),
        chat_template=ChatTemplate(TEMPLATE),
        created=0,
        max_model_len=engine.max_model_len,
    )
    app = create_app(engine, model, ServerConfig(), grammars=built.grammars)
    with serve_live(app, engine) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        yield client
    app.state.gate.close()
    engine.close()


def post(served: httpx.Client, route: str, **fields: Any) -> Any:
    text = "Once upon a time"
    chat = {"messages": [{"role": "user", "content": text}]}
    content = chat if route == CHAT else {"prompt": text}
    fields = {"max_tokens": 150, "temperature": 1, "seed": 3, "response_format": TAGS, **fields}
    response = served.post(route, json={**content, **fields})
    assert response.status_code == 200, response.text
    return response


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.sampled
@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("temperature", [0, 1])
def test_text_and_tags_take_turns(served: httpx.Client, route: str, temperature: int) -> None:
    choices = post(served, route, n=4, temperature=temperature).json()["choices"]
    for choice in choices:
        assert re.search(TAG, text_of(choice))
        _, trigger, cut = re.sub(TAG, "", text_of(choice)).partition("e")
        if trigger:  # the last tag is open, which only max_tokens can do
            assert choice["finish_reason"] == "length" and text_of(choice).endswith("e" + cut)
            heads = ("<weather>", "<time>")
            assert any(cut.startswith(head) or head.startswith(cut) for head in heads), choice


def test_a_stream_has_the_same(served: httpx.Client) -> None:
    (whole,) = post(served, CHAT, logprobs=True).json()["choices"]
    response = post(served, CHAT, logprobs=True, stream=True)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    choices = [event["choices"][0] for event in events if event["choices"]]
    parts = [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(parts) == whole["message"]["content"]
    logprobs = [entry for c in choices for entry in (c["logprobs"] or {}).get("content", [])]
    assert logprobs == whole["logprobs"]["content"]


def test_every_spelling_is_the_same(served: httpx.Client) -> None:
    tags = [
        {"begin": s["begin"], "content": {"type": "json_schema", "json_schema": s["schema"]},
         "end": s["end"]}
        for s in TAGS["structures"]  # type: ignore[attr-defined]
    ]  # fmt: skip
    form = {"type": "triggered_tags", "tags": tags, "triggers": TAGS["triggers"]}
    wishes: list[dict[str, Any]] = [
        {},
        {"response_format": {"type": "structural_tag", "format": form}},
        {"response_format": None, "structured_outputs": {"structural_tag": json.dumps(TAGS)}},
    ]
    found = [text_of(post(served, TEXT, **wish).json()["choices"][0]) for wish in wishes]
    assert len({*found}) == 1


def test_a_stop_string_ends_it_anywhere(served: httpx.Client) -> None:
    (choice,) = post(served, TEXT, stop=['"city'], n=1).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == '"city'
    assert re.fullmatch(rf"{WHOLE}e<weather>\{{\s*", choice["text"])


def test_a_special_token_begins_a_tag_and_is_seen(served: httpx.Client) -> None:
    """The token's id is likely, and the request gives its text. Free text holds no special
    token."""
    name, special_id = "<|im_start|>", 1
    tag = {"begin": f"{name}ask", "schema": SCHEMA, "end": "."}
    form = {"type": "structural_tag", "structures": [tag], "triggers": [name]}
    wish = {"response_format": form, "logit_bias": {str(special_id): 100}, "max_tokens": 60}
    for route in (CHAT, TEXT):
        answer = post(served, route, **wish, return_token_ids=True)
        (choice,) = answer.json()["choices"]
        assert special_id in choice["token_ids"]
        assert re.match(rf"[^<]*{re.escape(name)}ask{JSON}\.", text_of(choice)), choice
