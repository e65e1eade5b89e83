"""Keeps a disk tier within its bounds: bytes, free space, and bytes written per day.

Space is taken a file at a time. When it runs out, the oldest file is deleted; pages in it that
were read since they were written are written again (a second chance), at most half of a file and
64 MiB, so that every removal gains space and needs little memory.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moe_serve.cache.tiers.disk_folder import DiskFolder, IdentityFolder
from moe_serve.cache.tiers.disk_index import DiskIndex
from moe_serve.cache.tiers.page_memory import anonymous_memory
from moe_serve.cache.tiers.segment import SUFFIX, Segment, segment_bytes
from moe_serve.cache.tiers.slot import ALIGNMENT, StoredPage
from moe_serve.errors import ConfigError

_log = logging.getLogger(__name__)

_LEAST_SEGMENT = 64 * 2**20
_MOST_SEGMENTS = 128
_LEAST_SEGMENTS = 4
_MOST_SLOTS = 1 << 20
_MOST_SURVIVING = (
    64 * 2**20
)  # most bytes that get a second chance, because they are in memory meanwhile
_RESERVED = 16 * 2**20  # bytes of the day's budget that are noted at once


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """The bounds of a disk tier. All are hard."""

    max_bytes: int
    min_free_bytes: int = 2**30
    ttl_s: float = 86400.0
    write_bytes_per_day: int | None = None


def num_slots_of(limits: DiskLimits, slot_bytes: int) -> int:
    """Returns the slots of one file: 64 MiB or more, at least 4 and at most 128 files.

    Raises ConfigError if not even 4 files of 4 slots fit the bound.
    """
    wanted = max(_LEAST_SEGMENT, limits.max_bytes // _MOST_SEGMENTS)
    most = min(wanted, limits.max_bytes // _LEAST_SEGMENTS) - 3 * ALIGNMENT
    count = min(most // (slot_bytes + 64), _MOST_SLOTS)
    if count < 4:
        least = _LEAST_SEGMENTS * segment_bytes(5, slot_bytes)
        raise ConfigError(
            f"cache.disk_bytes is {limits.max_bytes}, but a page takes {slot_bytes} bytes on the "
            f"disk and the tier needs at least {least}: raise cache.disk_bytes."
        )
    return count


class DiskSpace:
    """Makes and removes the files of one identity. Used by the writing thread only."""

    def __init__(
        self,
        folder: DiskFolder,
        own: IdentityFolder,
        index: DiskIndex,
        limits: DiskLimits,
        slot_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._own, self._index, self._limits = folder, own, index, limits
        self._slot_bytes, self._clock = slot_bytes, clock
        self._num_slots = num_slots_of(limits, slot_bytes)
        self._size = segment_bytes(self._num_slots, slot_bytes)
        self._most_survivors = min(self._num_slots // 2, _MOST_SURVIVING // slot_bytes)
        self._max_bytes = limits.max_bytes
        self._next_number = 1 + max((int(path.stem) for path in own.segments), default=-1)
        self._day, self._noted, self._left = "", 0, 0
        self.num_evicted = 0

    @property
    def max_bytes(self) -> int:
        """The bound in force; it shrinks when the disk is full before it is reached."""
        return self._max_bytes

    def may_write(self, num_bytes: int) -> bool:
        """Takes bytes of the day's budget; False if it is used up. Raises OSError."""
        budget = self._limits.write_bytes_per_day
        if budget is None:
            return True
        day = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        if day != self._day:
            self._day, self._left = day, 0
            self._noted = self._folder.written_on(day)
        if self._left < num_bytes:
            wanted = min(max(_RESERVED, num_bytes), budget - self._noted)
            if self._left + wanted < num_bytes:
                return False
            self._folder.note_written(day, self._noted + wanted)  # before it is used
            self._noted += wanted
            self._left += wanted
        self._left -= num_bytes
        return True

    def new_segment(self) -> tuple[Segment, list[StoredPage]] | None:
        """Makes a file, and returns it with pages of removed files that go into it. None if there
        is no space, or no budget left. Raises OSError."""
        if not self.may_write(ALIGNMENT):  # its head
            return None
        survivors: list[StoredPage] = []
        while True:
            others = self._max_bytes - self._index.num_bytes - self._size
            others_taken = self._folder.shrink_others(self._own, max(0, others))
            taken = self._index.num_bytes + others_taken + self._size
            has_free = self._folder.free_bytes() - self._size >= self._limits.min_free_bytes
            if taken <= self._max_bytes and has_free:
                segment = self._make()
                if segment is not None:
                    return segment, self._affordable(survivors)
            if not self._index.segments:
                return None
            survivors += self._evict(self._index.segments[0])
            self.num_evicted += max(0, len(survivors) - self._most_survivors)
            del survivors[self._most_survivors :]

    def _affordable(self, survivors: list[StoredPage]) -> list[StoredPage]:
        """Returns the survivors that the day's budget has room for."""
        kept = [each for each in survivors if self.may_write(self._slot_bytes)]
        self.num_evicted += len(survivors) - len(kept)
        return kept

    def _make(self) -> Segment | None:
        path = self._own.path / f"{self._next_number:08d}{SUFFIX}"
        try:
            segment = Segment.make(path, self._num_slots, self._slot_bytes, self._own.secret)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._max_bytes = max(self._size, self._index.num_bytes)
            _log.warning(
                "the disk of cache.disk_path is full: the tier keeps to %d bytes.", self._max_bytes
            )
            return None
        self._next_number += 1
        return segment

    def _evict(self, segment: Segment) -> list[StoredPage]:
        survivors, now = list[StoredPage](), self._clock()
        flags = (np.frombuffer(each, dtype=bool) for each in (segment.is_known, segment.was_used))
        used = np.flatnonzero(np.logical_and(*flags))[: self._most_survivors].tolist()
        memory = anonymous_memory(len(used), self._slot_bytes)
        for slot, into in zip(used, memory, strict=True):
            page = StoredPage.of(segment.read(slot, into), self._own.secret)
            if page is not None and page.header.expires_at > now:
                survivors.append(page)
        self.num_evicted += self._index.remove_segment(segment) - len(survivors)
        segment.delete()
        return survivors
