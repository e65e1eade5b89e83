"""A server of OpenAI's API with answers that the test sets: sockets, no model, no clock."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Handler = Callable[[str, Mapping[str, Any]], "Reply"]


@dataclass(frozen=True)
class Reply:
    """An answer: `pieces` are sent one by one; `is_open` False closes the connection afterwards."""

    pieces: list[bytes]
    is_open: bool = True
    hangs: bool = False  # says nothing more


def http(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def event(document: object) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def text_events(texts: list[str], prompt_tokens: int = 5, cached: int = 0) -> bytes:
    """Returns a stream of completions: one event per text, the usage, and [DONE]."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(texts),
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    events = [event({"choices": [{"index": 0, "text": text}]}) for text in texts]
    return b"".join([*events, event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"])


def streamed(body: bytes) -> list[bytes]:
    """Returns the head, then the body as one HTTP chunk, then the end of the body."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return [head, f"{len(body):x}\r\n".encode() + body + b"\r\n", b"0\r\n\r\n"]


def counted_words(path: str, body: Mapping[str, Any]) -> Reply:
    """Counts tokens: those that were requested, two for each word of the prompt, and three more."""
    prompt = body.get("prompt") or body["messages"][0]["content"]
    words = 2 * len(prompt.split()) + 3 if isinstance(prompt, str) else len(prompt)
    num = body["max_tokens"]
    if body.get("stream"):
        return Reply(streamed(text_events(["x"] * num, words)))
    usage = {"prompt_tokens": words, "completion_tokens": num}
    whole = {"choices": [{"index": 0, "text": "x" * num}], "usage": usage}
    return Reply([http(200, json.dumps(whole).encode())])


@dataclass
class FakeServer:
    """Use `async with`, or `running` from code that has no event loop."""

    handler: Handler = counted_words
    metrics: list[str] = field(default_factory=list)  # of each scrape; empty: there is none
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    url: str = ""

    async def __aenter__(self) -> FakeServer:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._tasks.add(task)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        lengths = [
            int(line.split(":")[1])
            for line in head.lower().splitlines()
            if line.startswith("content-length:")
        ]
        body = await reader.readexactly(lengths[0]) if lengths else b""
        self.heads.append(head)
        reply = self._reply(path, body)
        for piece in reply.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if reply.hangs:
            await asyncio.Event().wait()
        return reply.is_open

    def _reply(self, path: str, body: bytes) -> Reply:
        if path == "/v1/models":
            return Reply([http(200, b'{"data": [{"id": "fake"}]}')])
        if path == "/metrics":
            if not self.metrics:
                return Reply([http(404, b"{}")])
            page = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            return Reply([http(200, page.encode(), "text/plain")])
        self.bodies.append(json.loads(body))
        return self.handler(path, self.bodies[-1])


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Runs the server in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
