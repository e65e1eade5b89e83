"""Parcels: KV pages on their way from a rank of one cell to a rank of another.

    engine of the source        carrier                                    engine of the target
    send(parcel)  ----------->  source rank: pages -> slots, crc
                                link: shared memory, or slots over TCP
                                target rank: crc, slots -> its own pages, finite?
                                ParcelEnd  ------------------------------>  pages hold the values

Only the target rank writes to its pages, and only for a lease that is open. A lease is a promise of
the target's engine: these pages are reserved for this sequence until the lease ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class RankPlace:
    """One process of an attention rank: its cell, its name there, and the number of its start."""

    cell: int
    rank: str  # such as attention-0
    start: int


@dataclass(frozen=True, slots=True, order=True)
class Lease:
    """Identifies pages of a target that are reserved for one sequence. No number is used twice."""

    number: int
    sequence_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Pages that travel together. `source_pages[i]` becomes `target_pages[i]`.

    `number` counts the parcels of a lease from 0.
    """

    lease: Lease
    number: int
    source: RankPlace
    target: RankPlace
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParcelEnd:
    """The end of a parcel. `why` is empty if all of its pages are in place and verified."""

    parcel: Parcel
    why: str = ""
    seconds: float = 0.0  # from `send` to the end

    @property
    def is_sound(self) -> bool:
        return not self.why


class PageCarrier(Protocol):
    """Carries parcels between the attention ranks of all cells. Used by the engine's thread.

    Nothing here waits: `send` gives orders, and `take_ended` returns what has ended since. Orders
    to a rank take effect in the order in which they were sent. So pages that the last step that was
    sent before has written are sent with their final values, and a step sent after `take_ended`
    returned a parcel reads its pages. A rank may take a parcel beside later steps, but an order
    that names the parcel's pages waits for it.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of a whole attention rank, all shards and layers."""
        ...

    @property
    def pages_per_parcel(self) -> int:
        """Most pages that one parcel may have."""
        ...

    def can_carry(self, source: RankPlace, target: RankPlace) -> str:
        """Returns why no pages can travel between two ranks; empty if they can."""
        ...

    def num_free(self, target: RankPlace) -> int:
        """Returns how many more pages may be on their way to a rank now."""
        ...

    def send(self, parcel: Parcel) -> None:
        """Sends a parcel, of at most `pages_per_parcel` and `num_free` pages."""
        ...

    def end_lease(self, lease: Lease) -> None:
        """Drops the parcels of a lease that are on their way. Once this has returned and another
        order was sent to the target, the target no longer writes their pages. Their end is not
        reported.
        """
        ...

    def take_ended(self) -> Sequence[ParcelEnd]:
        """Returns the parcels that have ended since the last call, in the order of their ends."""
        ...

    def rank_lost(self, place: RankPlace) -> None:
        """Ends the parcels from and to a process that is gone; `take_ended` returns those."""
        ...
