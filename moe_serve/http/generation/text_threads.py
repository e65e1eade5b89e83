"""Threads that tokenize texts too long for the event loop: a few at once, separated by size."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moe_serve.errors import ServerOverloadedError

MAX_INLINE_CHARS = 4096
# The largest text of each class in characters, and the number of threads of the class. A text waits
# only for texts of its own class, so that a short one never waits for a very long one. A character
# can take 130 bytes while its text is tokenized, so the classes together bound the memory.
_CLASSES = ((65_536, 2), (1_048_576, 1), (None, 1))
_MAX_WAITING_CHARS = 64 * 1024 * 1024
T = TypeVar("T")


class TextThreads:
    """Runs work on texts without blocking the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the count
        self._num_chars = 0  # of the texts that run or wait
        self._classes = [
            (limit, ThreadPoolExecutor(count, "moe-serve-text")) for limit, count in _CLASSES
        ]

    async def run(self, work: Callable[[], T], num_chars: int) -> T:
        """Runs `work`: at once for a short text, else in a thread.

        Raises ServerOverloadedError if too many characters wait already.
        """
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        if self._num_chars and self._num_chars + num_chars > _MAX_WAITING_CHARS:
            raise ServerOverloadedError(
                f"Texts with {self._num_chars} characters are waiting to be tokenized; the limit "
                f"is {_MAX_WAITING_CHARS}. Try again later.",
                retry_after_s=1.0,
            )
        threads = next(each for limit, each in self._classes if limit is None or num_chars <= limit)
        self._count(num_chars)
        future = threads.submit(work)
        future.add_done_callback(lambda _: self._count(-num_chars))
        return await asyncio.wrap_future(future)

    def _count(self, num_chars: int) -> None:
        with self._lock:
            self._num_chars += num_chars
