"""tool_choice on the demonstration model, which cannot call by itself: the official client, the
real engine, the model's own format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from moe_serve.config.sections import CacheConfig, EngineConfig, ServerConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import build_engine
from moe_serve.engine.opened_model import model_folder
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def demo(serve_live: Any) -> Iterator[openai.OpenAI]:
    config = EngineConfig(cache=CacheConfig(num_pages=256))
    folder = model_folder(config.model)
    tokenizer = Tokenizer.load(folder)
    built = build_engine(config)
    engine = AsyncEngine(built, config.scheduler)
    model = ServedModel(
        name="demo",
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens),
        created=0,
        max_model_len=engine.max_model_len,
    )
    app = create_app(engine, model, ServerConfig(), grammars=built.grammars)
    with (
        serve_live(app, engine) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client
    app.state.gate.close()
    engine.close()


def ask(demo: openai.OpenAI, **fields: Any) -> Any:
    return demo.chat.completions.create(
        model="demo", messages=ASK, tools=TOOLS, max_tokens=300, seed=1, **fields
    )


def check(call: Any) -> None:
    arguments = json.loads(call.arguments)
    if call.name == "get_weather":
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("C", "F")
        assert len(arguments["city"]) <= 12
    else:
        assert (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_named_function_is_called(demo: openai.OpenAI, temperature: float) -> None:
    choice = ask(demo, tool_choice=NAMED, temperature=temperature).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    check(call.function)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None


def test_some_function_is_called_and_the_result_goes_back(demo: openai.OpenAI) -> None:
    answer = ask(demo, tool_choice="required", parallel_tool_calls=False, temperature=1)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    check(call.function)
    more = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}]
    after = demo.chat.completions.create(model="demo", messages=more, tools=TOOLS, max_tokens=4)
    assert after.usage is not None
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_choice_among_allowed_tools_is_as_if_only_these_were_sent(demo: openai.OpenAI) -> None:
    allowed: Any = {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "now"}}],
    }
    fields: Any = {"model": "demo", "messages": ASK, "temperature": 0, "max_tokens": 300}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    found = demo.chat.completions.create(**fields, tools=TOOLS, tool_choice=choice)
    alone = demo.chat.completions.create(**fields, tools=TOOLS[1:], tool_choice="required")
    calls = [call.function for call in found.choices[0].message.tool_calls or []]
    assert calls and {call.name for call in calls} == {"now"}
    assert calls == [call.function for call in alone.choices[0].message.tool_calls or []]
    assert found.usage is not None and alone.usage is not None
    assert found.usage.prompt_tokens == alone.usage.prompt_tokens


def test_a_stream_has_the_same_call(demo: openai.OpenAI) -> None:
    whole = ask(demo, tool_choice=NAMED, temperature=0).choices[0].message.tool_calls[0].function
    deltas = [
        call
        for chunk in ask(demo, tool_choice=NAMED, temperature=0, stream=True)
        for call in (chunk.choices[0].delta.tool_calls or [])
    ]
    assert [delta.function.name for delta in deltas if delta.id] == ["get_weather"]
    assert "".join(delta.function.arguments for delta in deltas) == whole.arguments


def test_a_schema_that_cannot_be_compiled(demo: openai.OpenAI) -> None:
    broken = {"type": "object", "properties": {"a": {"$ref": "#/nope"}}, "required": ["a"]}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": broken}}
    with pytest.raises(openai.BadRequestError, match="/nope") as caught:
        demo.chat.completions.create(
            model="demo", messages=ASK, tools=[tool], tool_choice="required"
        )
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_grammar")


@pytest.mark.parametrize("num_tokens", [4, 8, 12, 17, 24])
def test_a_call_that_max_tokens_cuts(demo: openai.OpenAI, num_tokens: int) -> None:
    """None of its markup is content, and no arguments are made up."""
    fields: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    fields |= {"model": "demo", "max_tokens": num_tokens}
    whole = ask(demo, tool_choice=NAMED, temperature=0).choices[0].message.tool_calls[0].function
    choice = demo.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "length" and not choice.message.content
    found = [call.function.arguments for call in choice.message.tool_calls or ()]
    assert len(found) <= 1 and all(whole.arguments.startswith(text) for text in found)
    chunks = [chunk.choices[0] for chunk in demo.chat.completions.create(**fields, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert "".join(delta.function.arguments for delta in deltas) == "".join(found)
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "length"


def test_a_tool_whose_schema_cannot_be_kept_is_named(demo: openai.OpenAI) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags}}
    tools: Any = [*TOOLS, {"type": "function", "function": {"name": "tag", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError) as caught:
        demo.chat.completions.create(
            model="demo", messages=ASK, tools=tools, tool_choice="required", max_tokens=4
        )
    assert "'tag'" in str(caught.value) and "#/properties/tags" in str(caught.value)
    assert caught.value.param == "tools"
    demo.chat.completions.create(model="demo", messages=ASK, tools=tools, max_tokens=4)
