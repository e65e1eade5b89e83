"""Reads many streams to their end, with as little work for the client as possible."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_LIMIT_S = 600.0
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
Body = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """The totals over all streams."""

    seconds: float
    num_tokens: int
    errors: Sequence[str]


def bodies(count: int, num_prompt: int, num_output: int, vocab_size: int, seed: int) -> list[Body]:
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(3, vocab_size) for _ in range(num_prompt)],
            "max_tokens": num_output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


async def stream_all(url: str, asked: Sequence[Body]) -> Streamed:
    """Opens all streams at once, each with its own connection."""
    begin = time.monotonic()
    ends = await asyncio.gather(*(_stream(url, body) for body in asked))
    return Streamed(
        seconds=time.monotonic() - begin,
        num_tokens=sum(end for end in ends if isinstance(end, int)),
        errors=[end for end in ends if isinstance(end, str)],
    )


async def _stream(url: str, body: Body) -> int | str:
    """Returns the number of tokens as the server counts them, or an error."""
    try:
        return await asyncio.wait_for(_read_stream(url, body), _LIMIT_S)
    except (OSError, asyncio.TimeoutError) as error:
        return f"{type(error).__name__}: {error}"


async def _read_stream(url: str, body: Body) -> int | str:
    where = urlsplit(url)
    raw = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        tail = first = await reader.read(65536)
        while chunk := await reader.read(65536):
            tail = (tail + chunk)[-2048:]
    finally:
        writer.close()
    found = _USAGE.findall(tail)
    if not first.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in tail or not found:
        return f"no whole stream: {first[:60]!r} ... {tail[-60:]!r}"
    wanted = body["max_tokens"]
    return int(found[-1]) if int(found[-1]) == wanted else f"{found[-1]!r} of {wanted} tokens"
