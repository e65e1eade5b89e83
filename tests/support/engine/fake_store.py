"""A page store in memory whose answers can be late, missing or incomplete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.tiers.store import (
    LoadDone,
    LoadedPages,
    LoadProgress,
    SavedPage,
    TierStats,
)


class FakeStore:
    """Implements PageStore. `delay`: calls of `take_done` until a load ends; each reads as many
    pages."""

    def __init__(self, *, delay: int = 0, room: int = 1000) -> None:
        self.pages: dict[bytes, NDArray[np.uint8]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.delay, self.room = delay, room
        self.page_bytes = 16
        self.is_hanging = False
        self.most_pages: int | None = None  # that a load returns
        self.loads: list[list[bytes]] = []
        self.seconds = 0.001  # that a load says it took
        self.stopped = ""
        self.read_rate: float | None = None
        self._running: list[tuple[int, int, list[bytes]]] = []

    def num_held(self, keys: Sequence[bytes]) -> int:
        if self.stopped:
            return 0
        known = [key in self.pages for key in keys]
        return known.index(False) if False in known else len(known)

    def has(self, key: bytes) -> bool:
        return key in self.pages

    def buffer(self) -> NDArray[np.uint8]:
        return np.full(self.page_bytes, 255, dtype=np.uint8)

    def save(self, page: SavedPage) -> None:
        self.pages[page.key], self.parents[page.key] = page.data.copy(), page.parent_key

    def load(self, job: int, keys: Sequence[bytes]) -> None:
        self.loads.append(list(keys))
        self._running.append((job, self.delay, list(keys)))

    def progress(self, job: int) -> LoadProgress | None:
        return None if self.is_hanging else LoadProgress(len(self.read_pages(job, 0)), 0.0)

    def read_pages(self, job: int, start: int) -> LoadedPages:
        ((left, keys),) = ((left, keys) for number, left, keys in self._running if number == job)
        count = len(keys) * (self.delay - left) // (self.delay + 1)
        return self._pages(keys)[start:count]

    def cancel(self, job: int) -> LoadedPages:
        return ()

    def take_done(self) -> list[LoadDone]:
        if self.is_hanging:
            return []
        done, rest = [], []
        for job, delay, keys in self._running:
            if delay > 0:
                rest.append((job, delay - 1, keys))
                continue
            done.append(LoadDone(job, self._pages(keys), len(keys), self.seconds))
        self._running = rest
        return done

    def _pages(self, keys: list[bytes]) -> LoadedPages:
        pages = [self.pages[key].copy() for key in keys if key in self.pages]
        return tuple(pages[: self.most_pages])

    def wait(self, seconds: float) -> None: ...

    def set_waker(self, wake: Callable[[], None]) -> None: ...

    def stop_reading(self, why: str) -> None:
        self.stopped = why

    def stats(self) -> TierStats:
        return TierStats(name="fake", where="memory", is_writing=True)

    def close(self, seconds: float) -> None: ...
