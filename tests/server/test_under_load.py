"""The demonstration model's server under load: many streams, overload, and a minute of disorder."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

MODEL = "moe-serve-demo"
StartServer = Callable[..., Any]


def client_of(server: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", **options)


async def stream_tokens(
    client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int, **extra: Any
) -> int:
    """Read one stream to its end; -> completion tokens as the server counts them."""
    chunks = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True} | extra,
    )
    usage, reasons = None, []
    async for chunk in chunks:
        reasons += [c.finish_reason for c in chunk.choices if c.finish_reason]
        usage = chunk.usage or usage
    assert reasons == ["length"] and usage is not None
    return usage.completion_tokens


def test_64_streams_at_once_none_fails(start_server: StartServer) -> None:
    server = start_server()
    assert server.seconds_to_ready < 30, "it is under 10 s on an idle machine"
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 4096) for _ in range(rng.randint(16, 700))] for _ in range(64)]

    async def main() -> list[int]:
        async with client_of(server, max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(stream_tokens(client, p, 24) for p in prompts))

    assert asyncio.run(main()) == [24] * 64
    server.wait_until_idle()
    body = {"prompt": prompts[0], "max_tokens": 1}
    usage = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False).json()["usage"]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert len(prompts[0]) - 16 <= num_cached < len(prompts[0]), "the pages of the first answer"
    assert server.metric("prefix_cache_hits_total") >= num_cached
    assert server.metric("prefix_cache_pages") > 0


def test_four_times_overload_is_refused_politely(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "8", "--max-queued-requests", "24")

    async def one(client: openai.AsyncOpenAI) -> str:
        try:
            assert await stream_tokens(client, [5] * 50, 120) == 120
        except openai.RateLimitError as error:
            assert float(error.response.headers["retry-after"]) > 0
            assert error.response.headers["x-should-retry"] == "true"
            assert error.code == "server_overloaded"
            return "429"
        return "finished"

    async def main() -> Counter[str]:
        async with client_of(server, max_retries=0, timeout=120) as client:
            return Counter(await asyncio.gather(*(one(client) for _ in range(128))))

    results = asyncio.run(main())
    assert results["finished"] >= 24 and results["429"] >= 64, results
    assert results["finished"] + results["429"] == 128
    server.wait_until_idle()
    assert server.metric("admission_rejections_total") == results["429"]


async def one_disorderly_client(url: str, rng: random.Random, deadline: float) -> Counter[str]:
    """Requests of all kinds, many of them abandoned at a random moment."""
    seen: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        while loop.time() < deadline:
            body = {
                "prompt": [rng.randrange(3, 4096) for _ in range(rng.randint(1, 300))],
                "max_tokens": rng.randint(1, 80),
                "temperature": rng.choice([0, 0.7, 1.5]),
                "n": rng.choice([1, 1, 1, 3]),
                "stream": rng.random() < 0.7,
                "stop": rng.choice([None, "the", [" a", "\n"]]),
                "logprobs": rng.choice([None, 2]),
            }
            if rng.random() < 0.1:
                body["temperature"] = -1
            try:
                patience = rng.choice([0.02, 0.1, 0.3, 60])
                response = await asyncio.wait_for(
                    client.post("/v1/completions", json=body), patience
                )
                seen[str(response.status_code)] += 1
            except asyncio.TimeoutError:
                seen["abandoned"] += 1
    return seen


def open_descriptors(server: Any) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.timeout(200)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_minute_of_disorder_leaves_nothing(start_server: StartServer) -> None:
    # 420 pages: about 20 of the longer requests, so that preemption happens too.
    server = start_server("--num-pages", "420", "--max-queued-requests", "40")
    reference = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 1, "seed": 4}

    def answer() -> str:
        response = httpx.post(
            f"{server.url}/v1/completions", json=reference, timeout=60, trust_env=False
        )
        text: str = response.json()["choices"][0]["text"]
        return text

    before = answer()
    server.wait_until_idle()
    num_descriptors = open_descriptors(server)

    async def main() -> Counter[str]:
        deadline = asyncio.get_running_loop().time() + 60
        clients = (one_disorderly_client(server.url, random.Random(i), deadline) for i in range(24))
        return sum(await asyncio.gather(*clients), Counter())

    seen = asyncio.run(main())
    assert set(seen) <= {"200", "400", "429", "abandoned"}, seen
    assert min(seen[key] for key in ("200", "400", "abandoned")) > 20, seen
    server.wait_until_idle()
    assert open_descriptors(server) <= num_descriptors + 2, "a connection was left open"
    assert answer() == before
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=30) == 0, "the idle engine's integrity check passed too"
