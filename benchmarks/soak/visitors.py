"""Clients of every kind, good and bad, with the answers that each may get.

A visit returns its result ("200", "left", "400 invalid_json" ...). A result that is not in the
visitor's `may_see` is a failure of the server.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

LIMIT_S = 120.0  # a visit that takes longer hangs
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_WORDS = [f"word{i}" for i in range(500)]
_REFERENCE = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1, "seed": 7}
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW", "HEAD")
_BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[1]",
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b'{"prompt": "a", "n": 1e308}',
    b'{"prompt": "a", "nobody_knows": 1}',
    b'{"prompt": "a", "logit_bias": {"99999999": 1}}',
    b'{"prompt": "a", "stop": ["' + b"x" * 5000 + b'"]}',
    b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
)


@dataclass(slots=True)
class Host:
    """The visited server, and the state that visitors share."""

    client: httpx.AsyncClient
    rng: random.Random
    reference: str | None = None  # the text that _REFERENCE must always get


Visit = Callable[[Host], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    visit: Visit
    may_see: frozenset[str]
    weight: int


def _prompt(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 120)))


async def _stream(host: Host) -> str:
    rng = host.rng
    body = {
        "messages": [{"role": "user", "content": _prompt(rng)}],
        "max_tokens": rng.randint(1, 60),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "n": rng.choice([1, 1, 2]),
        "logprobs": rng.random() < 0.2,
        "stream": True,
    }
    async with host.client.stream("POST", _CHAT, json=body) as response:
        lines = [line async for line in response.aiter_lines() if line]
    if any(line.startswith('data: {"error"') for line in lines):
        return "an error in the stream"
    is_whole = lines and lines[-1] == "data: [DONE]"
    return str(response.status_code) if is_whole else f"{response.status_code}, not ended"


async def _same_question(host: Host) -> str:
    response = await host.client.post(_TEXT, json=_REFERENCE)
    if response.status_code != 200:
        return str(response.status_code)
    text = response.json()["choices"][0]["text"]
    host.reference = text if host.reference is None else host.reference
    return "200" if text == host.reference else "another answer to the same question"


async def _leave(host: Host) -> str:
    """Disconnects after some events, or before the first."""
    body = {"prompt": _prompt(host.rng), "max_tokens": 400, "stream": True, "ignore_eos": True}
    num_events = host.rng.choice([0, 1, 5, 20])
    async with host.client.stream("POST", _TEXT, json=body) as response:
        if response.status_code != 200:
            return str(response.status_code)
        async for _ in response.aiter_lines():
            num_events -= 1
            if num_events < 0:
                return "left"
    return "left"


async def _read_slowly(host: Host) -> str:
    """Reads a few bytes at a time, and then no more."""
    body = b'{"prompt":"a","max_tokens":300,"n":4,"logprobs":5,"stream":true,"ignore_eos":true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    reader, writer = await _open(host)
    writer.write(head + body)
    try:
        for _ in range(host.rng.randint(1, 60)):
            if not await reader.read(64):
                return "closed"
            await asyncio.sleep(0.05)
        return "left"
    finally:
        writer.transport.abort()


async def _begin_slowly(host: Host) -> str:
    """Sends a head very slowly (slowloris) and gives up."""
    reader, writer = await _open(host)
    try:
        for byte in b"POST /v1/completions HTTP/1.1\r\nX-A"[: host.rng.randint(1, 34)]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.1)
        return "left"
    finally:
        writer.transport.abort()
        reader.feed_eof()


async def _odd_path(host: Host) -> str:
    name = "".join(host.rng.choice(string.ascii_letters + "/%.~") for _ in range(30))
    url = f"/x{name.replace('%', '%25')}"
    response = await host.client.request(host.rng.choice(_METHODS), url)
    return str(response.status_code)


async def _bad_body(host: Host) -> str:
    headers = {"content-type": "application/json"}
    body = host.rng.choice(_BAD_BODIES)
    response = await host.client.post(_TEXT, content=body, headers=headers)
    return str(response.status_code)


async def _structured(host: Host) -> str:
    """Sends a schema that was never sent before; a server without grammars refuses it."""
    name = f"field_{host.rng.randrange(10**9)}"
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["a", "b"]}},
        "required": [name],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 40,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
    }
    response = await host.client.post(_CHAT, json=body)
    if response.status_code == 400 and '"unsupported_parameter"' in response.text:
        return "not served"
    return str(response.status_code)


async def _look(host: Host) -> str:
    paths = ("/health/live", "/health/ready", "/v1/models", "/metrics", "/openapi.json")
    response = await host.client.get(host.rng.choice(paths))
    return str(response.status_code)


async def _open(host: Host) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(str(host.client.base_url))
    return await asyncio.open_connection(where.hostname, where.port)


def _visitor(visit: Visit, weight: int, *may_see: str) -> Visitor:
    return Visitor(visit=visit, weight=weight, may_see=frozenset(may_see))


VISITORS: Mapping[str, Visitor] = {
    "streams": _visitor(_stream, 6, "200", "429"),
    "same question": _visitor(_same_question, 2, "200", "429"),
    "leaves": _visitor(_leave, 3, "left", "429"),
    "reads slowly": _visitor(_read_slowly, 1, "left", "closed"),
    "begins slowly": _visitor(_begin_slowly, 1, "left"),
    "odd paths": _visitor(_odd_path, 3, "404", "405", "400"),
    "bad bodies": _visitor(_bad_body, 3, "400"),
    "structured output": _visitor(_structured, 1, "200", "429", "not served"),
    "looks": _visitor(_look, 1, "200"),
}
