"""The official anthropic client's examples, unchanged but for base_url, key and model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import pytest

MODEL = "moe-serve-demo"
GREEDY = {"temperature": 0}  # which this version of the client has no argument for


@pytest.fixture
def client(server_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server_url, api_key="none", max_retries=0, timeout=60
    ) as opened:
        yield opened


def test_messages(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=MODEL,
        max_tokens=16,
        system="You are a seasoned data scientist.",
        messages=[{"role": "user", "content": "Hello, Claude"}],
    )
    assert message.content[0].type == "text" and message.content[0].text
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.output_tokens <= 16


def test_a_conversation_with_its_own_answer(client: anthropic.Anthropic) -> None:
    first = client.messages.create(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "Hello there."}]
    )
    second = client.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=[
            {"role": "user", "content": "Hello there."},
            first.to_param(),
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ],
    )
    assert second.content[0].type == "text"


def test_the_stream_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=12,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": "Hello"}],
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(
        model=MODEL,
        max_tokens=12,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": "Hello"}],
    )
    assert final.content[0].type == "text" and final.content[0].text == text
    assert whole.content[0].type == "text" and whole.content[0].text == text
    assert whole.stop_reason == final.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_raw_events(client: anthropic.Anthropic) -> None:
    events = client.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=[{"role": "user", "content": "Hello, Claude"}],
        stream=True,
    )
    got = list(events)
    assert got[0].type == "message_start" and got[-1].type == "message_stop"
    start = got[0].message.usage
    assert (start.cache_read_input_tokens, start.cache_creation_input_tokens) == (0, 0)
    end = next(event.usage for event in got if event.type == "message_delta")
    assert end.cache_read_input_tokens is not None and end.output_tokens_details is not None
    assert end.output_tokens_details.thinking_tokens == 0


def test_the_async_client(server_url: str) -> None:
    async def main() -> str:
        client = anthropic.AsyncAnthropic(base_url=server_url, api_key="none", timeout=60)
        async with (
            client,
            client.messages.stream(
                model=MODEL,
                max_tokens=8,
                messages=[{"role": "user", "content": "Say hello there!"}],
            ) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(main())


def test_count_tokens(client: anthropic.Anthropic) -> None:
    short = client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "Hello, world"}]
    )
    long = client.messages.count_tokens(
        model=MODEL, system="Be brief.", messages=[{"role": "user", "content": "Hello, world"}]
    )
    assert long.input_tokens > short.input_tokens > 0


def test_more_tokens_than_the_context_has(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=MODEL,
        max_tokens=64_000,
        stop_sequences=[" "],
        extra_body=GREEDY,
        messages=[{"role": "user", "content": "Tell me a story of a king."}],
    )
    assert message.stop_reason in ("stop_sequence", "end_turn")


def test_errors_are_the_client_s_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(
            model="claude-none", max_tokens=8, messages=[{"role": "user", "content": "Hi"}]
        )
    assert missing.value.type == "not_found_error"
    assert missing.value.error_code == "model_not_found"
    with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
        client.messages.create(
            model=MODEL,
            max_tokens=8,
            extra_body={"temperature": 9},
            messages=[{"role": "user", "content": "Hi"}],
        )
    assert wrong.value.type == "invalid_request_error"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    with pytest.raises(anthropic.BadRequestError, match="type must be one of text"):
        client.messages.create(
            model=MODEL,
            max_tokens=8,
            messages=[{"role": "user", "content": [{"type": "image", "source": source}]}],  # type: ignore[list-item,typeddict-item]
        )
