"""LangChain's ChatOpenAI with a base_url, as its documentation shows it."""

from __future__ import annotations

import httpx
import pytest
from langchain_openai import ChatOpenAI

MODEL = "moe-serve-demo"
MESSAGES = [
    ("system", "You are a helpful assistant that translates English to French."),
    ("human", "I love programming."),
]


@pytest.fixture
def llm(base_url: str, http_client: httpx.Client) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=base_url,
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        temperature=0,
        max_tokens=12,  # type: ignore[call-arg]
        timeout=60,
        max_retries=0,
        http_client=http_client,
    )


def test_invoke_and_stream(llm: ChatOpenAI) -> None:
    message = llm.invoke(MESSAGES)
    assert message.text and message.usage_metadata is not None
    assert "".join(chunk.text for chunk in llm.stream(MESSAGES)) == message.text


def test_batch(llm: ChatOpenAI) -> None:
    first, second = llm.batch([MESSAGES, "Once upon a time"])
    assert first.text == llm.invoke(MESSAGES).text and second.text


def test_the_responses_api(base_url: str, http_client: httpx.Client) -> None:
    llm = ChatOpenAI(
        base_url=base_url,
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        temperature=0,
        max_tokens=12,  # type: ignore[call-arg]
        use_responses_api=True,
        max_retries=0,
        http_client=http_client,
    )
    message = llm.invoke(MESSAGES)
    assert message.text and message.response_metadata["id"].startswith("resp_")
    assert "".join(chunk.text for chunk in llm.stream(MESSAGES)) == message.text
