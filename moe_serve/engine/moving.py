"""Moves running sequences between engines together with their pages, so that nothing is computed
again.

    source                                      target
    announce(sequence)                          reserve(sequence) -> reservation
    pages travel while it computes on           (pages arrive)
    depart(sequence) -> kept, between steps
                                                arrive(reservation): its next step decodes
    drop(kept)

Between `depart` and `arrive` the sequence belongs to the caller. If it cannot arrive, `take_back`
lets it run at the source again.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

from moe_serve.engine.execute.step_executor import StepExecutor
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.reservations import Reservation, num_promised
from moe_serve.engine.schedule.scheduler import Scheduler
from moe_serve.engine.schedule.step_drafts import StepDrafts


class MovingSequences:
    """The sequences that leave and reach one engine. Callers are on the engine's thread."""

    def __init__(
        self,
        sequences: dict[str, Sequence],
        scheduler: Scheduler,
        drafts: StepDrafts,
        executor: StepExecutor,
    ) -> None:
        """`sequences`: the engine's own, by request id."""
        self._sequences, self._scheduler = sequences, scheduler
        self._drafts, self._executor = drafts, executor
        self._announced: set[int] = set()  # sequences that leave when their step has ended

    def set_open(self, *, is_open: bool) -> None:
        """Sets whether the engine takes new requests or drains."""
        if self._scheduler.service is not None:
            self._scheduler.service.queue.set_open(is_open=is_open)

    @property
    def page_size(self) -> int:
        return self._scheduler.cache.page_size

    @property
    def running(self) -> Items[Sequence]:
        """The sequences that have a seat and whose requests have not ended."""
        known = self._sequences
        return [s for s in self._scheduler.running if known.get(s.request.request_id) is s]

    @property
    def waiting(self) -> Items[Sequence]:
        return list(self._scheduler.waiting)

    @property
    def arriving(self) -> Items[Sequence]:
        """The sequences of other engines for which a seat is reserved."""
        return self._scheduler.reservations.arriving

    @property
    def num_available_pages(self) -> int:
        """Number of pages that no sequence holds and no running prompt needs."""
        scheduler = self._scheduler
        return scheduler.cache.num_available - num_promised(scheduler.running)

    def has(self, sequence: Sequence) -> bool:
        """Returns whether the engine has a sequence whose request has not ended."""
        return self._sequences.get(sequence.request.request_id) is sequence

    def victim(self) -> Sequence | None:
        """Returns the running sequence that would give its pages back first; None if none runs."""
        running = self._scheduler.running
        return self._scheduler.urgency.victim(running) if running else None

    def num_tokens_before(self, priority: int) -> int:
        """Returns how many tokens are computed before those of a newcomer: of all running
        sequences, and of waiting ones that are at least as urgent."""
        waiting = [s for s in self._scheduler.waiting if s.request.priority <= priority]
        return sum([s.num_pending_tokens for s in (*self._scheduler.running, *waiting)])

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Returns how many tokens of a sequence that has no engine are in the cache here."""
        sequence.page_size = self.page_size
        self._scheduler.sharing.register(sequence)
        return self._scheduler.sharing.num_cached_tokens(sequence)

    # At the source

    def announce(self, sequence: Sequence) -> None:
        """Notes that a sequence leaves when its step has ended: no step begins ahead with it."""
        self._announced.add(sequence.id)

    def retract(self, sequence: Sequence) -> None:
        """Notes that a sequence stays."""
        self._announced.discard(sequence.id)

    def is_leaving(self, sequence_ids: Collection[int]) -> bool:
        """Returns whether one of the sequences leaves when its step has ended."""
        return not self._announced.isdisjoint(sequence_ids)

    def can_depart(self, sequence: Sequence) -> bool:
        """Returns whether a sequence that no step computes now could leave: its prompt is read, and
        its pages are known to be good."""
        return (
            self.has(sequence)
            and sequence.is_running
            and sequence.is_proven
            and sequence.is_sound
            and sequence.num_output_tokens > 0
            and sequence.num_pending_tokens == 1
        )

    def depart(self, sequence: Sequence) -> Reservation:
        """Gives up a sequence for which `can_depart`, between steps, with everything that it needs
        to continue. Returns its pages, which are kept until `drop` or `take_back`. `is_sound` is
        False if the last check of its pages found a NaN. Raises ExecutorLostError."""
        kept = self._scheduler.depart(sequence)  # may raise, and then nothing has changed
        self._announced.discard(sequence.id)
        del self._sequences[sequence.request.request_id]
        self._drafts.forget([sequence])
        self._executor.forget([sequence.id])
        return kept

    def drop(self, kept: Reservation, *, is_verified: bool) -> None:
        """Releases the pages of a sequence that has left; pages of the tree stay there.
        `is_verified` means that all pages that were sent hold only finite values.
        """
        freed = self._scheduler.reservations.drop(kept)
        if not is_verified:
            self._scheduler.add_unproven(freed)

    def take_back(self, kept: Reservation) -> bool:
        """Lets a sequence that has left continue here. Returns False if no seat is free any
        more.
        """
        if not self._scheduler.reservations.take_back(kept):
            return False
        self._join(kept.sequence)
        return True

    def release(self, sequence: Sequence) -> Sequence:
        """Gives up a waiting sequence, for another engine to adopt."""
        del self._sequences[sequence.request.request_id]
        self._scheduler.remove([sequence], is_end=False)
        if sequence.started_at is not None:
            self._drafts.forget([sequence])
            self._executor.forget([sequence.id])
        sequence.page_keys, sequence.awaited_key = [], None
        return sequence

    # At the target

    def reserve(self, sequence: Sequence, *, may_wait: bool) -> Reservation | None:
        """Reserves a seat and pages for a sequence of another engine; None if there is no room now.
        Sequences that wait here and came before it, or are more urgent by the order of service
        tiers, have the first claim to seats.

        `may_wait` means that no step is in progress, so that the executor can finish its page work
        first; otherwise it might clear a page that has already been received.
        """
        reservations, num_before = self._scheduler.reservations, self._num_before(sequence)
        has_seat = reservations.num_free_seats > num_before
        if not has_seat or not self._can_give_pages(may_wait=may_wait):
            return None
        return reservations.open(sequence)

    def extend(self, reservation: Reservation, *, may_wait: bool) -> bool:
        """Reserves pages for the tokens that the sequence has got since. See `reserve`."""
        reservations = self._scheduler.reservations
        if not reservations.num_missing(reservation):
            return True
        return self._can_give_pages(may_wait=may_wait) and reservations.extend(reservation)

    def close(self, reservation: Reservation, *, keeps_pages: bool) -> None:
        """Ends a reservation whose sequence does not arrive. `keeps_pages`: pages that have arrived
        can be found by other sequences, and by this one."""
        freed = self._scheduler.reservations.close(reservation, keeps_pages=keeps_pages)
        self._scheduler.add_unproven(freed)

    def arrive(self, reservation: Reservation, hidden: Collection[int]) -> None:
        """Lets a sequence run whose pages have arrived, except the `hidden` ones, which it no
        longer sees."""
        sequence, service = reservation.sequence, self._scheduler.service
        self._scheduler.add_unproven(self._scheduler.reservations.take(reservation, hidden))
        if service is not None:
            service.state.take_over(sequence)
        self._join(sequence)

    def _num_before(self, sequence: Sequence) -> int:
        service = self._scheduler.service
        if service is not None and service.queue.is_ordered:
            return service.queue.num_before(sequence)
        own = _turn(sequence)
        return sum([_turn(other) < own for other in self._scheduler.waiting])

    def _join(self, sequence: Sequence) -> None:
        self._sequences[sequence.request.request_id] = sequence
        self._scheduler.starter.join(sequence)

    def _can_give_pages(self, *, may_wait: bool) -> bool:
        """Returns whether all orders for pages that were given before now have been carried out."""
        self._executor.clear_pages(self._scheduler.take_unproven_pages())
        if self._executor.has_page_work and may_wait:
            self._executor.finish_page_work()
        return not self._executor.has_page_work


def _turn(sequence: Sequence) -> tuple[int, int]:
    """Orders sequences by urgency and arrival: ids are counted over all engines."""
    return sequence.request.priority, sequence.id
