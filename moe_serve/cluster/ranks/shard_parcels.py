"""Parcels on one shard of an attention rank: copies its pages to slots, and slots to its pages."""

from __future__ import annotations

import logging
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.shared_memory import as_slots
from moe_serve.cache.transfer.parcel_memory import open_parcel_memory
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.parcel_messages import (
    MemoryPath,
    PagesTaken,
    ParcelReport,
    SendPages,
    TakePages,
)
from moe_serve.errors import ChannelClosedError

_CLOSE_S = 1.0
TAKES_PARCELS = " takes parcels"  # the end of the name of a thread

_log = logging.getLogger(__name__)

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

    def take(self, order: TakePages) -> str:
        """Loads a parcel, or zeroes its pages. Returns why they may not be used, or ""."""
        try:
            why = self.load(order)
        except Exception as error:
            _log.exception("a parcel could not be taken")
            why = f"{type(error).__name__}: {error}"
        if why:
            self.clear(order.pages)
        return why

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


class ParcelTaker:
    """Takes parcels on a thread of its own, beside the steps of the rank.

    The pages of a parcel belong to this thread until it has answered. An order that names one of
    them waits (`settle`), so it finds what it would find if parcels were taken between orders.
    """

    def __init__(self, parcels: ShardParcels, tell: Callable[[ParcelReport], None]) -> None:
        """`tell` is called on the thread. The other methods belong to the thread that handles
        orders."""
        self._parcels, self._tell = parcels, tell
        self._waiting: queue.SimpleQueue[TakePages | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the next two
        self._pages: dict[int, Sequence[int]] = {}  # of parcels without an answer, by ticket
        self._has_ended = False
        name = threading.current_thread().name + TAKES_PARCELS
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return bool(self._pages)

    def take(self, order: TakePages) -> None:
        """Takes a parcel after those before it. PagesTaken is reported when that is done."""
        with self._changed:
            if self._has_ended:
                return  # the connection of the rank has ended
            self._pages[order.ticket] = order.pages
        self._waiting.put(order)

    def settle(self, pages: Iterable[int]) -> None:
        """Waits until no parcel is being taken into one of these pages."""
        named = set(pages)
        with self._changed:
            while any(not named.isdisjoint(each) for each in self._pages.values()):
                self._changed.wait()

    def close(self) -> None:
        """Ends the thread after the parcels that it was given."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while (order := self._waiting.get()) is not None:
                why = self._parcels.take(order)
                with self._changed:
                    del self._pages[order.ticket]
                    self._changed.notify_all()
                self._tell(PagesTaken(ticket=order.ticket, why=why))
        except ChannelClosedError:
            pass  # the rank ends
        finally:
            with self._changed:
                self._has_ended = True
                self._pages.clear()
                self._changed.notify_all()


def _opened(memory: MemoryPath | None, page_bytes: int) -> Slots | None:
    if memory is None:
        return None
    return as_slots(open_parcel_memory(memory.path, memory.token), page_bytes)
