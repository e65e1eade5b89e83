"""Reads runs of pages from a disk on its own threads, and verifies every page.

A run is divided among the threads. It ends at the first page that is missing, expired or not
proven; the pages before it are handed over. A run that is given up ends after the pages that are
being read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.tiers.disk_index import DiskIndex, SlotPlace
from moe_serve.cache.tiers.page_cipher import PageCipher
from moe_serve.cache.tiers.slot import StoredPage
from moe_serve.cache.tiers.store import LoadDone, LoadedPages, LoadProgress

_log = logging.getLogger(__name__)

_NUM_THREADS = 2
_PART = 8  # pages that a thread reads at a time
_TOLD_PARTS = 4  # a waiting engine is woken after so many more pages, and takes them
_PROBED = 16  # pages read at the start, to measure the disk before the first request needs it
_NICENESS = 5


@dataclass(slots=True)
class _ReadRun:
    """A run that is being read, by its parts."""

    job: int
    parts: list[list[bytes]]
    begin: float = 0.0
    num_left: int = 0
    pages: list[list[NDArray[np.uint8]]] = field(default_factory=list)
    is_cancelled: bool = False

    def beginning(self) -> LoadedPages:
        """Returns the pages from the first on that were read so far. Threads may still read."""
        pages: list[NDArray[np.uint8]] = []
        for part, read in zip(self.parts, self.pages, strict=True):
            found = read.copy()  # a part that is still growing must not look complete
            pages += found
            if len(found) < len(part):
                break
        return tuple(pages)


class DiskReader:
    """Loads pages of an index. `open` gives it the secret that proves headers."""

    def __init__(
        self,
        index: DiskIndex,
        *,
        page_bytes: int,
        geometry: bytes,
        wall_clock: Callable[[], float],
    ) -> None:
        self._index, self._page_bytes, self._geometry = index, page_bytes, geometry
        self._wall_clock, self._secret = wall_clock, b""
        self._cipher: PageCipher | None = None
        self._queue: SimpleQueue[tuple[_ReadRun, int] | None] = SimpleQueue()
        self._runs: dict[int, _ReadRun] = {}  # by job
        self._lock = threading.Lock()
        self._done: deque[LoadDone] = deque()
        self._has_news = threading.Event()
        self._wake: Callable[[], None] = _nothing
        self.num_pages = Counter[str]()  # by LoadResult
        self.num_bytes = 0
        self.rate: float | None = None  # bytes per second of the last run
        self.threads = [
            threading.Thread(target=self._loop, name=f"moe-serve-kv-reader-{number}", daemon=True)
            for number in range(_NUM_THREADS)
        ]

    def open(self, secret: bytes, cipher: PageCipher | None) -> None:
        """Begins to read, with the secret that proves headers and the cipher that decrypts pages.
        Measures the disk, if it has pages.

        A failure of the disk is left to the loads that follow.
        """
        self._secret, self._cipher = secret, cipher
        keys, begin = self._index.some_keys(_PROBED), time.perf_counter()
        pages: list[NDArray[np.uint8]] = []
        self._read_some(keys, pages)
        if pages:
            self.rate = len(pages) * self._page_bytes / (time.perf_counter() - begin)
        for thread in self.threads:
            thread.start()

    def load(self, job: int, keys: Sequence[bytes]) -> None:
        """See `PageStore.load`."""
        parts = [list(keys[at : at + _PART]) for at in range(0, len(keys), _PART)]
        run = _ReadRun(job, parts, num_left=len(parts), pages=[[] for _ in parts])
        self._runs[job] = run
        for index in range(len(parts)):
            self._queue.put((run, index))

    def progress(self, job: int) -> LoadProgress | None:
        """See `PageStore.progress`."""
        run = self._runs.get(job)
        if run is None or not run.begin:
            return None
        return LoadProgress(sum(map(len, run.pages)), time.perf_counter() - run.begin)

    def read_pages(self, job: int, start: int) -> LoadedPages:
        """See `PageStore.read_pages`."""
        run = self._runs.get(job)
        return () if run is None else run.beginning()[start:]

    def cancel(self, job: int) -> LoadedPages:
        """See `PageStore.cancel`."""
        run = self._runs.get(job)
        if run is None:
            return ()
        run.is_cancelled = True
        return run.beginning()

    def take_done(self) -> list[LoadDone]:
        """See `PageStore.take_done`."""
        self._has_news.clear()
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def wait(self, seconds: float) -> None:
        """See `PageStore.wait`."""
        self._has_news.wait(seconds)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `PageStore.set_waker`."""
        self._wake = wake

    def end(self) -> None:
        """Ends the threads after the queued parts."""
        for _ in self.threads:
            self._queue.put(None)

    def _loop(self) -> None:
        be_nice()
        while (item := self._queue.get()) is not None:
            run, index = item
            run.begin = run.begin or time.perf_counter()
            try:
                self._read_some(run.parts[index], run.pages[index], run)
            except Exception:  # an internal error must not leave a request waiting
                _log.exception("the disk tier failed to read")
            with self._lock:
                run.num_left -= 1
                if run.num_left == 0:
                    self._finish(run)
                elif run.num_left % _TOLD_PARTS == 0:
                    self._has_news.set()

    def _finish(self, run: _ReadRun) -> None:
        pages = run.beginning()
        seconds, num_wanted = time.perf_counter() - run.begin, sum(map(len, run.parts))
        done = LoadDone(run.job, pages, num_wanted, seconds)
        self._runs.pop(run.job, None)
        if pages:
            self.num_pages["hit"] += len(pages)
            self.num_bytes += done.num_bytes
            self.rate = done.num_bytes / max(seconds, 1e-9)
        self._done.append(done)
        self._has_news.set()
        self._wake()

    def _read_some(
        self, keys: Sequence[bytes], pages: list[NDArray[np.uint8]], run: _ReadRun | None = None
    ) -> None:
        """Appends pages until one is missing or the run is cancelled."""
        for key in keys:
            if run is not None and run.is_cancelled:
                break
            page = None
            try:
                page = self._read(key)
            except OSError:
                self.num_pages["failed"] += 1
            if page is None:
                break
            pages.append(page)

    def _read(self, key: bytes) -> NDArray[np.uint8] | None:
        """Reads one page; None if it is missing, expired or not proven."""
        place = self._index.find(key)
        if place is None:
            return None
        stored = StoredPage.of(place.segment.read(place.slot), self._secret)
        page = None if stored is None else self._proven(stored, key, place)
        if stored is None or page is None:
            self.num_pages["corrupt"] += 1
        elif stored.header.expires_at > self._wall_clock():
            return page
        self._index.drop(key, place)
        return None

    def _proven(self, stored: StoredPage, key: bytes, place: SlotPlace) -> NDArray[np.uint8] | None:
        """Returns the bytes of a page if they are the page that the index describes."""
        header = stored.header
        if (header.key, header.generation) != (key, place.generation):
            return None
        if header.geometry != self._geometry or header.num_bytes != self._page_bytes:
            return None
        if self._cipher is None:
            return stored.payload
        return self._cipher.decrypt(stored.payload, header.context, stored.seal)


def be_nice() -> None:
    """Lowers the priority of the calling thread below those that compute, if the system can."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _nothing() -> None:
    """Does nothing."""
