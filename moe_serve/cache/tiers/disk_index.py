"""Finds the slot of a page by its key, in memory.

An entry is one number in a dictionary, and two in arrays: about 200 bytes for a page. A page is
entered only after it was written, and leaves before its file is removed.
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


@dataclass(frozen=True, slots=True)
class Place:
    """The file and slot of a page, and the generation that its header must have."""

    segment: Segment
    slot: int
    generation: int


class DiskIndex:
    """The stored pages. Any thread may call it."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}  # segment number and slot in one number
        self._segments: dict[int, Segment] = {}  # oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

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
            if key not in self._places:
                return count - 1
        return count

    def find(self, key: bytes) -> Place | None:
        """Returns a page's place, and notes that it was used."""
        with self._lock:
            place = self._places.get(key)
            if place is None:
                return None
            segment, slot = self._segments[place >> _SLOT_BITS], place & ((1 << _SLOT_BITS) - 1)
            segment.was_used[slot] = 1
            return Place(segment, slot, segment.generations[slot])

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
            for key, slot in zip(alive["key"].tolist(), alive["slot"].tolist(), strict=True):
                if key not in places:
                    places[key] = base | slot
                    segment.keys[slot] = key

    def add(self, key: bytes, segment: Segment, slot: int) -> None:
        with self._lock:
            if key not in self._places:
                self._places[key] = segment.number << _SLOT_BITS | slot
                segment.keys[slot] = key

    def drop(self, key: bytes, place: Place) -> None:
        """Removes a page, unless it has moved to another slot."""
        with self._lock:
            if self._places.get(key) == place.segment.number << _SLOT_BITS | place.slot:
                del self._places[key]
                place.segment.keys.pop(place.slot, None)

    def remove_segment(self, segment: Segment) -> int:
        """Removes a file and its pagesand returns their number."""
        with self._lock:
            del self._segments[segment.number]
            for key in segment.keys.values():
                del self._places[key]
            count, segment.keys = len(segment.keys), {}
        return count

    def some_keys(self, most: int) -> list[bytes]:
        """Returns a few keys that the index has."""
        with self._lock:
            return list(itertools.islice(self._places, most))
