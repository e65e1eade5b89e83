"""Generations: pieces of text in order, ends and aborts, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from moe_serve.engine.request.request import DecodingRules, GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.http.generation.chat_request import AnswerOptions
from moe_serve.http.generation.context import EngineLimits
from moe_serve.http.generation.generation import Generation, GenerationService
from moe_serve.http.generation.prompts import Prompt
from moe_serve.http.generation.requests import build_engine_requests
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.schema.api_error import ApiError
from tests.support.http.waiting import wait_until

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
LIMITS = EngineLimits(max_model_len=512, vocab_size=257)
RunInVirtualTime = Callable[[Any], Any]


@pytest.fixture
def openai_client(live: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def service(engine: Any, tokenizer: Any) -> GenerationService:
    return GenerationService(engine, tokenizer, ServerMetrics("tiny"))


def requests_for(num_prompts: int = 1, **params: Any) -> list[GenerationRequest]:
    prompts = [Prompt(token_ids=(1 + index,), text=None, param="prompt") for index in range(4)]
    options = AnswerOptions(params=SamplingParams(**params))
    rules = DecodingRules.of(options.params)
    return build_engine_requests("id", prompts[:num_prompts], options, rules, LIMITS)


async def texts_of(generation: Generation) -> dict[int, str]:
    """Reads all pieces and returns them by the index of their sequence."""
    texts: dict[int, str] = {}
    async for pieces in generation:
        for piece in pieces:
            texts[piece.index] = texts.get(piece.index, "") + piece.delta.text
    return texts


def test_every_choice_of_every_prompt_has_its_text(
    service: GenerationService, engine: Any, run_in_virtual_time: RunInVirtualTime
) -> None:
    engine.script = lambda request: f"prompt {request.prompt_token_ids[0]} – {request.choice}"

    async def main() -> None:
        generation = service.start(requests_for(2, n=2))
        assert service.num_open == 1 and not generation.is_ended
        assert await texts_of(generation) == {
            0: "prompt 1 – 0",
            1: "prompt 1 – 1",
            2: "prompt 2 – 0",
            3: "prompt 2 – 1",
        }
        usage = generation.usage()
        assert generation.is_ended
        assert (usage.prompt_tokens, usage.cached_tokens) == (2, 6), "once for each prompt"
        assert usage.completion_tokens == 4 * (len("prompt 1 – 0".encode()) + 1)
        for _ in range(2):
            generation.close()
        assert service.num_open == 0 and engine.aborted == []

    run_in_virtual_time(main())


def test_a_stop_string_ends_its_sequence_only(
    service: GenerationService, engine: Any, run_in_virtual_time: RunInVirtualTime
) -> None:
    engine.script = lambda request: "abSTOPcd" if request.choice == 0 else "abcd"

    async def main() -> None:
        requests = requests_for(n=2, stop=("STOP",))
        generation = service.start(requests)
        assert await texts_of(generation) == {0: "ab", 1: "abcd"}
        assert engine.aborted == [requests[0].request_id]

    run_in_virtual_time(main())


def test_close_aborts_what_still_runs(
    service: GenerationService, engine: Any, run_in_virtual_time: RunInVirtualTime
) -> None:
    engine.script = lambda request: "x" * (1 if request.choice == 0 else 400)
    engine.step_s = 1.0

    async def main() -> None:
        requests = requests_for(n=2)
        generation = service.start(requests)
        async for pieces in generation:
            if any(piece.delta.finish_reason is not None for piece in pieces):
                break
        generation.close()
        assert engine.aborted == [requests[1].request_id]
        assert service.num_open == 0

    run_in_virtual_time(main())


def test_a_cut_ends_with_its_error(
    service: GenerationService, engine: Any, run_in_virtual_time: RunInVirtualTime
) -> None:
    engine.step_s = 1000.0  # nothing ever comes of it
    cut = ApiError(503, "The server ends.", code="server_ends")

    async def main() -> None:
        generation = service.start(requests_for(n=2))
        asyncio.get_running_loop().call_later(1.0, service.cut_all, cut)
        with pytest.raises(ApiError) as caught:
            await texts_of(generation)
        assert caught.value is cut
        generation.close()
        assert service.num_open == 0 and engine.running == {}

    run_in_virtual_time(main())


def test_a_failure_of_the_engine_is_told_without_its_cause(
    service: GenerationService,
    engine: Any,
    run_in_virtual_time: RunInVirtualTime,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.error_after = 2

    async def main() -> None:
        generation = service.start(requests_for())
        with pytest.raises(ApiError, match="The server log has the cause") as caught:
            await texts_of(generation)
        assert caught.value.status == 500 and "secret" not in str(caught.value)
        generation.close()

    run_in_virtual_time(main())
    assert "secret internals" in caplog.text


@pytest.mark.parametrize(
    ("state", "code"), [("dead", "engine_dead"), ("draining", "server_draining")]
)
def test_nothing_starts_on_a_server_that_ends(
    service: GenerationService,
    engine: Any,
    run_in_virtual_time: RunInVirtualTime,
    state: str,
    code: str,
) -> None:
    async def main() -> None:
        engine.is_alive = state != "dead"
        if state == "draining":
            service.begin_drain()
        with pytest.raises(ApiError) as caught:
            service.start(requests_for())
        assert caught.value.code == code
        assert engine.submitted == [] and service.num_open == 0

    run_in_virtual_time(main())


def test_leaving_a_stream_aborts(openai_client: openai.OpenAI, engine: Any) -> None:
    engine.script = lambda request: "x" * 400
    engine.step_s = 0.1
    stream = openai_client.chat.completions.create(**CHAT, stream=True, n=2)
    next(iter(stream))
    stream.close()
    wait_until(lambda: len(engine.aborted) == 2)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.submitted)
    assert engine.running == {}


def test_leaving_while_idle_or_waiting_aborts(live: Any, engine: Any) -> None:
    engine.step_s = 30.0  # nothing ever comes
    for fields in ({"stream": True}, {"stream": False}, {"stream": False, "n": 3}):
        engine.aborted.clear()
        num_sequences = int(fields.get("n", 1))
        body = json.dumps({**CHAT, **fields}).encode()
        with socket.create_connection(("127.0.0.1", live.port), timeout=60) as raw:
            raw.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda n=num_sequences: len(engine.running) == n)
        wait_until(lambda n=num_sequences: len(engine.aborted) == n)
    assert engine.running == {}


def test_a_dead_engine_ends_streams(live: Any, engine: Any) -> None:
    engine.step_s = 30.0

    def die_with_the_request() -> None:
        while not engine.submitted:
            time.sleep(0.01)
        engine.is_alive = False

    death = threading.Thread(target=die_with_the_request, daemon=True)
    death.start()
    body = {"prompt": "a", "stream": True}
    events = httpx.post(f"{live.url}/v1/completions", json=body).text.split("\n\n")
    assert json.loads(events[0][6:])["error"]["code"] == "engine_dead"
    death.join()


def test_many_streams_at_once(openai_client: openai.OpenAI, live: Any, engine: Any) -> None:
    engine.script = lambda request: f"answer {request.prompt_token_ids[0]} " * 3
    engine.step_s = 0.002
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        chunks = openai_client.completions.create(
            model="tiny", prompt=[i], stream=True, max_tokens=400
        )
        texts[i] = "".join(chunk.choices[0].text for chunk in chunks)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: f"answer {i} " * 3 for i in range(32)}
    wait_until(lambda: engine.running == {})
