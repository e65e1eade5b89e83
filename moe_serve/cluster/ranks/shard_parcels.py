"""Parcels on one shard of an attention rank: copies its pages to slots, and slots to its pages."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.shared_memory import as_slots
from moe_serve.cache.transfer.parcel_memory import open_parcel_memory
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.parcel_messages import MemoryPath, SendPages, TakePages

Slots = NDArray[np.uint8]  # [slots, bytes of a page on the wire]


class ShardParcels:
    """Copies between the pages of a shard and slots in memory that ranks or shards share."""

    def __init__(self, wire: WirePages, common: MemoryPath | None, own: MemoryPath | None) -> None:
        """`common` is the memory of all ranks of the host, and `own` that of this rank's shards.
        Raises ConfigError if one cannot be opened.
        """
        self._wire = wire
        self._staged: Slots = np.empty((0, wire.num_bytes), dtype=np.uint8)
        self.common, self.own = (_opened(each, wire.num_bytes) for each in (common, own))

    def save(self, order: SendPages) -> None:
        """Copies this shard's heads into the slots."""
        self._wire.save(order.pages, order.slots, self.slots(is_common=order.is_common))

    def load(self, order: TakePages) -> str:
        """Copies the slots into this shard's pages. Returns why they may not be used, or "".

        The copy that is checked is the one that is used: a process that was given up may still
        write to the slots.
        """
        data, found = self._staged_copy(order)
        if found != order.checksum:
            return f"their checksum is {found:08x} and should be {order.checksum:08x}"
        self._wire.load(order.pages, data)
        return "" if self._wire.are_finite(order.pages) else "some of their values are not finite"

    def _staged_copy(self, order: TakePages) -> tuple[Slots, int]:
        """Copies slots to memory of this process; returns that, and the checksum of it."""
        slots, count = self.slots(is_common=order.is_common), len(order.slots)
        if len(self._staged) < count:
            self._staged = np.empty((count, slots.shape[1]), dtype=np.uint8)
        data, crc = self._staged[:count], 0
        for row, slot in zip(data, order.slots, strict=True):
            row[:] = slots[slot]
            crc = zlib.crc32(row, crc)
        return data, crc

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages, so that they contain no data of a failed parcel."""
        self._wire.clear(pages)

    def slots(self, *, is_common: bool) -> Slots:
        slots = self.common if is_common else self.own
        assert slots is not None, f"this shard has no such memory ({is_common=})"
        return slots


def _opened(memory: MemoryPath | None, page_bytes: int) -> Slots | None:
    if memory is None:
        return None
    return as_slots(open_parcel_memory(memory.path, memory.token), page_bytes)
