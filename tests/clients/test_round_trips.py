"""Answers that a client library has parsed or streamed can be sent back as a user would do it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_type_hints

import anthropic
import httpx
import openai
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from openai.types.shared_params import Reasoning
from pydantic import BaseModel

# Of the libraries' own parsed messages, which their types do not tell of.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
MODEL = "moe-serve-demo"
ASK: Any = {"role": "user", "content": "A fair on Friday in Paris."}
AGAIN: Any = {"role": "user", "content": "And then?"}
SHORT: Any = {"model": MODEL, "temperature": 0, "max_tokens": 8}


class CalendarEvent(BaseModel):
    day: Literal["Friday", "Saturday"]


class GetWeather(BaseModel):
    """The weather of a city"""

    city: Literal["Paris", "Rome"]


CHAT_TOOL: Any = openai.pydantic_function_tool(GetWeather)
NAMED: Any = {"type": "function", "function": {"name": "GetWeather"}}
ANTHROPIC_TOOL: Any = {"name": "GetWeather", "input_schema": GetWeather.model_json_schema()}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def claude(server_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server_url, api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def result_of(call_id: str) -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": "14 degrees"}


class TestChat:
    def test_a_parsed_message(self, client: openai.OpenAI) -> None:
        message = (
            client.chat.completions.parse(
                model=MODEL, temperature=0, messages=[ASK], response_format=CalendarEvent
            )
            .choices[0]
            .message
        )
        assert message.parsed is not None
        for sent in (message, message.model_dump(), message.to_dict()):
            messages: Any = [ASK, sent, AGAIN]
            assert client.chat.completions.create(**SHORT, messages=messages).choices

    def test_parsed_calls(self, client: openai.OpenAI) -> None:
        message = (
            client.chat.completions.parse(
                model=MODEL,
                temperature=0,
                messages=[ASK],
                tools=[CHAT_TOOL],
                tool_choice=NAMED,
                response_format=CalendarEvent,
            )
            .choices[0]
            .message
        )
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetWeather)
        for sent in (message, message.model_dump()):
            messages: Any = [ASK, sent, result_of(call.id), AGAIN]
            client.chat.completions.create(**SHORT, messages=messages, tools=[CHAT_TOOL])

    def test_streamed_calls(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            model=MODEL, temperature=0, messages=[ASK], tools=[CHAT_TOOL], tool_choice="required"
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls is not None
        results = [result_of(call.id) for call in message.tool_calls]
        messages: Any = [ASK, message, *results]
        assert client.chat.completions.create(**SHORT, messages=messages, tools=[CHAT_TOOL])

    def test_a_streamed_and_parsed_message(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            model=MODEL, temperature=0, messages=[ASK], response_format=CalendarEvent
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.parsed is not None
        messages: Any = [ASK, message, AGAIN]
        assert client.chat.completions.create(**SHORT, messages=messages).choices


class TestResponses:
    TOOL: Any = {
        "type": "function",
        "name": "GetWeather",
        "parameters": GetWeather.model_json_schema(),
        "strict": True,
    }

    @pytest.mark.parametrize("is_streamed", [False, True])
    @pytest.mark.parametrize("has_call", [False, True])
    def test_the_output_as_input(
        self, client: openai.OpenAI, is_streamed: bool, has_call: bool
    ) -> None:
        body: Any = {"model": MODEL, "temperature": 0, "input": [ASK], "text_format": CalendarEvent}
        body["include"] = ["message.output_text.logprobs"]
        if has_call:
            tool = openai.pydantic_function_tool(GetWeather)["function"]
            body["tools"] = [{"type": "function", **tool}]
            body["tool_choice"] = "required"
        if is_streamed:
            with client.responses.stream(**body) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.parse(**body)
        if not has_call:
            assert isinstance(response.output_parsed, CalendarEvent)
        calls = [item for item in response.output if item.type == "function_call"]
        assert bool(calls) == has_call
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "14 degrees"}
            for call in calls
        ]
        for output in (response.output, [item.model_dump() for item in response.output]):
            after = client.responses.create(
                model=MODEL,
                input=[ASK, *output, *results, AGAIN],
                tools=[self.TOOL],
                max_output_tokens=8,
            )
            assert after.output


class TestAnthropic:
    def test_a_parsed_message(self, claude: anthropic.Anthropic) -> None:
        message = claude.messages.parse(
            model=MODEL, max_tokens=100, messages=[ASK], output_format=CalendarEvent
        )
        assert message.parsed_output is not None
        contents: Any = (message.content, [block.model_dump() for block in message.content])
        for content in contents:
            said: Any = {"role": "assistant", "content": content}
            assert claude.messages.create(model=MODEL, max_tokens=8, messages=[ASK, said, AGAIN])

    def test_a_streamed_call_beside_a_format(self, claude: anthropic.Anthropic) -> None:
        with claude.messages.stream(
            model=MODEL,
            max_tokens=100,
            messages=[ASK],
            tools=[ANTHROPIC_TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            output_format=CalendarEvent,
        ) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "14 degrees"}
            for block in message.content
            if block.type == "tool_use"
        ]
        said: Any = [{"role": "assistant", "content": message.content}]
        said.append({"role": "user", "content": results})
        after = claude.messages.create(
            model=MODEL, max_tokens=8, messages=[ASK, *said], tools=[ANTHROPIC_TOOL]
        )
        assert after.content


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def llm(request: Any, base_url: str, http_client: httpx.Client) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=base_url,
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        temperature=0,
        max_tokens=60,  # type: ignore[call-arg]
        max_retries=0,
        use_responses_api=request.param,
        http_client=http_client,
    )


def test_a_conversation_with_langchain(llm: ChatOpenAI) -> None:
    forced = llm.bind_tools([GetWeather], tool_choice="any", strict=True)
    chunks = list(forced.stream("Paris?"))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    for answer in (forced.invoke("Paris?"), streamed):
        assert answer.tool_calls
        results = [ToolMessage("14", tool_call_id=call["id"]) for call in answer.tool_calls]
        history = [HumanMessage("Paris?"), answer, *results]
        after = llm.bind_tools([GetWeather]).invoke(history)
        assert llm.invoke([*history, after, HumanMessage("And then?")]).usage_metadata


def test_a_context_that_is_too_small_is_known_to_langchain(llm: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError, match="This model's maximum context length is 2048"):
        llm.invoke("Once upon a time " * 2000)
    with pytest.raises(ContextOverflowError, match=r"you requested \d+ tokens \(\d+ in the"):
        llm.model_copy(update={"max_tokens": 5000}).invoke("hi")


def test_a_conversation_with_llama_index(base_url: str, http_client: httpx.Client) -> None:
    llm = OpenAILike(
        api_base=base_url,
        api_key="none",
        model=MODEL,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=60,
        max_retries=0,
        http_client=http_client,
    )

    def weather(city: str) -> str:
        """The weather of a city"""
        return city

    tool = FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], "Paris?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    history = [
        ChatMessage(role="user", content="Paris?"),
        answer.message,
        *(
            ChatMessage(role="tool", content="14", additional_kwargs={"tool_call_id": call.tool_id})
            for call in calls
        ),
        ChatMessage(role="user", content="And then?"),
    ]
    assert llm.chat(history).message is not None


# What each request needs, and the types of its parameters in the official libraries.
HI: Any = [{"role": "user", "content": "hi"}]
REQUESTS: Mapping[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 1},
        (
            chat_params.CompletionCreateParamsNonStreaming,
            chat_params.CompletionCreateParamsStreaming,
        ),
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "hi", "max_tokens": 1},
        (
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming,
        ),
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 1},
        (
            response_create_params.ResponseCreateParamsNonStreaming,
            response_create_params.ResponseCreateParamsStreaming,
        ),
    ),
    "messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 1},
        (
            message_create_params.MessageCreateParamsNonStreaming,
            message_create_params.MessageCreateParamsStreaming,
            beta_params.MessageCreateParamsNonStreaming,
        ),
    ),
    "count_tokens": (
        "/v1/messages/count_tokens",
        {"messages": HI},
        (message_count_tokens_params.MessageCountTokensParams,),
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_parameter_of_the_libraries_is_known(server_url: str, name: str) -> None:
    """Each parameter works, has no effect, or is refused by its name; null means the default."""
    path, needed, types = REQUESTS[name]
    fields = {field for kind in types for field in get_type_hints(kind)}
    assert len(fields) >= 7, "the library has moved its types"
    fields -= {"betas"}  # a header
    with httpx.Client(base_url=server_url, timeout=60) as http:
        nothing = dict.fromkeys(fields - set(needed))
        answer = http.post(path, json={**needed, **nothing})
        assert answer.status_code == 200, answer.text
        for field in sorted(fields - set(needed)):
            error = http.post(path, json={**needed, field: [[1]]}).json().get("error") or {}
            details = error.get("details", {"error_code": error.get("code")})
            assert details["error_code"] != "unknown_parameter", error
            assert not error or field in error["message"], error


def test_every_parameter_of_reasoning_is_known(server_url: str) -> None:
    fields = dict.fromkeys(get_type_hints(Reasoning))
    body = {"input": "hi", "max_output_tokens": 1, "reasoning": fields}
    with httpx.Client(base_url=server_url, timeout=60) as http:
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        body["reasoning"] = {"context": "current_turn"}
        assert "reasoning.context is not supported" in http.post("/v1/responses", json=body).text
