"""The official clients retry after a 429, as the answer tells them to."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from moe_serve.errors import ServerOverloadedError


@pytest.fixture
def refused(live: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the engine refuse the first two requests; the list counts all requests."""
    submit, calls = engine.submit, []

    def full_at_first(requests: Any) -> Any:
        calls.append(len(requests))
        if len(calls) <= 2:
            raise ServerOverloadedError("The queue is full.", retry_after_s=0.05)
        return submit(requests)

    monkeypatch.setattr(engine, "submit", full_at_first)
    return calls


def test_openai(live: Any, refused: list[int]) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=2) as client:
        assert client.responses.create(model="tiny", input="hi").output_text == "Hello"
    assert len(refused) == 3


def test_anthropic(live: Any, refused: list[int]) -> None:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=2) as client:
        message = client.messages.create(
            model="tiny", max_tokens=20, messages=[{"role": "user", "content": "hi"}]
        )
    assert message.content[0].type == "text" and len(refused) == 3


def test_without_retries_they_raise_their_own_error(live: Any, refused: list[int]) -> None:
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.completions.create(model="tiny", prompt="hi")
    assert caught.value.code == "server_overloaded"
