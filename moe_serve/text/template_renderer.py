"""Renders chats in worker processes: quick ones in parallel, slow ones one after the other.

    order -> quick lane (2 processes, 0.2 s) -> text, or the template's error
                 |  took longer, or more memory
                 v
             slow lane (1 process, 0.8 s)    -> text, or the reason for the failure

A slow chat holds its place in the quick lane only briefly, so chats behind it wait only briefly,
however many slow chats there are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from moe_serve.errors import ServerOverloadedError
from moe_serve.text.template_frames import Kind, Reply, Setup
from moe_serve.text.template_process import TemplateWorker

_MIB = 1024 * 1024
_MAX_RETRY_WAIT_S = 0.5
_RETRIED = (Kind.LATE, Kind.LARGE)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """The limits of one lane. The memory limit applies to each rendering in each process."""

    num_workers: int
    max_seconds: float
    max_bytes: int
    max_order_bytes: int | None  # larger orders skip this lane
    max_waiting: int


QUICK = LaneLimits(
    num_workers=2, max_seconds=0.2, max_bytes=64 * _MIB, max_order_bytes=_MIB, max_waiting=1024
)
SLOW = LaneLimits(
    num_workers=1, max_seconds=0.8, max_bytes=192 * _MIB, max_order_bytes=None, max_waiting=32
)


class TemplateRenderer:
    """The worker processes of one template. `render` blocks; `render_async` does not."""

    def __init__(self, setup: Setup) -> None:
        """`setup` has the limits of the slow lane, which are the final ones."""
        quick = min(QUICK.max_seconds, setup.max_seconds)
        self._quick = _Lane(
            replace(setup, max_seconds=quick, max_bytes=min(QUICK.max_bytes, setup.max_bytes)),
            QUICK,
        )
        self._slow = _Lane(setup, SLOW)

    def check(self) -> Reply | None:
        """Start a process of each lane; returns the reply with the reason if the template cannot be
        compiled.
        """
        self._slow.start()  # so that a slow chat need not wait for the start
        return self._quick.check()

    def render(self, order: bytes) -> Reply:
        """Answer an encoded Order. Raises ServerOverloadedError and TemplateWorkerError."""
        for lane in self._lanes(order):
            reply = lane.submit(order).result()
            if reply.kind not in _RETRIED:
                break
        return reply

    async def render_async(self, order: bytes) -> Reply:
        """Answer an encoded Order without blocking the event loop.

        A chat that took too long in the quick lane waits only briefly for the slow one, so that its
        client has an answer soon: ServerOverloadedError if others are before it.
        """
        max_wait_s = None
        for lane in self._lanes(order):
            reply = await _awaited(lane.submit(order), max_wait_s)
            if reply.kind not in _RETRIED:
                break
            max_wait_s = _MAX_RETRY_WAIT_S
        return reply

    def close(self) -> None:
        """End the processes, and refuse every later order."""
        self._quick.close()
        self._slow.close()

    def _lanes(self, order: bytes) -> Iterator[_Lane]:
        assert QUICK.max_order_bytes is not None, "large orders skip the quick lane"
        if len(order) <= QUICK.max_order_bytes:
            yield self._quick
        yield self._slow


async def _awaited(future: Future[Reply], max_wait_s: float | None) -> Reply:
    """Return the reply, if the order is begun within `max_wait_s`."""
    reply = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait([reply], timeout=max_wait_s)
        if not done and future.cancel():
            raise ServerOverloadedError(
                "This chat takes long to render, and other slow chats are before it. "
                "Try again later.",
                retry_after_s=2.0,
            )
        return await reply
    finally:
        reply.cancel()  # the client may have left; an order that has ended or runs is not affected


class _Lane:
    """Some workers with a thread each, and the orders that wait for them."""

    def __init__(self, setup: Setup, limits: LaneLimits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.num_workers, "moe-serve-template")
        self._lock = threading.Lock()  # guards the fields below
        self._num_open = 0
        self._is_closed = False
        self._idle = [TemplateWorker(setup) for _ in range(limits.num_workers)]

    def check(self) -> Reply | None:
        """Start a process; returns the reply with the reason if the template cannot be compiled."""
        return self._threads.submit(self._with_worker, TemplateWorker.make_ready).result()

    def start(self) -> None:
        """Start a process without waiting for it."""
        self._threads.submit(self._with_worker, TemplateWorker.start).result()

    def submit(self, order: bytes) -> Future[Reply]:
        most = self._limits.max_waiting + self._limits.num_workers
        with self._lock:
            if self._num_open >= most:
                raise ServerOverloadedError(
                    f"{self._num_open} chats wait to be rendered; at most {most} may wait. "
                    "Try again later.",
                    retry_after_s=1.0,
                )
            self._num_open += 1
        future = self._threads.submit(self._with_worker, TemplateWorker.ask, order)
        future.add_done_callback(self._count_down)
        return future

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._close_idle()

    def _with_worker(self, work: Callable[..., T], *args: bytes) -> T:
        """Run `work` with an idle worker, preferring a started one; there are as many workers as
        threads.
        """
        with self._lock:
            worker = max(self._idle, key=lambda each: each.readiness)
            self._idle.remove(worker)
        try:
            return work(worker, *args)
        finally:
            with self._lock:
                self._idle.append(worker)
            if self._is_closed:
                self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            for worker in self._idle:
                worker.close()

    def _count_down(self, _: Future[Reply]) -> None:
        with self._lock:
            self._num_open -= 1
