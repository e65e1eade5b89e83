"""The official openai client's examples, unchanged but for base_url, key and model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import openai
import pytest

MODEL = "moe-serve-demo"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def test_chat(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Talk like a pirate."},
            {"role": "user", "content": "How do I check if a Python object is a list?"},
        ],
        max_completion_tokens=16,
    )
    assert completion.choices[0].message.content
    assert completion.usage is not None and completion.usage.completion_tokens <= 16
    details = completion.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 0


def test_the_fingerprint_is_that_of_the_server(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
    )
    text = client.completions.create(model=MODEL, prompt="Once", max_tokens=2)
    chunks = client.completions.create(model=MODEL, prompt="Once", max_tokens=2, stream=True)
    assert chat.system_fingerprint is not None and chat.system_fingerprint.startswith("fp_")
    told = {text.system_fingerprint, *(chunk.system_fingerprint for chunk in chunks)}
    assert told == {chat.system_fingerprint}


def test_a_chat_as_it_comes(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        stream=True,
        max_completion_tokens=12,
        temperature=0,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say this is a test"}],
        max_completion_tokens=12,
        temperature=0,
    )
    assert text == whole.choices[0].message.content


def test_the_stream_helper_of_chats(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        temperature=0,  # a few tokens: the client takes an answer that was cut for an error
        stream_options={"include_usage": True},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.usage is not None


def test_completions(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0, logprobs=2
    )
    assert completion.choices[0].text and completion.choices[0].logprobs is not None
    chunks = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text


def test_the_load_in_a_header(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model=MODEL,
        prompt="Once",
        max_tokens=1,
        extra_headers={"endpoint-load-metrics-format": "TEXT"},
    )
    assert answer.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_usage")
    assert answer.parse().usage is not None


def test_logprobs_of_given_tokens(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Yes or no?"}],
        max_tokens=1,
        logprobs=True,
        extra_body={"logprob_token_ids": [100, 200, 300]},
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) in (3, 4)


def test_models(client: openai.OpenAI) -> None:
    assert [(model.id, model.root) for model in client.models.list()] == [(MODEL, MODEL)]  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL).owned_by == "moe-serve"


def test_the_async_client(base_url: str) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=60) as client:
            stream = await client.responses.create(
                model=MODEL, input="Write a story.", stream=True, max_output_tokens=8
            )
            return [event.type async for event in stream]

    kinds = asyncio.run(main())
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


class TestResponses:
    def test_create_and_retrieve(self, client: openai.OpenAI) -> None:
        response = client.responses.create(
            model=MODEL,
            instructions="You are a coding assistant that talks like a pirate.",
            input="How do I check if a Python object is an instance of a class?",
            max_output_tokens=16,
        )
        assert response.output_text and response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == 0
        assert client.responses.retrieve(response.id).output_text == response.output_text
        (item,) = client.responses.input_items.list(response.id)
        assert item.type == "message"
        client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(response.id)
        assert caught.value.code == "response_not_found"

    def test_input_tokens(self, client: openai.OpenAI) -> None:
        counted = client.responses.input_tokens.count(model=MODEL, input="Tell me a joke")
        answered = client.responses.create(model=MODEL, input="Tell me a joke", max_output_tokens=1)
        assert answered.usage is not None
        assert counted.input_tokens == answered.usage.input_tokens
        with pytest.raises(openai.NotFoundError, match="does not compact"):
            client.post("/responses/compact", cast_to=object, body={"model": MODEL, "input": "a"})

    def test_a_conversation(self, client: openai.OpenAI) -> None:
        first = client.responses.create(model=MODEL, input="Tell me a joke", max_output_tokens=8)
        second = client.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"role": "user", "content": "Explain why this is funny."}],
            max_output_tokens=8,
        )
        assert first.usage is not None and second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
        again = client.responses.create(
            model=MODEL,
            input=[
                {"role": "user", "content": "Tell me a joke"},
                *[item.model_dump(exclude_none=True) for item in first.output],  # type: ignore[list-item]
                {"role": "user", "content": "Explain why this is funny."},
            ],
            max_output_tokens=8,
        )
        assert again.usage is not None and again.usage.input_tokens == second.usage.input_tokens

    def test_the_stream_helper(self, client: openai.OpenAI) -> None:
        with client.responses.stream(model=MODEL, input="Hello", temperature=0) as stream:
            text = "".join(
                event.delta for event in stream if event.type == "response.output_text.delta"
            )
            final = stream.get_final_response()
        assert final.output_text == text
        assert client.responses.retrieve(final.id).output_text == text

    def test_in_the_background_until_it_is_cancelled(self, client: openai.OpenAI) -> None:
        extra = {"ignore_eos": True}
        response = client.responses.create(
            model=MODEL, input="Write a long novel.", background=True, extra_body=extra
        )
        assert response.status == "in_progress"
        assert client.responses.cancel(response.id).status == "cancelled"
        short = client.responses.create(
            model=MODEL, input="Hi", background=True, max_output_tokens=4
        )
        for _ in range(200):
            short = client.responses.retrieve(short.id)
            if short.status not in ("queued", "in_progress"):
                break
            time.sleep(0.05)
        assert short.status in ("completed", "incomplete") and short.usage is not None


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-none", messages=[{"role": "user", "content": ""}])
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model=MODEL, input="a", max_output_tokens=10**6)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=MODEL, prompt="a", extra_body={"colour": "red"})
    assert unknown.value.code == "unknown_parameter"
