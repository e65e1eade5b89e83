"""The response of a stream that ends while a send is pending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from moe_serve.http.generation.respond import SseResponse

SCOPE: dict[str, Any] = {"type": "http"}


async def never(*_: object) -> Any:
    await asyncio.Event().wait()


class Server:
    """A stand-in for uvicorn: sends may wait for a reader, and nothing may follow the end."""

    def __init__(self) -> None:
        self.is_ended = False
        self.bodies: list[bytes] = []
        self.readable = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.readable.wait()
        assert not self.is_ended, "Unexpected message sent, after response already completed."
        self.bodies.append(message.get("body", b""))
        self.is_ended = message["type"] == "http.response.body" and not message["more_body"]


async def one_event(delay_s: float) -> AsyncIterator[bytes]:
    await asyncio.sleep(delay_s)
    yield b"data: 1\n\n"


@pytest.mark.parametrize(("delay_s", "num_pings"), [(0.05, 1), (0.015, 0)])
def test_no_ping_follows_the_end(
    delay_s: float, num_pings: int, run_in_virtual_time: Callable[..., Any]
) -> None:
    """The reader stops, a ping comes before the event or while it waits, and the reader goes on."""

    async def scenario() -> list[bytes]:
        server = Server()
        server.readable.set()
        closed: list[bool] = []
        response = SseResponse(
            one_event(delay_s), ping_s=0.02, on_close=lambda: closed.append(True), headers={}
        )
        answering = asyncio.create_task(response(SCOPE, never, server.send))
        await asyncio.sleep(0.01)
        server.readable.clear()
        await asyncio.sleep(0.15)
        server.readable.set()
        await answering
        assert closed == [True]
        return server.bodies

    bodies = run_in_virtual_time(scenario())
    pings = [b": ping\n\n"] * num_pings
    assert bodies == [b"", *pings, b"data: 1\n\n", b"data: [DONE]\n\n", b""]


def test_a_second_cancellation_does_not_skip_on_close(
    run_in_virtual_time: Callable[..., Any],
) -> None:
    async def stubborn() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # ends slowly when it is cancelled

    async def scenario() -> list[bool]:
        server = Server()
        server.readable.set()
        closed: list[bool] = []
        response = SseResponse(
            stubborn(), ping_s=10, on_close=lambda: closed.append(True), headers={}
        )
        answering = asyncio.create_task(response(SCOPE, never, server.send))
        for _ in range(2):
            await asyncio.sleep(0.01)
            answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        return closed

    assert run_in_virtual_time(scenario()) == [True]
