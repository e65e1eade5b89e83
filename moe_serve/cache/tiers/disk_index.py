"""Finds the slot of a page by its key, in memory.

An entry is two numbers in a dictionary: the first bytes of the key, and the place of the page. The
whole key is in an array of the page's file, and is compared. Together they take about 160 bytes for
a page. A page is entered only after it was written, and leaves before its file is removed. If two
keys begin with the same 7 bytes, the second page is not found.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.tiers.segment import Segment

_SLOT_BITS = 24
_SLOT_MASK = (1 << _SLOT_BITS) - 1


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """The file and slot of a page, and the generation that its header must have."""

    segment: Segment
    slot: int
    generation: int


class DiskIndex:
    """The stored pages. Any thread may call it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # a key's first bytes -> file and slot in one number
        self._segments: dict[int, Segment] = {}  # oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return self._place(key) is not None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The files, oldest first."""
        with self._lock:
            return tuple(self._segments.values())

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    def num_held(self, keys: Iterable[bytes]) -> int:
        """Returns how many keys are known, from the first on."""
        count = 0
        for count, key in enumerate(keys, 1):
            if self._place(key) is None:
                return count - 1
        return count

    def find(self, key: bytes) -> SlotPlace | None:
        """Returns a page's place, and notes that it was used."""
        with self._lock:
            place = self._place(key)
            if place is None:
                return None
            segment, slot = self._segments[place >> _SLOT_BITS], place & _SLOT_MASK
            segment.was_used[slot] = 1
            return SlotPlace(segment, slot, segment.generations[slot])

    def add_segment(
        self, segment: Segment, entries: NDArray[np.void] | None = None, now: float = 0.0
    ) -> None:
        """Adds a file with its written slots. A known page keeps its place; an expired one is left
        out."""
        places, base = self._places, segment.number << _SLOT_BITS
        with self._lock:
            self._segments[segment.number] = segment
            if entries is None:
                return
            alive = entries[entries["expires_at"] > now]
            starts = _starts(np.ascontiguousarray(alive["key"]).view("<u8"))
            for start, slot in zip(starts.tolist(), alive["slot"].tolist(), strict=True):
                if places.setdefault(start, base | slot) == base | slot:
                    segment.is_known[slot] = 1

    def add(self, key: bytes, segment: Segment, slot: int) -> None:
        """Adds a page that was written."""
        place = segment.number << _SLOT_BITS | slot
        with self._lock:
            if self._places.setdefault(_start(key), place) == place:
                segment.is_known[slot] = 1

    def drop(self, key: bytes, place: SlotPlace) -> None:
        """Removes a page, unless it has moved to another slot."""
        with self._lock:
            if self._place(key) == place.segment.number << _SLOT_BITS | place.slot:
                del self._places[_start(key)]
                place.segment.is_known[place.slot] = 0

    def remove_segment(self, segment: Segment) -> int:
        """Removes a file and its pages, and returns their number."""
        with self._lock:
            del self._segments[segment.number]
            slots = np.flatnonzero(np.frombuffer(segment.is_known, dtype=np.uint8))
            for start in _starts(np.frombuffer(segment.keys, dtype="<u8"))[slots].tolist():
                del self._places[start]
            segment.is_known = bytearray(segment.num_slots)
        return len(slots)

    def some_keys(self, most: int) -> list[bytes]:
        """Returns a few keys that the index has."""
        with self._lock:
            places = list(itertools.islice(self._places.values(), most))
            return [self._segments[each >> _SLOT_BITS].key(each & _SLOT_MASK) for each in places]

    def _place(self, key: bytes) -> int | None:
        place = self._places.get(_start(key))
        if place is None:
            return None
        segment = self._segments.get(place >> _SLOT_BITS)  # None: it is being removed
        return place if segment is not None and segment.key(place & _SLOT_MASK) == key else None


def _start(key: bytes) -> int:
    """Returns the first 7 bytes of a key as a number, which takes less memory than one of 8."""
    return int.from_bytes(key[:7], "little")


def _starts(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns `_start` of every key; `words`: 4 of each key."""
    starts: NDArray[np.uint64] = words[::4] & np.uint64(2**56 - 1)
    return starts
