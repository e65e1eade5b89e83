"""Computes independent tasks in several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from moe_serve.errors import ClusterError

Task = Callable[[], Any]
_FEW_TOKENS = 20_000


def useful_processes(num_tasks: int, num_tokens: int) -> int:
    """Returns how many processes to start for tasks that each simulate so many generated tokens: as
    many as cores, or one if the simulations take less time than the start of processes."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return 1 if num_tokens < _FEW_TOKENS else min(num_cores, num_tasks)


class Workers:
    """Computes tasks in processes of its own, which end with the `with` block. What a task returns
    does not depend on the number of processes."""

    def __init__(self, count: int) -> None:
        """With a `count` of 1 there are no processes: `result` computes."""
        self._waiting: deque[tuple[str, Task]] = deque()
        self._idle: list[Connection] = []
        self._busy: dict[Connection, str] = {}
        self._known: set[str] = set()
        self._results: dict[str, Any] = {}
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self.count = count
        context = multiprocessing.get_context("spawn")
        with _ignoring_interrupts():  # also in the processes: this one ends them
            for _ in range(count if count > 1 else 0):
                near, far = context.Pipe()
                process = context.Process(target=_work, args=(far,), daemon=True)
                process.start()
                far.close()
                self._processes.append(process)
                self._idle.append(near)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for link in (*self._idle, *self._busy):
            link.close()

    def start(self, key: str, function: Callable[..., Any], *arguments: object) -> None:
        """Hands in a task under a name, unless the name is known. Function, arguments and result
        travel between processes as pickles."""
        if key not in self._known:
            self._known.add(key)
            self._waiting.append((key, partial(function, *arguments)))
            self._hand_out()

    def result(self, key: str) -> Any:
        """Returns what a task that was handed in returns, or raises what it raises. Computes it
        before all others that have not begun."""
        task = next((each for each in self._waiting if each[0] == key), None)
        if task is not None:
            self._waiting.remove(task)
            self._waiting.appendleft(task)
        if not self._processes and task is not None:
            self._results[key] = self._waiting.popleft()[1]()
        while key not in self._results:
            self._hand_out()
            for link in wait([*self._busy]):
                assert isinstance(link, Connection), "only pipes are waited for"
                self._take(link)
        result = self._results[key]
        if isinstance(result, Exception):
            raise result
        return result

    def _hand_out(self) -> None:
        while self._idle and self._waiting:
            key, task = self._waiting.popleft()
            link = self._idle.pop()
            self._busy[link] = key
            link.send(task)

    def _take(self, link: Connection) -> None:
        key = self._busy.pop(link)
        try:
            self._results[key] = link.recv()
        except (EOFError, OSError):
            link.close()
            raise ClusterError(
                f"one of {self.count} processes was killed, perhaps as memory ran out: use fewer, "
                "with --processes."
            ) from None
        self._idle.append(link)


def _work(link: Connection) -> None:
    """Computes tasks until the other end of the pipe is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            task: Task = link.recv()
            try:
                result = task()
            except Exception as error:
                result = error
            link.send(result)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
