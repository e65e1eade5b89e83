"""The slots of one memory, free or given to a parcel."""

from __future__ import annotations


class SlotPool:
    """Gives slots to parcels. The lowest free slots are used first, so that memory that is never
    needed is never touched.
    """

    def __init__(self, num_slots: int, first: int = 0) -> None:
        self.num_slots = num_slots
        self._free = list(range(first + num_slots - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        assert count <= self.num_free, f"{count} slots of {self.num_free} that are free"
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, slots: tuple[int, ...]) -> None:
        self._free += reversed(slots)
        assert len(self._free) <= self.num_slots, "a slot was given back twice"
