"""Runs clients in a closed loop that compare every answer with that of an undisturbed server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_REQUEST_LIMIT_S = 90.0  # a request that takes longer hangs

Question = dict[str, Any]
Tokens = list[tuple[str, float]]  # and their log probabilities


def questions(count: int, vocab_size: int, seed: int) -> list[Question]:
    """Returns prompts of 1 to 200 tokens; every other answer is sampled, with a seed."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 200))],
            "max_tokens": rng.randint(8, 64),
            "temperature": index % 2,
            "seed": index,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
        }
        for index in range(count)
    ]


@dataclass(slots=True)
class Tally:
    """The results of the clients. Times are those of time.monotonic."""

    num_answers: int = 0
    num_tokens: int = 0
    wrong: list[int] = field(default_factory=list)  # questions
    failed: list[str] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)  # when tokens came

    @property
    def longest_gap_s(self) -> float:
        """Returns the longest time in which no client got a token."""
        return max((b - a for a, b in zip(self.beats, self.beats[1:], strict=False)), default=0.0)

    def gap_after(self, moment: float, until: float) -> float:
        """Returns the longest time without a token that began in [moment, until)."""
        pairs = zip(self.beats, self.beats[1:], strict=False)
        return max((b - a for a, b in pairs if b > moment and a < until), default=0.0)


async def ask(client: httpx.AsyncClient, question: Question, tally: Tally) -> Tokens:
    """Reads one streamed answer. Raises httpx.HTTPError, or ValueError with the server's error."""
    tokens: Tokens = []
    async with client.stream("POST", "/v1/completions", json=question) as response:
        if response.status_code != 200:
            raise ValueError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(line)
            for choice in chunk["choices"]:
                tally.beats.append(time.monotonic())
                entry = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                tokens += zip(entry["tokens"], entry["token_logprobs"], strict=True)
    return tokens


async def answers_of(url: str, asked: Sequence[Question]) -> list[Tokens]:
    """Sends all prompts one after the other to a server without faults."""
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_LIMIT_S) as client:
        return [await ask(client, question, Tally()) for question in asked]


async def keep_aborting(
    url: str, asked: Sequence[Question], seed: int, stop: asyncio.Event
) -> None:
    """Opens streams and leaves each after some events, until `stop`."""
    rng = random.Random(seed)
    while not stop.is_set():
        with contextlib.suppress(httpx.HTTPError):
            async with (
                httpx.AsyncClient(base_url=url, timeout=_REQUEST_LIMIT_S) as client,
                client.stream("POST", "/v1/completions", json=rng.choice(asked)) as response,
            ):
                num_left = rng.randint(1, 40)
                async for _ in response.aiter_lines():
                    num_left -= 1
                    if not num_left or stop.is_set():
                        break
        await asyncio.sleep(rng.random())


async def keep_asking(
    url: str,
    asked: Sequence[Question],
    expected: Sequence[Tokens],
    num_clients: int,
    tally: Tally,
    stop: asyncio.Event,
) -> None:
    """Sends prompts until `stop` is set; open requests are then read to their end."""

    async def one(number: int, client: httpx.AsyncClient) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            index = rng.randrange(len(asked))
            try:
                tokens = await asyncio.wait_for(ask(client, asked[index], tally), _REQUEST_LIMIT_S)
            except (httpx.HTTPError, ValueError, asyncio.TimeoutError) as error:
                tally.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)  # no rapid retries if the server is gone
                continue
            tally.num_answers += 1
            tally.num_tokens += len(tokens)
            if tokens != expected[index]:
                tally.wrong.append(index)

    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_LIMIT_S) as client:
        await asyncio.gather(*(one(number, client) for number in range(num_clients)))
