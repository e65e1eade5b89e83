"""LlamaIndex's OpenAILike, for chat models and for completions."""

from __future__ import annotations

import httpx
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture(params=[True, False], ids=["chat", "completions"])
def llm(base_url: str, http_client: httpx.Client, request: pytest.FixtureRequest) -> OpenAILike:
    return OpenAILike(
        model="moe-serve-demo",
        api_base=base_url,
        api_key="none",
        is_chat_model=request.param,
        context_window=2048,
        max_tokens=12,
        temperature=0,
        max_retries=0,
        http_client=http_client,
    )


def test_complete(llm: OpenAILike) -> None:
    answer = llm.complete("Once upon a time")
    assert answer.text
    assert "".join(part.delta or "" for part in llm.stream_complete("Once upon a time")) == (
        answer.text
    )


def test_chat(llm: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content="Hello")]
    answer = llm.chat(messages)
    assert answer.message.content
    streamed = [part.delta or "" for part in llm.stream_chat(messages)]
    assert "".join(streamed) == answer.message.content
