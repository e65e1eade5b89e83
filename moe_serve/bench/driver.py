"""Closed and open loops: decides when each request is sent.

An open loop never waits for answers. A request that the client could not send in time keeps the
time at which it was due, and its latency counts from there: a slow server cannot slow its own load
down (coordinated omission), and a slow client shows as lateness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

from moe_serve.bench.figures.record import RequestRecord
from moe_serve.bench.workload.request import Ready


class Sender(Protocol):
    """The interface of `Client` that the loops use."""

    async def send(self, request: Ready, scheduled_s: float | None = None) -> RequestRecord: ...


class Timer(Protocol):
    """A clock that counts seconds since the run began."""

    def now(self) -> float: ...

    async def sleep_until(self, at_s: float) -> None: ...


class Collected:
    """The records of a run as they arrive; an interrupted run keeps those that had ended."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    async def send(self, sender: Sender, request: Ready, scheduled_s: float | None) -> None:
        self.records.append(await sender.send(request, scheduled_s))


async def closed_loop(
    sender: Sender,
    requests: Iterator[Ready],
    collected: Collected,
    timer: Timer,
    *,
    concurrency: int,
    duration_s: float | None = None,
) -> None:
    """Runs `concurrency` clients, each of which sends its next request when its last one is
    answered."""

    async def one_client() -> None:
        for request in requests:  # shared: each takes the next
            if duration_s is not None and timer.now() >= duration_s:
                return
            await collected.send(sender, request, None)

    await _all([asyncio.ensure_future(one_client()) for _ in range(concurrency)])


async def open_loop(
    sender: Sender,
    requests: Iterator[Ready],
    collected: Collected,
    timer: Timer,
    *,
    max_in_flight: int,
) -> None:
    """Sends each request when it is due. Requests beyond `max_in_flight` wait here and count as
    late."""
    places = asyncio.Semaphore(max_in_flight)
    running: set[asyncio.Future[None]] = set()
    bugs: list[BaseException] = []  # a request that fails is a record; an exception is a bug

    async def one_request(request: Ready) -> None:
        try:
            await collected.send(sender, request, request.at_s)
        finally:
            places.release()

    def ended(task: asyncio.Future[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            bugs.append(error)

    try:
        for request in requests:  # the body is made here, before the request is due
            await timer.sleep_until(request.at_s)
            await places.acquire()
            task = asyncio.ensure_future(one_request(request))
            running.add(task)
            task.add_done_callback(ended)
            if bugs:
                raise bugs[0]
    except BaseException:
        for unfinished in running:
            unfinished.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
    await _all(list(running))


async def _all(tasks: list[asyncio.Future[None]]) -> None:
    """Waits for all tasks; a task that raises, which only a bug does, ends the others."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
