"""The interface of a tier: a store that keeps copies of KV pages by their keys.

A store works on threads of its own. `save` and `load` only queue a job; `take_done` returns the
results later, on the thread that asks. The caller never shares memory with a job that runs: a saved
page is copied before, and a loaded page arrives in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SavedPage:
    """A full page to be kept. `data` is owned by the job."""

    key: bytes
    parent_key: bytes
    num_tokens: int
    data: NDArray[np.uint8]


LoadedPages = tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The end of a load: the pages of the run's beginning that were read and proven."""

    job: int
    pages: LoadedPages
    num_wanted: int
    seconds: float  # from the first read to the last, without the time in the queue

    @property
    def num_bytes(self) -> int:
        return sum(page.nbytes for page in self.pages)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a load that runs."""

    num_read: int  # pages that were read and proven
    seconds: float  # since the first read


LoadResult = Literal["hit", "late", "corrupt", "failed", "skipped_slow"]
SaveResult = Literal["saved", "dropped", "failed", "over_budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A snapshot of a tier. Filled by the store and by its users."""

    name: str  # disk
    where: str  # the folder
    is_reading: bool = False  # False: not opened yet, or switched off
    is_writing: bool = False
    state: str = ""  # why it does not read or write; empty: it does both
    num_pages: int = 0
    num_bytes: int = 0  # on the disk, headers included
    capacity_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    num_evicted: int = 0
    num_queued: int = 0  # pages that are not written yet
    loads: dict[str, int] = field(default_factory=dict)  # pages by LoadResult
    saves: dict[str, int] = field(default_factory=dict)  # pages by SaveResult
    queried_tokens: int = 0  # prompt tokens that the cache did not have
    hit_tokens: int = 0  # those that came from the tier
    read_bytes_per_s: float | None = None  # of the last loads; None: none yet
    memory: TierStats | None = None  # the shared memory through which ranks use a disk

    @property
    def parts(self) -> tuple[TierStats, ...]:
        """This tier, and the memory in front of it."""
        return (self,) if self.memory is None else (self, self.memory)


class PageStore(Protocol):
    """Keeps pages by key. All methods are called on the engine's thread."""

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Returns how many keys, from the first on, the store has. Never touches the disk."""
        ...

    def has(self, key: bytes) -> bool:
        """Returns whether a page is stored, or queued for it. Never touches the disk."""
        ...

    @property
    def room(self) -> int:
        """Number of pages that `save` accepts now without dropping another."""
        ...

    @property
    def read_rate(self) -> float | None:
        """Bytes per second of the last load, or measured at the start; None: not known."""
        ...

    def buffer(self) -> NDArray[np.uint8]:
        """Returns memory for the bytes of a page that is to be saved, [bytes of a page]."""
        ...

    def save(self, page: SavedPage) -> None:
        """Queues a page, whose data may be in memory that `buffer` returned. The oldest queued page
        is dropped if the queue is full."""
        ...

    def flush(self) -> None:
        """Begins to write the queued pages now, without waiting for more."""
        ...

    def load(self, job: int, keys: Sequence[bytes]) -> None:
        """Queues a run of pages to be read."""
        ...

    def progress(self, job: int) -> LoadProgress | None:
        """Returns how far a load is; None before its first read, and once it has ended."""
        ...

    def read_pages(self, job: int, start: int) -> LoadedPages:
        """Returns the pages of a running load from `start` on that have been read without a gap.
        The end of the load, or `cancel`, returns them again."""
        ...

    def cancel(self, job: int) -> LoadedPages:
        """Ends a load after the pages that are being read now. Returns the pages of the run's
        beginning that were read before. `take_done` still returns the load's end."""
        ...

    def take_done(self) -> list[LoadDone]:
        """Returns the loads that have ended since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Waits until a load ends or has read many more pages, but at most for the given time."""
        ...

    def set_waker(self, wake: Callable[[], None]) -> None:
        """Sets a callback for the end of a load. A thread of the store calls it."""
        ...

    def stop_reading(self, why: str) -> None:
        """Makes the store report that it holds no pages, until the process ends."""
        ...

    def stats(self) -> TierStats:
        """Returns a snapshot; safe from any thread."""
        ...

    def close(self, seconds: float) -> None:
        """Writes the queued pages, at most for a time, and ends the threads."""
        ...
