"""A closed loop: N clients, each sending its next request as soon as the last one is answered."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from .http_client import Answered, Sent, complete

_WORDS = ("river", "house", "people", "slowly", "moved", "old", "spoke", "about", "their", "work")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent. Prompt lengths are drawn evenly from [min_prompt, max_prompt]."""

    num_clients: int = 16
    num_requests: int = 128
    min_prompt: int = 32
    max_prompt: int = 512
    max_tokens: int = 64
    vocab_size: int = 4096  # token ids are drawn below it
    is_text: bool = False  # words instead of token ids
    seed: int = 0

    def requests(self) -> list[Sent]:
        """The same for every server under the same load."""
        rng = random.Random(self.seed)
        return [
            Sent(prompt=self._prompt(rng), max_tokens=self.max_tokens)
            for _ in range(self.num_requests)
        ]

    def _prompt(self, rng: random.Random) -> list[int] | str:
        length = rng.randint(self.min_prompt, self.max_prompt)
        if self.is_text:
            return " ".join(rng.choice(_WORDS) for _ in range(length))
        return [rng.randrange(16, self.vocab_size) for _ in range(length)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of some times, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        ordered = sorted(seconds) or [0.0]
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return cls(p50=1e3 * statistics.median(ordered), p99=1e3 * p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One server under one load."""

    url: str
    seconds: float
    num_ok: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    errors: dict[str, int]  # message -> times

    @property
    def requests_per_s(self) -> float:
        return self.num_ok / self.seconds

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_tok_s(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds


async def run_load(url: str, load: Load, api_key: str | None = None) -> Summary:
    """Warm up with one request per client, then send the load."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=load.num_clients)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=600, limits=limits
    ) as client:
        model = await _served_model(client)
        requests = load.requests()
        warm_up = [Sent(prompt=r.prompt, max_tokens=2) for r in requests[-load.num_clients :]]
        await _closed_loop(client, model, warm_up, load.num_clients)
        start = time.perf_counter()
        answers = await _closed_loop(client, model, requests, load.num_clients)
        return _summarize(url, time.perf_counter() - start, answers)


async def _served_model(client: httpx.AsyncClient) -> str:
    response = await client.get("/v1/models")
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


async def _closed_loop(
    client: httpx.AsyncClient, model: str, requests: list[Sent], num_clients: int
) -> list[Answered]:
    waiting = iter(requests)  # shared: each client takes the next one
    answers: list[Answered] = []

    async def one_client() -> None:
        for request in waiting:
            answers.append(await complete(client, model, request))

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return answers


def _summarize(url: str, seconds: float, answers: list[Answered]) -> Summary:
    ok = [a for a in answers if a.error is None]
    return Summary(
        url=url,
        seconds=seconds,
        num_ok=len(ok),
        num_prompt_tokens=sum(a.num_prompt_tokens for a in ok),
        num_output_tokens=sum(a.num_output_tokens for a in ok),
        ttft_ms=Spread.of([a.ttft_s for a in ok]),
        tpot_ms=Spread.of([a.tpot_s for a in ok if a.tpot_s is not None]),
        e2e_ms=Spread.of([a.end - a.start for a in ok]),
        errors=dict(Counter(a.error for a in answers if a.error)),
    )
