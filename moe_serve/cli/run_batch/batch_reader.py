"""Reads the lines of a batch in a thread, so that a slow producer delays nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

AHEAD_LINES = 64  # lines read ahead

Numbered = tuple[int, bytes]  # from 1


class BatchReader:
    """Hands out lines in order to several tasks of the running loop. Use `with`.

    The thread opens the input and reads it, as both may wait for a producer. It is a daemon, so
    that it can be abandoned at the end if it still waits.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._found = asyncio.Queue[Numbered | BaseException | None]()
        self._room = threading.Semaphore(AHEAD_LINES)
        self._lock = threading.Lock()  # of the following
        self._is_closed = False

    def __enter__(self) -> BatchReader:
        threading.Thread(target=self._read, name="batch-reader", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._is_closed = True
        self._room.release()

    async def next(self) -> Numbered | None:
        """Returns the next line; None after the last one. Raises the error that reading raised."""
        found = await self._found.get()
        if isinstance(found, tuple):
            self._room.release()
            return found
        self._found.put_nowait(found)  # every waiting task gets the end
        if found is not None:
            raise found
        return None

    def _read(self) -> None:
        try:
            for numbered in enumerate(self._lines, start=1):
                self._room.acquire()
                if not self._hand_over(numbered):
                    return
            self._hand_over(None)
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, found: Numbered | BaseException | None) -> bool:
        """Hands a line over; False if no more lines are wanted, in which case the loop may have
        ended."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._found.put_nowait, found)
            return not self._is_closed
