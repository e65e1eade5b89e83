"""Writes past the event loop's own: the same bytes in the same order, for every reader."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from moe_serve.http.wire.transports import DirectTransport

Run = Callable[[Coroutine[Any, Any, Any]], Any]
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


class Writer(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.num_pauses = 0

    def pause_writing(self) -> None:
        self.num_pauses += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def connected() -> tuple[DirectTransport, Writer, socket.socket]:
    """Returns a transport, its protocol, and the reader's end, with small kernel buffers
    between."""
    listener = socket.create_server(("127.0.0.1", 0))
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(listener.getsockname())
    ours, _ = listener.accept()
    listener.close()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, writer = await loop.connect_accepted_socket(Writer, ours)
    return DirectTransport(transport), writer, reader


@both_loops
def test_a_slow_reader_gets_every_byte_in_order(run: Run) -> None:
    rng = random.Random(1)
    parts = [rng.randbytes(rng.choice([1, 7, 200, 5_000, 60_000])) for _ in range(400)]

    async def scenario() -> tuple[bytes, int]:
        loop = asyncio.get_running_loop()
        transport, writer, reader = await connected()

        async def write() -> None:
            for part in parts:
                transport.write(part)
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
            transport.close()

        async def read() -> bytes:
            taken = bytearray()
            while chunk := await loop.sock_recv(reader, rng.choice([100, 30_000])):
                taken += chunk
            return bytes(taken)

        _, taken = await asyncio.gather(write(), read())
        reader.close()
        return taken, writer.num_pauses

    taken, num_pauses = run(scenario())
    assert taken == b"".join(parts)
    assert num_pauses > 0, "the reader was never too slow: nothing was shown"


@both_loops
def test_what_is_small_is_sent_at_once(run: Run) -> None:
    """A small write is sent in the same turn of the loop."""

    async def scenario() -> bytes:
        transport, _, reader = await connected()
        transport.write(b"now")
        reader.setblocking(True)
        reader.settimeout(10)
        taken = reader.recv(10)  # the loop does not run meanwhile
        transport.close()
        reader.close()
        return taken

    assert run(scenario()) == b"now"


@both_loops
def test_a_closed_transport_does_not_write_to_who_has_its_descriptor_now(run: Run) -> None:
    async def scenario() -> bytes:
        transport, writer, reader = await connected()
        descriptor = transport.get_extra_info("socket").fileno()
        transport.close()
        await writer.lost.wait()
        with contextlib.suppress(OSError):
            while os.fstat(descriptor):  # until it is closed
                await asyncio.sleep(0.001)
        source, sink = os.pipe()
        if descriptor not in (source, sink):
            os.dup2(sink, descriptor)
        with contextlib.suppress(RuntimeError):  # of uvloop
            transport.write(b"an answer")
        os.set_blocking(source, False)
        reader.close()
        try:
            return os.read(source, 100)
        except BlockingIOError:
            return b""
        finally:
            for opened in {source, sink, descriptor}:
                os.close(opened)

    assert run(scenario()) == b""


@both_loops
def test_a_reader_that_is_gone_ends_the_connection(run: Run) -> None:
    """The caller gets no error, and the protocol is told, as the transport's own write does it."""

    async def scenario() -> bool:
        transport, writer, reader = await connected()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # resets
        reader.close()
        for _ in range(100):
            transport.write(b"x" * 1000)
            await asyncio.sleep(0.001)
            if writer.lost.is_set():
                break
        await asyncio.wait_for(writer.lost.wait(), 10)
        return transport.is_closing()

    assert run(scenario())
