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
import contextlib
import logging
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from moe_serve.child_python import (
    FrameTooLargeError,
    module_command,
    receive_frame,
    send_frame,
)
from moe_serve.errors import ServerOverloadedError
from moe_serve.text.template_frames import Kind, Reply, Setup

_log = logging.getLogger(__name__)

_COMMAND = module_command("moe_serve.text.template_worker")
_START_TIMEOUT_S = 60.0  # usually a tenth of a second
# The worker ends itself; these limits are for one that the system delays.
_GRACE_S = 5.0
_EXIT_TIMEOUT_S = 1.0
_BYTES_PER_CHAR = 4  # in UTF-8
# Environment variables that a template can observe through `strftime_now`, and those Python needs.
_KEPT_VARIABLES = (
    "PATH",
    "TZ",
    "LANG",
    "LD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "VIRTUAL_ENV",
)


class TemplateWorkerError(ServerOverloadedError):
    """No process that renders chats can be started; the message gives the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=5.0)


class TemplateWorker:
    """A process for one template. Only one thread may use it at a time.

    It starts with the first request, or earlier by `start`.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Callable[[], object] | None = None
        self._is_ready = False

    @property
    def readiness(self) -> int:
        """Readiness to render: 2 at once, 1 when its process has started, 0 without a process."""
        return 0 if self._process is None else 1 + self._is_ready

    def ask(self, order: bytes) -> Reply:
        """Returns the answer to an encoded Order. Errors of the rendering do not raise.

        Raises TemplateWorkerError if no worker can be started.
        """
        invalid = self.make_ready()
        if invalid is not None:
            return invalid
        process = self._process
        assert process is not None and process.stdin and process.stdout, "it was just made ready"
        timeout_s = self._setup.max_seconds + _GRACE_S
        max_bytes = 1024 + _BYTES_PER_CHAR * self._setup.max_chars
        try:
            send_frame(process.stdin.fileno(), order, timeout_s)
            content = receive_frame(process.stdout.fileno(), timeout_s, max_bytes)
        except (BrokenPipeError, FrameTooLargeError, TimeoutError):
            content = None
        if content is None:
            _log.warning(
                "a process that renders chats ended unexpectedly (status %s)", process.poll()
            )
            self.close()
            return Reply(Kind.LARGE)
        return Reply.decode(content)

    def make_ready(self) -> Reply | None:
        """Waits until the template is compiled;
        returns the reply with the reason if it cannot be.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it ended between two requests, so neither caused it
        self.start()
        if self._is_ready:
            return None
        process = self._process
        assert process is not None and process.stdin and process.stdout, "it was just started"
        try:
            send_frame(process.stdin.fileno(), self._setup.encode(), _START_TIMEOUT_S)
            content = receive_frame(process.stdout.fileno(), _START_TIMEOUT_S)
        except (BrokenPipeError, TimeoutError):
            content = None
        if content is None:
            status = self._status()
            self.close()
            if status == -signal.SIGALRM:
                return Reply(Kind.INVALID, "compiling it takes too long")
            raise TemplateWorkerError(
                f"The process that renders chats ended before its first one (status {status})."
            )
        reply = Reply.decode(content)
        if reply.kind is Kind.READY:
            self._is_ready = True
            return None
        self.close()
        return reply

    def start(self) -> None:
        """Starts the process if there is none, without waiting for it."""
        if self._process is not None:
            return
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment["MALLOC_ARENA_MAX"] = "1"
        try:
            process = subprocess.Popen(
                _COMMAND,
                stdin=pipe,
                stdout=pipe,
                stderr=nothing,
                bufsize=0,
                env=environment,
                start_new_session=True,  # so that it can be ended together with its child
            )
        except OSError as error:
            raise TemplateWorkerError(
                f"The process that renders chats cannot be started: {error}."
            ) from None
        assert process.stdin is not None, "the process has pipes"
        os.set_blocking(process.stdin.fileno(), False)
        self._process, self._is_ready = process, False
        self._finalizer = weakref.finalize(self, _end, process)

    def close(self) -> None:
        """Ends the process. The next request starts another one."""
        finalizer, self._finalizer = self._finalizer, None
        self._process, self._is_ready = None, False
        if finalizer is not None:
            finalizer()

    def _status(self) -> int | None:
        assert self._process is not None, "there is a process"
        try:
            return self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "the process has pipes"
        pipe.close()


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
        """Starts a process of each lane; returns the reply with the reason if the template cannot
        be compiled.
        """
        self._slow.start()  # so that a slow chat need not wait for the start
        return self._quick.check()

    def render(self, order: bytes) -> Reply:
        """Answers an encoded Order. Raises ServerOverloadedError and TemplateWorkerError."""
        for lane in self._lanes(order):
            reply = lane.submit(order).result()
            if reply.kind not in _RETRIED:
                break
        return reply

    async def render_async(self, order: bytes) -> Reply:
        """Answers an encoded Order without blocking the event loop.

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
        """Ends the processes, and refuses every later order."""
        self._quick.close()
        self._slow.close()

    def _lanes(self, order: bytes) -> Iterator[_Lane]:
        assert QUICK.max_order_bytes is not None, "large orders skip the quick lane"
        if len(order) <= QUICK.max_order_bytes:
            yield self._quick
        yield self._slow


async def _awaited(future: Future[Reply], max_wait_s: float | None) -> Reply:
    """Returns the reply, if the order is begun within `max_wait_s`."""
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
        """Starts a process; returns the reply with the reason if the template cannot be
        compiled."""
        return self._threads.submit(self._with_worker, TemplateWorker.make_ready).result()

    def start(self) -> None:
        """Starts a process without waiting for it."""
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
        """Runs `work` with an idle worker, preferring a started one; there are as many workers as
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
