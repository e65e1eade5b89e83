"""Memory that the ranks of a host share, with copies of KV pages that outlive a rank.

    coordinator                                    attention rank
    ArenaIndex: which page is in which slot        ArenaView: copies a page into a slot, or back
                          one mapping of the same memory

The coordinator decides about slots. A rank copies when its next step's message says so. A slot is
found by others only after the rank has reported a later step, so a rank that dies in the middle of
a copy leaves no torn page behind. With a disk tier, the coordinator also copies filled slots for
the disk, and what the disk has read into slots that it has reserved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.cache.shared_memory import as_slots, open_memory
from moe_serve.cache.tiers.store import TierStats
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.errors import ConfigError


class ArenaView:
    """Copies one shard's heads of pages into slots, and back. A slot has the form of a page on the
    wire, so ranks with other numbers of shards read it, too."""

    def __init__(self, path: str, pages: WirePages) -> None:
        """Raises ConfigError if the memory cannot be opened."""
        try:
            memory = open_memory(path)
        except OSError as error:
            raise ConfigError(
                f"the memory tier cannot be opened ({error.strerror or error}): with "
                "cache.memory_tier_bytes or cache.disk_path, attention ranks must be processes of "
                "the same user on the same host."
            ) from None
        self._pages, self._slots = pages, as_slots(memory, pages.num_bytes)

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages into slots, given as (page, slot)."""
        pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
        self._pages.save(pages, slots, self._slots)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies slots into pages, given as (slot, page)."""
        for slot, page in pairs:
            self._pages.load([page], self._slots[slot : slot + 1])


@dataclass(slots=True)
class ArenaCounts:
    """Counts of an arena since the start, in pages and tokens."""

    num_saved: int = 0
    num_dropped: int = 0  # no slot was free
    num_loaded: int = 0
    num_evicted: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class ArenaIndex:
    """The pages in an arena's slots, for all attention ranks. Used on the engine's thread."""

    def __init__(self, num_bytes: int, slot_bytes: int) -> None:
        """Raises ConfigError if too few pages fit."""
        self._num_slots, self._slot_bytes = num_bytes // slot_bytes, slot_bytes
        if self._num_slots < 4:
            raise ConfigError(
                f"cache.memory_tier_bytes is {num_bytes}, but a page takes {slot_bytes} bytes: "
                f"give at least {4 * slot_bytes}."
            )
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # longest unused first
        self._pins = [0] * self._num_slots  # copies under way
        self.counts = ArenaCounts()

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the slots of the longest known run of `keys`."""
        slots = []
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is None:
                break
            self._slot_of.move_to_end(key)
            slots.append(slot)
        return slots

    def slot_of(self, key: bytes) -> int | None:
        """Returns a known page's slot; None if the page is not known. Does not count as a use."""
        return self._slot_of.get(key)

    def reserve(self) -> int | None:
        """Takes a slot for a page that a rank will copy, evicting if needed; None if all slots are
        in use. `enter` or `give_back` must follow."""
        if not self._free:
            unused = (key for key, slot in self._slot_of.items() if not self._pins[slot])
            victim = next(unused, None)
            if victim is None:
                self.counts.num_dropped += 1
                return None
            self._free.append(self._slot_of.pop(victim))
            self.counts.num_evicted += 1
        slot = self._free.pop()
        self._pins[slot] += 1
        return slot

    def enter(self, key: bytes, slot: int) -> None:
        """Makes a page visible, because its copy is complete. If the page is known already, its new
        slot is freed."""
        if key in self._slot_of:
            self.give_back(slot)
            return
        self._pins[slot] -= 1
        self._slot_of[key] = slot
        self.counts.num_saved += 1

    def give_back(self, slot: int) -> None:
        """Frees a reserved slot whose copy may be incomplete."""
        self._pins[slot] -= 1
        self._free.append(slot)

    def pin(self, slot: int) -> None:
        """Keeps a slot until `unpin`, because a rank copies from it."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1

    def check_integrity(self) -> None:
        """Asserts that every slot is free, reserved, or holds one page."""
        held = [*self._free, *self._slot_of.values()]
        assert len(set(held)) == len(held), "a slot is free and holds a page, or holds two"
        lost = {slot for slot, pins in enumerate(self._pins) if not pins} - set(held)
        assert not lost, f"slots {sorted(lost)[:5]} are neither free nor in use"
        assert min(self._pins) >= 0, "a slot was unpinned more often than pinned"

    def stats(self) -> TierStats:
        """Returns a snapshot; safe from any thread."""
        c = self.counts
        return TierStats(
            name="memory",
            where="shared memory",
            is_reading=True,
            is_writing=True,
            num_pages=len(self),
            num_bytes=len(self) * self._slot_bytes,
            capacity_bytes=self._num_slots * self._slot_bytes,
            read_bytes=c.num_loaded * self._slot_bytes,
            written_bytes=c.num_saved * self._slot_bytes,
            num_evicted=c.num_evicted,
            loads={"hit": c.num_loaded},
            saves={"saved": c.num_saved, "dropped": c.num_dropped},
            queried_tokens=c.num_queried_tokens,
            hit_tokens=c.num_hit_tokens,
        )
