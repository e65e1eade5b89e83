"""One sequence on its way from one engine to another.

at the source        its full pages travel while it computes on
between              it has left the source, which keeps its pages; the last ones travel
at the target        it runs there, and nothing was computed again
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_serve.cluster.cells.places import Place
from moe_serve.cluster.parcels.parcel import Lease, PageCarrier, Parcel, ParcelEnd
from moe_serve.engine.request.moves_stats import MoveKind
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.reservations import Reservation


@dataclass(frozen=True, slots=True)
class SentParcel:
    """A parcel on its way, and the places of its pages in the sequence's page table."""

    parcel: Parcel
    places: range
    sent_at: float
    num_on_way: int  # pages of its move that were on their way then, with its own


@dataclass(slots=True, eq=False, kw_only=True)
class CellMove:
    """`reservation` is the target's, `kept` the pages that the source keeps after the departure."""

    sequence: Sequence
    kind: MoveKind
    source: Place
    target: Place
    lease: Lease
    reservation: Reservation
    kept: Reservation | None = None
    departed_at: float = 0.0
    moved_at: float = 0.0  # when pages were last sent or arrived
    num_steps: int = 0  # of the target's cell, since the departure
    next_place: int = 0  # in the page table: those before it were sent, or need not be
    num_parcels: int = 0
    on_way: dict[int, SentParcel] = field(default_factory=dict)  # by the parcels' numbers

    @property
    def has_departed(self) -> bool:
        return self.kept is not None

    @property
    def is_complete(self) -> bool:
        """Returns whether all pages have arrived."""
        return self.has_departed and not self.on_way

    @property
    def table(self) -> list[int]:
        """The pages at the source."""
        return self.sequence.page_table if self.kept is None else self.kept.table

    @property
    def num_on_way(self) -> int:
        return sum(len(sent.places) for sent in self.on_way.values())

    def num_unsent(self) -> int:
        """Returns how many pages with values have still to be sent, the partly filled one too."""
        sequence = self.sequence
        num_pages = -(-sequence.num_computed_tokens // sequence.page_size)
        return sum(bool(page) for page in self.table[self.next_place : num_pages])

    def send(self, carrier: PageCarrier, now: float) -> None:
        """Sends the full pages that have not been sent, as far as the carrier has room. After the
        departure, sends the partly filled page too."""
        sequence = self.sequence
        end = sequence.num_full_pages
        if self.has_departed:
            end = -(-sequence.num_computed_tokens // sequence.page_size)
        while self.next_place < end:
            if not self.table[self.next_place]:
                self.next_place += 1  # the sequence no longer sees the page
                continue
            first = self.next_place
            most = min(carrier.pages_per_parcel, carrier.num_free(self.target.at), end - first)
            if most <= 0:
                return
            count = 1
            while count < most and self.table[first + count]:
                count += 1
            self._send(carrier, range(first, first + count), now)

    def _send(self, carrier: PageCarrier, places: range, now: float) -> None:
        parcel = Parcel(
            lease=self.lease,
            number=self.num_parcels,
            source=self.source.at,
            target=self.target.at,
            source_pages=tuple(self.table[place] for place in places),
            target_pages=tuple(self.reservation.table[place] for place in places),
        )
        num_on_way = self.num_on_way + len(places)
        self.on_way[parcel.number] = SentParcel(parcel, places, now, num_on_way)
        self.moved_at = now
        self.num_parcels += 1
        self.next_place = places.stop
        self.reservation.sent.update(places)
        carrier.send(parcel)

    def take(self, end: ParcelEnd) -> SentParcel:
        """Notes the end of a parcel, and that its pages are there if it is sound."""
        sent = self.on_way.pop(end.parcel.number)
        if end.is_sound:
            self.reservation.arrived.update(sent.places)
        return sent

    def waits_since(self) -> float | None:
        """Returns since when the oldest parcel has been on its way, the sequence between its
        engines, or pages without room in the carrier; None if nothing waits."""
        first = next(iter(self.on_way.values()), None)  # parcels are in the order of sending
        if self.has_departed:
            return self.departed_at if first is None else min(first.sent_at, self.departed_at)
        if first is not None:
            return first.sent_at
        return self.moved_at if self.next_place < self.sequence.num_full_pages else None
