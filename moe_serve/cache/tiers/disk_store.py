"""Keeps KV pages on a disk, where a later server finds them.

    engine thread                 writer thread                     reader threads
    save: queue (bounded) ----->  slot behind slot, then the index
    load: queue ----------------------------------------------->    read, prove, hand over
    take_done  <------------------------------------------------    result

The writer opens the folder first, because the identity needs a digest of every weight file. Until
then the store holds nothing. A page is in the index only after it was written, and a loaded page
is handed over only if header and digest prove it. A failure of the disk is a page that is not
found, never an error for a client.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.tiers.disk_folder import DiskFolder, IdentityFolder, StoreIdentity
from moe_serve.cache.tiers.disk_index import DiskIndex
from moe_serve.cache.tiers.disk_reader import DiskReader, be_nice
from moe_serve.cache.tiers.disk_space import DiskLimits, DiskSpace, num_slots_of
from moe_serve.cache.tiers.page_cipher import DiskKey, PageCipher, check_key
from moe_serve.cache.tiers.page_memory import PageBuffers
from moe_serve.cache.tiers.segment import Segment
from moe_serve.cache.tiers.slot import ALIGNMENT, SlotHeader, StoredPage, slot_bytes
from moe_serve.cache.tiers.store import (
    LoadDone,
    LoadedPages,
    LoadProgress,
    SavedPage,
    TierStats,
)

_log = logging.getLogger(__name__)

_MOST_QUEUED_BYTES = 64 * 2**20
# The writer waits so long, or for so many pages, so that it is woken once for several steps.
_GATHER_S, _GATHERED = 0.1, 16
_IDLE_S = 1.0  # seconds without a page to write, after which its memory goes back to the system
_MOST_FAILURES = 3  # in turn, before the writer stops


class DiskStore:
    """A `PageStore` in a folder. `identify` runs on the writer thread."""

    def __init__(
        self,
        folder: DiskFolder,
        limits: DiskLimits,
        *,
        page_bytes: int,
        geometry: bytes,
        identify: Callable[[], StoreIdentity],
        key: DiskKey | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`key` encrypts the pages; with None they are not encrypted. Raises ConfigError if the
        bounds are too small for the pages, or the folder has pages of another key.
        """
        self._folder, self._limits, self._geometry = folder, limits, geometry
        self._page_bytes, self._slot_bytes = page_bytes, slot_bytes(page_bytes)
        num_slots_of(limits, self._slot_bytes)  # refuses a bound that is too small
        check_key(folder.path, key)
        self._identify, self._wall_clock = identify, wall_clock
        self._key = key
        self._cipher: PageCipher | None = None  # known once the folder is open
        self._index = DiskIndex()
        self._space: DiskSpace | None = None
        self._own: IdentityFolder | None = None
        self._state, self._write_state = "reading the weights' digest", ""
        self._open: Segment | None = None  # the file that is being filled
        self._most_queued = max(16, _MOST_QUEUED_BYTES // page_bytes)
        self._gathered = min(_GATHERED, self._most_queued // 2)
        self._buffers = PageBuffers(self._most_queued + 1, page_bytes)  # one is being written
        self._queue: deque[SavedPage] = deque()
        self._queued: set[bytes] = set()
        self._changed = threading.Condition()  # of the queue
        self._reader = DiskReader(
            self._index, page_bytes=page_bytes, geometry=geometry, wall_clock=wall_clock
        )
        self._is_closing = self._is_flushing = False
        self._num_failures = self._written_bytes = 0
        self._num_saves = Counter[str]()
        self._writer = threading.Thread(
            target=self._write_loop, name="moe-serve-kv-writer", daemon=True
        )
        self._writer.start()

    def num_held(self, keys: Sequence[bytes]) -> int:
        """See `PageStore.num_held`."""
        return 0 if self._state else self._index.num_held(map(self._name, keys))

    def has(self, key: bytes) -> bool:
        """See `PageStore.has`."""
        return key in self._queued or self._name(key) in self._index

    @property
    def room(self) -> int:
        """See `PageStore.room`."""
        return 0 if self._write_state else self._most_queued - len(self._queue)

    @property
    def read_rate(self) -> float | None:
        """See `PageStore.read_rate`."""
        return self._reader.rate

    def buffer(self) -> NDArray[np.uint8]:
        """See `PageStore.buffer`."""
        return self._buffers.take()

    def save(self, page: SavedPage) -> None:
        """See `PageStore.save`."""
        assert len(page.data) == self._page_bytes, f"a page of {len(page.data)} bytes"
        with self._changed:
            if self._write_state or self._is_closing:
                self._num_saves["dropped"] += 1
                self._buffers.give_back(page.data)
                return
            if len(self._queue) >= self._most_queued:
                oldest = self._queue.popleft()
                self._queued.discard(oldest.key)
                self._buffers.give_back(oldest.data)
                self._num_saves["dropped"] += 1
            self._queue.append(page)
            self._queued.add(page.key)
            if len(self._queue) in (1, self._gathered):  # other pages need not wake it
                self._changed.notify_all()

    def flush(self) -> None:
        """See `PageStore.flush`."""
        with self._changed:
            self._is_flushing = bool(self._queue)
            self._changed.notify_all()

    def load(self, job: int, keys: Sequence[bytes]) -> None:
        """See `PageStore.load`."""
        self._reader.load(job, [self._name(key) for key in keys])

    def progress(self, job: int) -> LoadProgress | None:
        """See `PageStore.progress`."""
        return self._reader.progress(job)

    def read_pages(self, job: int, start: int) -> LoadedPages:
        """See `PageStore.read_pages`."""
        return self._reader.read_pages(job, start)

    def cancel(self, job: int) -> LoadedPages:
        """See `PageStore.cancel`."""
        return self._reader.cancel(job)

    def take_done(self) -> list[LoadDone]:
        """See `PageStore.take_done`."""
        return self._reader.take_done()

    def wait(self, seconds: float) -> None:
        """See `PageStore.wait`."""
        self._reader.wait(seconds)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `PageStore.set_waker`."""
        self._reader.set_waker(wake)

    def stop_reading(self, why: str) -> None:
        """See `PageStore.stop_reading`."""
        self._state = why

    def stats(self) -> TierStats:
        """See `PageStore.stats`."""
        return TierStats(
            name="disk",
            where=str(self._folder.path),
            is_reading=not self._state,
            is_writing=not (self._state or self._write_state),
            state=self._state or self._write_state,
            num_pages=len(self._index),
            num_bytes=self._index.num_bytes,
            capacity_bytes=self._limits.max_bytes if self._space is None else self._space.max_bytes,
            read_bytes=self._reader.num_bytes,
            written_bytes=self._written_bytes,
            num_evicted=0 if self._space is None else self._space.num_evicted,
            num_queued=len(self._queued),
            loads=dict(self._reader.num_pages),
            saves=dict(self._num_saves),
            read_bytes_per_s=self._reader.rate,
        )

    def close(self, seconds: float) -> None:
        """See `PageStore.close`. It does not wait for a thread that hangs."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._reader.end()
        deadline = time.monotonic() + seconds
        self._writer.join(max(0.0, deadline - time.monotonic()))
        for thread in self._reader.threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._folder.release()

    def _write_loop(self) -> None:
        be_nice()
        try:
            self._open_folder()
            while (page := self._next()) is not None:
                self._keep(page)
            if self._open is not None:
                self._seal(self._open) if self._open.is_full else self._open.sync()
        except Exception as error:
            self._stop_writing(f"{type(error).__name__}: {error}")

    def _open_folder(self) -> None:
        own = self._folder.open_identity(self._identify())
        now = self._wall_clock()
        for path in own.segments:
            segment = Segment.open(path, self._slot_bytes, own.secret)
            if segment is None:
                path.unlink()
                continue
            self._index.add_segment(segment, segment.entries(own.secret), now)
            if not segment.is_sealed:
                self._open = segment  # the newest is filled further
        self._own = own
        self._cipher = None if self._key is None else self._key.cipher(own.secret)
        self._reader.open(own.secret, self._cipher)
        self._space = DiskSpace(
            self._folder, own, self._index, self._limits, self._slot_bytes, self._wall_clock
        )
        if self._state.startswith("reading"):
            self._state = ""

    def _next(self) -> SavedPage | None:
        """Waits for a queued page; None at the end."""
        with self._changed:
            while not self._queue and not self._is_closing:
                if not self._changed.wait(_IDLE_S if self._buffers.is_used else None):
                    self._buffers.trim()
                elif not (self._is_closing or self._is_flushing or self._has_gathered):
                    self._changed.wait(_GATHER_S)
            page = self._queue.popleft() if self._queue else None
            self._is_flushing = self._is_flushing and bool(self._queue)
            return page

    @property
    def _has_gathered(self) -> bool:
        return len(self._queue) >= self._gathered

    def _keep(self, page: SavedPage) -> None:
        """Writes one page. A failure drops the page, and the third failure in a row ends the
        writing.
        """
        result = "failed"
        try:
            assert self._space is not None, "the folder is open"
            if self._name(page.key) in self._index:
                result = "saved"
            elif not self._space.may_write(self._slot_bytes):
                result = "over_budget"
            elif self._append(self._stored(page, self._wall_clock())):
                result, self._num_failures = "saved", 0
            else:
                result = "dropped"
        except OSError as error:
            self._num_failures += 1
            if self._num_failures >= _MOST_FAILURES:
                self._stop_writing(str(error))
        finally:
            with self._changed:
                self._queued.discard(page.key)
            self._num_saves[result] += 1
            self._buffers.give_back(page.data)

    def _stored(self, page: SavedPage, now: float) -> StoredPage:
        """Returns a page as it is written: with its header, and encrypted if there is a key."""
        header = SlotHeader(
            num_tokens=page.num_tokens,
            generation=secrets.randbits(64),
            key=self._name(page.key),
            parent_key=self._name(page.parent_key),
            geometry=self._geometry,
            num_bytes=len(page.data),
            digest=sha256(page.data.data).digest() if self._cipher is None else b"",
            written_at=now,
            expires_at=now + self._limits.ttl_s,
        )
        if self._cipher is None:
            return StoredPage(header, page.data)
        data, seal = self._cipher.encrypt(page.data, header.context)
        return StoredPage(replace(header, digest=sha256(data.data).digest()), data, seal)

    def _name(self, key: bytes) -> bytes:
        """Returns the key under which a page is in the index and on the disk."""
        return key if self._cipher is None else self._cipher.name(key)

    def _append(self, page: StoredPage) -> bool:
        """Writes a slot, into a new file if the open one is full. False if there is no space."""
        assert self._space is not None and self._own is not None, "the folder is open"
        if self._open is None or self._open.is_full:
            if self._open is not None:
                self._seal(self._open)
            made = self._space.new_segment()
            if made is None:
                self._open = None
                return False
            self._open, survivors = made
            self._index.add_segment(self._open)
            self._written_bytes += ALIGNMENT  # its head
            for survivor in survivors:
                self._put(self._open, survivor)
        self._put(self._open, page)
        return True

    def _put(self, segment: Segment, page: StoredPage) -> None:
        assert self._own is not None, "the folder is open"
        slot = segment.write(page, self._own.secret)
        self._index.add(page.header.key, segment, slot)
        self._written_bytes += self._slot_bytes

    def _seal(self, segment: Segment) -> None:
        """Writes the footer, if the day's budget has room for it. A start does not need it."""
        assert self._space is not None and self._own is not None, "the folder is open"
        if not self._space.may_write(segment.footer_bytes):
            segment.sync()
            return
        self._written_bytes += segment.footer_bytes
        segment.seal(self._own.secret)

    def _stop_writing(self, why: str) -> None:
        _log.warning("the disk tier in %s stopped writing: %s", self._folder.path, why)
        with self._changed:
            self._write_state = f"writing failed: {why}"
            if self._space is None:
                self._state = self._write_state
            self._num_saves["dropped"] += len(self._queue)
            self._queue.clear()
            self._queued.clear()
