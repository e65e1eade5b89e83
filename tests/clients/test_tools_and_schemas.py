"""Forced tool calls and answers by a schema, through every client.

The demonstration model would not call a tool by itself, so a grammar makes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

MODEL = "moe-serve-demo"
CITIES = ("Paris", "Rome")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}  # which this version of the client has no argument for
ASK = "What is the weather like in Paris today?"


class CalendarEvent(BaseModel):
    """Every answer is short, so that none is cut off."""

    day: Literal["Friday", "Saturday"]
    place: Literal["fair", "museum"]


class GetWeather(BaseModel):
    """Get the current weather in a given city"""

    city: Literal["Paris", "Rome"]


@pytest.fixture
def openai_client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def anthropic_client(server_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server_url, api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


class TestOpenAI:
    def test_a_required_call_and_its_result_in_a_chat(self, openai_client: openai.OpenAI) -> None:
        function: Any = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
        tools: Any = [{"type": "function", "function": function}]
        messages: list[Any] = [{"role": "user", "content": ASK}]
        create = openai_client.chat.completions.create
        choice = create(
            model=MODEL,
            temperature=0,
            messages=messages,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
        ).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in CITIES
        messages += [
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": "14 degrees"},
        ]
        after = create(
            model=MODEL, temperature=0, messages=messages, tools=tools, max_completion_tokens=8
        )
        assert after.choices[0].message.role == "assistant"

    def test_a_parsed_chat(self, openai_client: openai.OpenAI) -> None:
        completion = openai_client.chat.completions.parse(
            model=MODEL,
            temperature=0,
            messages=[
                {"role": "system", "content": "Extract the event information."},
                {"role": "user", "content": "Alice and Bob are going to a fair on Friday."},
            ],
            response_format=CalendarEvent,
        )
        assert isinstance(completion.choices[0].message.parsed, CalendarEvent)

    def test_a_required_call_and_its_result_in_responses(
        self, openai_client: openai.OpenAI
    ) -> None:
        tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
        tool["strict"] = True
        response = openai_client.responses.create(
            model=MODEL,
            temperature=0,
            input=ASK,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        (call,) = response.output
        assert call.type == "function_call" and json.loads(call.arguments)["city"] in CITIES
        result: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "14 degrees",
        }
        after = openai_client.responses.create(
            model=MODEL,
            temperature=0,
            previous_response_id=response.id,
            input=[result],
            tools=[tool],
            max_output_tokens=8,
        )
        assert after.output and after.previous_response_id == response.id

    def test_a_streamed_call_in_responses(self, openai_client: openai.OpenAI) -> None:
        tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
        tool["strict"] = True
        choice: Any = {"type": "function", "name": "get_weather"}
        with openai_client.responses.stream(
            model=MODEL, temperature=0, input=ASK, tools=[tool], tool_choice=choice
        ) as stream:
            text = "".join(
                event.delta
                for event in stream
                if event.type == "response.function_call_arguments.delta"
            )
            (call,) = stream.get_final_response().output
        assert call.type == "function_call" and call.arguments == text
        assert json.loads(text)["city"] in CITIES

    def test_parsed_responses(self, openai_client: openai.OpenAI) -> None:
        response = openai_client.responses.parse(
            model=MODEL, temperature=0, input="A fair on Friday.", text_format=CalendarEvent
        )
        assert isinstance(response.output_parsed, CalendarEvent)


class TestAnthropic:
    def test_any_tool_and_its_result(self, anthropic_client: anthropic.Anthropic) -> None:
        tools: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
        user: Any = {"role": "user", "content": ASK}
        message = anthropic_client.messages.create(
            model=MODEL,
            max_tokens=500,
            extra_body=GREEDY,
            tools=tools,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            messages=[user],
        )
        (call,) = message.content
        assert message.stop_reason == "tool_use" and call.type == "tool_use"
        assert call.name == "get_weather" and call.input["city"] in CITIES
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "14 degrees"}
        after = anthropic_client.messages.create(
            model=MODEL,
            max_tokens=8,
            tools=tools,
            messages=[user, message.to_param(), {"role": "user", "content": [result]}],
        )
        assert after.role == "assistant"

    def test_a_streamed_call(self, anthropic_client: anthropic.Anthropic) -> None:
        with anthropic_client.messages.stream(
            model=MODEL,
            max_tokens=500,
            extra_body=GREEDY,
            tools=[{"name": "get_weather", "input_schema": PARAMETERS}],  # type: ignore[typeddict-item]
            tool_choice={"type": "tool", "name": "get_weather"},
            messages=[{"role": "user", "content": ASK}],
        ) as stream:
            (call,) = stream.get_final_message().content
        assert call.type == "tool_use"
        assert isinstance(call.input, dict) and call.input["city"] in CITIES

    def test_a_parsed_message(self, anthropic_client: anthropic.Anthropic) -> None:
        message = anthropic_client.messages.parse(
            model=MODEL,
            max_tokens=500,
            extra_body=GREEDY,
            messages=[{"role": "user", "content": "A fair on Friday."}],
            output_format=CalendarEvent,
        )
        assert isinstance(message.parsed_output, CalendarEvent)

    def test_the_answer_goes_on_where_the_conversation_ends(
        self, anthropic_client: anthropic.Anthropic
    ) -> None:
        messages: list[Any] = [{"role": "user", "content": "Count:"}]
        whole = anthropic_client.messages.count_tokens(model=MODEL, messages=messages)
        messages.append({"role": "assistant", "content": "1, 2, 3,"})
        begun = anthropic_client.messages.count_tokens(model=MODEL, messages=messages)
        assert begun.input_tokens > whole.input_tokens
        message = anthropic_client.messages.create(model=MODEL, max_tokens=4, messages=messages)
        assert message.content[0].type == "text"


class TestLangChain:
    @pytest.fixture
    def llm(self, base_url: str, http_client: httpx.Client) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=base_url,
            api_key="none",  # type: ignore[arg-type]
            model=MODEL,
            temperature=0,
            max_retries=0,
            http_client=http_client,
        )

    def test_bound_tools(self, llm: ChatOpenAI) -> None:
        with_tools = llm.bind_tools(
            [GetWeather], tool_choice="any", strict=True, parallel_tool_calls=False
        )
        (call,) = with_tools.invoke(ASK).tool_calls
        assert call["name"] == "GetWeather" and call["args"]["city"] in CITIES

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, llm: ChatOpenAI, method: Any) -> None:
        structured = llm.with_structured_output(CalendarEvent, method=method)
        assert isinstance(structured.invoke("A fair on Friday."), CalendarEvent)
