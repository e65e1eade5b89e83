"""The demonstration model's server under load: many streams, overload, and disorder."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.sampled_cases import EVERY_CASE

MODEL = "moe-serve-demo"
# At least; `benchmarks/run.py soak` runs the long one.
DISORDER_S = 8.0 if EVERY_CASE else 3.0
# More streams than seats: the others wait when SIGTERM comes.
STREAMS, SEATS = (100, 64) if EVERY_CASE else (24, 8)
PATIENCE_S = 500.0  # of a client that wants its answer
pytestmark = pytest.mark.timeout(600)  # for slow machines
StartServer = Callable[..., Any]


def client_of(server: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", **options)


async def stream_tokens(
    client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int, **extra: Any
) -> int:
    """Reads one stream to its end and returns the completion tokens that the server counts."""
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
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 4096) for _ in range(rng.randint(16, 150))] for _ in range(64)]

    async def main() -> list[int]:
        async with client_of(server, max_retries=0, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(stream_tokens(client, p, 12) for p in prompts))

    assert asyncio.run(main()) == [12] * 64
    server.wait_until_idle()
    body = {"prompt": prompts[0], "max_tokens": 1}
    url = f"{server.url}/v1/completions"
    usage = httpx.post(url, json=body, trust_env=False, timeout=PATIENCE_S).json()["usage"]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert len(prompts[0]) - 16 <= num_cached < len(prompts[0]), "the pages of the first answer"
    assert server.metric("prefix_cache_hits_total") >= num_cached
    assert server.metric("prefix_cache_pages") > 0


def test_four_times_overload_is_refused_politely(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "4", "--max-queued-requests", "12")

    async def one(client: openai.AsyncOpenAI) -> str:
        try:
            assert await stream_tokens(client, [5] * 50, 60) == 60
        except openai.RateLimitError as error:
            assert float(error.response.headers["retry-after"]) > 0
            assert error.response.headers["x-should-retry"] == "true"
            assert error.code == "server_overloaded"
            return "429"
        return "finished"

    async def main() -> Counter[str]:
        async with client_of(server, max_retries=0, timeout=PATIENCE_S) as client:
            return Counter(await asyncio.gather(*(one(client) for _ in range(64))))

    results = asyncio.run(main())
    assert results["finished"] >= 12 and results["429"] >= 32, results
    assert results["finished"] + results["429"] == 64
    server.wait_until_idle()
    assert server.metric("admission_rejections_total") == results["429"]


def test_sigterm_lets_all_streams_finish(start_server: StartServer, tmp_path: Path) -> None:
    """Running and waiting streams all finish, and the exit status is 0."""
    config = tmp_path / "patient.yaml"
    config.write_text("server: {drain_timeout_s: 500}\n", "utf-8")  # for slow machines
    server = start_server("--config", str(config), "--max-num-seqs", str(SEATS))

    async def main() -> list[int]:
        async with client_of(server, max_retries=0, timeout=PATIENCE_S) as client:
            streams = [
                asyncio.create_task(stream_tokens(client, [7 + i] * 40, 100))
                for i in range(STREAMS)
            ]
            num_open = 0.0
            while num_open < STREAMS:
                await asyncio.sleep(0.02)
                names = ("num_requests_running", "num_requests_waiting")
                num_open = sum([await asyncio.to_thread(server.metric, name) for name in names])
                assert not any(stream.done() for stream in streams), "too late for the signal"
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

    assert asyncio.run(main()) == [100] * STREAMS
    assert server.process.wait(timeout=120) == 0


async def one_disorderly_client(
    url: str, rng: random.Random, seen: Counter[str], is_enough: Callable[[], bool]
) -> None:
    """Sends requests of all kinds and abandons many of them at a random moment."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        while not is_enough():
            body = {
                "prompt": [rng.randrange(3, 4096) for _ in range(rng.randint(1, 150))],
                "max_tokens": rng.randint(1, 50),
                "temperature": rng.choice([0, 0.7, 1.5]),
                "n": rng.choice([1, 1, 1, 3]),
                "stream": rng.random() < 0.7,
                "stop": rng.choice([None, "the", [" a", "\n"]]),
                "logprobs": rng.choice([None, 2]),
            }
            if rng.random() < 0.2:
                body["temperature"] = -1
            try:
                patience = rng.choice([0.02, 0.1, 0.3, 60])
                response = await asyncio.wait_for(
                    client.post("/v1/completions", json=body), patience
                )
                seen[str(response.status_code)] += 1
            except asyncio.TimeoutError:
                seen["abandoned"] += 1


def open_descriptors(server: Any) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_disorder_leaves_nothing(start_server: StartServer) -> None:
    # 220 pages: about 20 of the longer requests, so that preemption happens too.
    server = start_server("--num-pages", "220", "--max-queued-requests", "40")
    reference = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 1, "seed": 4}

    def answer() -> str:
        response = httpx.post(
            f"{server.url}/v1/completions", json=reference, timeout=PATIENCE_S, trust_env=False
        )
        text: str = response.json()["choices"][0]["text"]
        return text

    before = answer()
    server.wait_until_idle()
    num_descriptors = open_descriptors(server)

    seen, end = Counter[str](), time.monotonic() + DISORDER_S

    def is_enough() -> bool:
        """Returns True once every kind has happened, on a machine of any speed."""
        has_all = min(seen[key] for key in ("200", "400", "abandoned")) > 20
        return has_all and time.monotonic() > end

    async def main() -> None:
        randoms = (random.Random(i) for i in range(24))
        clients = (one_disorderly_client(server.url, rng, seen, is_enough) for rng in randoms)
        await asyncio.gather(*clients)

    asyncio.run(main())
    assert set(seen) <= {"200", "400", "429", "abandoned"}, seen
    server.wait_until_idle()
    for _ in range(600):
        if open_descriptors(server) <= num_descriptors + 2:
            break
        time.sleep(0.1)
    assert open_descriptors(server) <= num_descriptors + 2, "a connection was left open"
    assert answer() == before
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=120) == 0, "the idle engine's integrity check passed too"
