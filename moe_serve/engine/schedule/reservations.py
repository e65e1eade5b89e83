"""Keeps pages and seats of one engine for sequences that arrive from another engine.

    page table of a reservation    [ found ... | to arrive ............ | spare ]
                                   shared with   a parcel fills each      for the next token
                                   the tree      of these

Reserved pages are neither free nor in the tree, and no running sequence has them, so they are not
preempted. A sequence that arrives has computed its tokens elsewhere, and nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from moe_serve.cache.page_key import following_keys, token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.prefix_sharing import PrefixSharing


class Reservation:
    """A seat and pages for one sequence. `table` has the pages in the order of its tokens."""

    __slots__ = ("arrived", "keys", "num_shared", "sent", "sequence", "table")

    def __init__(self, sequence: Sequence, table: list[int], keys: list[bytes]) -> None:
        self.sequence, self.table, self.keys = sequence, table, keys
        self.num_shared = len(table)  # pages at the start that the tree has
        self.sent: set[int] = set()  # places in the table whose pages a parcel may have written
        self.arrived: set[int] = set()  # those that have their values, verified

    @property
    def hidden(self) -> set[int]:
        """The places of pages that the sequence no longer sees and has given back."""
        return {place for place, page in enumerate(self.table) if not page}

    def extent(self, num_tokens: int, page_size: int) -> int:
        """Returns how many full pages at the start hold the values of the first tokens."""
        place = self.num_shared
        while place in self.arrived and (place + 1) * page_size <= num_tokens:
            place += 1
        return place


class Reservations:
    """The reservations of one engine, and the pages of sequences that are leaving it."""

    def __init__(
        self, cache: PrefixCache, sharing: PrefixSharing, running: list[Sequence], num_seats: int
    ) -> None:
        """`running` is the scheduler's own list."""
        self._cache, self._sharing, self._running = cache, sharing, running
        self._num_seats, self._size = num_seats, cache.page_size
        self._open: dict[int, Reservation] = {}  # by sequence id
        self._kept: dict[int, Reservation] = {}  # of sequences that have left

    @property
    def num_free_seats(self) -> int:
        """Number of seats that are neither taken nor reserved."""
        return self._num_seats - len(self._running) - len(self._open)

    @property
    def has_seat(self) -> bool:
        return self.num_free_seats > 0

    @property
    def arriving(self) -> list[Sequence]:
        """The sequences that have a reservation."""
        return [reservation.sequence for reservation in self._open.values()]

    def open(self, sequence: Sequence) -> Reservation | None:
        """Reserves a free seat and pages for a sequence of another engine; None if pages lack.

        Pages of its tokens that the tree has are shared. Running prompts keep the pages that they
        still need.
        """
        assert sequence.id not in self._open, f"sequence {sequence.id} has a reservation"
        cache, size = self._cache, self._size
        keys, found = self._keys_of(sequence), list[int]()
        is_seen = list(
            map(bool, sequence.page_table)
        )  # but not pages behind a window, which were given back
        if keys and not sequence.is_detached and all(is_seen):
            found = cache.find(keys[1 : 1 + sequence.num_plain(sequence.num_tokens - 1) // size])
        num_pages = -(-(sequence.num_tokens + 1) // size)
        is_seen += [True] * (num_pages - len(is_seen))
        num_missing = sum(is_seen[len(found) : num_pages])
        if self._num_spare - cache.num_idle(found) < num_missing:
            return None
        cache.hold(found)
        reservation = Reservation(sequence, found, keys)
        pages = iter(cache.allocate(num_missing))
        reservation.table += [
            next(pages) if seen else 0 for seen in is_seen[len(found) : num_pages]
        ]
        self._open[sequence.id] = reservation
        return reservation

    def _keys_of(self, sequence: Sequence) -> list[bytes]:
        """Returns the root key and the keys of the full pages of a sequence that another engine
        has; empty if nothing is shared here.
        """
        keys, size = self._sharing.root_of(sequence), self._size
        if not keys:
            return []
        if sequence.page_keys[:1] == keys:
            keys = list(sequence.page_keys)
        tokens = token_array(sequence.token_ids[(len(keys) - 1) * size :])
        return [*keys, *following_keys(keys[-1], tokens, size)]

    def extend(self, reservation: Reservation) -> bool:
        """Reserves pages for the tokens that the sequence has got since, and one more. Returns
        False if there is no room."""
        num_missing = self.num_missing(reservation)
        if num_missing > max(0, self._num_spare):
            return False
        reservation.table += self._cache.allocate(num_missing)
        return True

    def num_missing(self, reservation: Reservation) -> int:
        """Returns how many pages to add so that the table covers all tokens and one more."""
        num_pages = -(-(reservation.sequence.num_tokens + 1) // self._size)
        return max(0, num_pages - len(reservation.table))

    def close(self, reservation: Reservation, *, keeps_pages: bool) -> list[int]:
        """Ends a reservation whose sequence does not arrive. With `keeps_pages`, full pages that
        have arrived join the tree. Returns the freed pages whose contents are undefined.
        """
        del self._open[reservation.sequence.id]
        sequence = reservation.sequence
        if keeps_pages and sequence.is_sound and not sequence.is_detached:
            self._enter(reservation, sequence.num_plain(sequence.num_tokens))
        table = reservation.table
        unproven = {table[place] for place in reservation.sent - reservation.arrived}
        freed = self._cache.release([page for page in table if page])
        return [page for page in freed if page in unproven]

    def take(self, reservation: Reservation, hidden: Collection[int]) -> list[int]:
        """Ends a reservation whose sequence runs here from now on, with its pages. `hidden` has the
        places of pages that it no longer sees. Returns the freed pages whose contents are
        undefined.
        """
        sequence, table = reservation.sequence, reservation.table
        needed = range(reservation.num_shared, -(-sequence.num_computed_tokens // self._size))
        lost = set(needed) - reservation.arrived
        assert lost <= set(hidden), f"sequence {sequence.id} arrives without its pages {lost}"
        del self._open[sequence.id]
        gone = [table[place] for place in lost if table[place]]
        sequence.page_keys, sequence.awaited_key = reservation.keys, None
        sequence.num_found_pages = reservation.num_shared
        sequence.owns_pages = sequence.is_detached and not reservation.num_shared
        if sequence.is_detached or lost:
            sequence.num_shared_pages = sequence.num_found_pages = 0
            if not sequence.is_detached:
                sequence.page_keys = []  # the tree needs every page before a page that it has
        else:
            if sequence.is_sound:
                self._enter(reservation, sequence.num_plain(sequence.num_computed_tokens))
            sequence.num_shared_pages = reservation.num_shared
        sequence.page_table = [0 if place in lost else page for place, page in enumerate(table)]
        return self._cache.release(gone)

    def keep(self, sequence: Sequence) -> Reservation:
        """Keeps the pages of a sequence that leaves for another engine, until it has arrived there
        or is back. It has no seat any more."""
        kept = Reservation(sequence, sequence.page_table, sequence.page_keys)
        kept.num_shared = sequence.num_shared_pages
        kept.sent = set(range(len(kept.table)))
        kept.arrived = kept.sent - kept.hidden
        self._kept[sequence.id] = kept
        sequence.page_table, sequence.page_keys, sequence.awaited_key = [], [], None
        sequence.num_shared_pages = sequence.num_found_pages = 0
        return kept

    def drop(self, kept: Reservation) -> list[int]:
        """Releases kept pages; those of the tree stay there. Returns the freed ones."""
        del self._kept[kept.sequence.id]
        return self._cache.release([page for page in kept.table if page])

    def take_back(self, kept: Reservation) -> bool:
        """Gives a sequence its kept pages and a seat again; False if no seat is free."""
        if not self.has_seat:
            return False
        self._open[kept.sequence.id] = self._kept.pop(kept.sequence.id)
        self.take(kept, kept.hidden)
        return True

    def forget(self) -> None:
        """Drops everything because the pages are lost."""
        self._open, self._kept = {}, {}

    @property
    def tables(self) -> Iterator[list[int]]:
        """Yields the pages that are reserved or kept."""
        for each in (*self._open.values(), *self._kept.values()):
            yield [page for page in each.table if page]

    @property
    def _num_spare(self) -> int:
        """Number of pages that no sequence holds and no running prompt needs."""
        return self._cache.num_available - num_promised(self._running)

    def _enter(self, reservation: Reservation, num_tokens: int) -> None:
        """Makes the pages that have arrived in a run from the start visible to other sequences."""
        cache, keys, table = self._cache, reservation.keys, reservation.table
        size, sequence = self._size, reservation.sequence
        origin = sequence.request.page_origin
        end = min(reservation.extent(num_tokens, size), len(keys) - 1)
        for place in range(reservation.num_shared, end):
            tokens = sequence.tokens(place * size, (place + 1) * size)
            own, parent_key, key = table[place], *keys[place : place + 2]
            table[place] = cache.enter(own, key, parent_key, tokens, origin)
            if table[place] == own:
                self._sharing.tier.entered(own, key, parent_key)
        reservation.num_shared = max(reservation.num_shared, end)

    def check_integrity(self) -> None:
        """Asserts that the tree has the pages that reservations share with it."""
        for number, each in self._open.items():
            keys = each.keys[1 : each.num_shared + 1]
            found = [self._cache.tree.find(key) for key in keys]
            shared = each.table[: each.num_shared]
            assert found == shared, f"reservation {number} shares {shared}, cached are {found}"
            assert each.arrived <= each.sent, f"reservation {number} got pages that were not sent"
        num_taken = len(self._running) + len(self._open)
        assert num_taken <= self._num_seats, f"{num_taken} seats are taken of {self._num_seats}"


def num_promised(running: Iterable[Sequence]) -> int:
    """Returns how many pages running sequences still need for the tokens that they have."""
    return sum(max(0, s.num_missing_pages(s.num_tokens)) for s in running)
