"""Chooses running requests that should move: off ranks that drain, run out of pages or are slower.

A move must leave both cells better off than the opposite move would, so no request moves back and
forth: the target has room for its own rows after it, or its step stays shorter than that of the
source was.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from moe_serve.clock import Clock
from moe_serve.cluster.cells.open_moves import OpenMoves
from moe_serve.cluster.cells.places import Place
from moe_serve.cluster.cells.rates import StepRates, is_decoding
from moe_serve.cluster.cells.router import CellRouter
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.step_model import StepWork

_LEAST_IMBALANCE = 1.2  # of two cells' predicted steps
_LOOK_S = 0.05  # between two looks at the pages and steps of a rank
_MOST_REFUSALS = 4  # refused requests of a draining rank after which no more are tried in this turn
_LEAST_LEFT = 8  # least tokens that an answer may still have for a move to be worthwhile


class Migration:
    """Begins moves of running requests."""

    def __init__(
        self, moves: OpenMoves, router: CellRouter, steps: StepRates, clock: Clock
    ) -> None:
        self._moves, self._router, self._steps, self._clock = moves, router, steps, clock
        self._next_look: dict[tuple[int, str], float] = {}

    def drain(self, place: Place) -> None:
        """Begins to move all running requests off a rank, as far as others have room."""
        num_refused = 0
        for sequence in place.engine.moving.running:
            if num_refused == _MOST_REFUSALS:
                break
            if self._moves.may_begin(sequence):
                targets = self._router.targets(sequence, place)
                has_begun = any(self._moves.begin(sequence, "drain", place, t) for t in targets)
                num_refused += not has_begun

    def relieve(self, place: Place) -> None:
        """Begins to move one request off a rank that is short of pages or slow, unless one
        moves."""
        if any(m.source.is_same(place) and m.kind in ("pages", "balance") for m in self._moves):
            return
        now = self._clock()
        if now < self._next_look.get(place.order, now):
            return
        self._next_look[place.order] = now + _LOOK_S
        running = place.engine.moving.running
        if len(running) < 2:
            return
        if place.engine.moving.num_available_pages < len(running):
            self._relieve_pages(place)
        elif place.cell.shape.role != "prefill":
            self._balance(place, running)

    def _relieve_pages(self, place: Place) -> None:
        """Moves the request that would be preempted when pages run out."""
        victim = place.engine.moving.victim()
        if victim is None or not self._may_move(place, victim):
            return
        num_pages = -(-(victim.num_tokens + 1) // victim.page_size)
        for target in self._router.targets(victim, place):
            moving = target.engine.moving
            num_left = moving.num_available_pages - num_pages
            has_room = num_left > len(moving.running) + 1 and not moving.waiting
            if has_room and self._moves.begin(victim, "pages", place, target):
                return

    def _balance(self, place: Place, running: Items[Sequence]) -> None:
        """Moves the request that started last to a cell whose steps are shorter with it."""
        movable = [s for s in running if is_decoding(s) and self._may_move(place, s)]
        if not movable:
            return
        sequence, own_s = movable[-1], self._steps.step_s(place.cell)
        for target in self._router.targets(sequence, place):
            if target.cell is place.cell or target.engine.moving.waiting:
                continue
            with_it = StepWork(1, 0, sequence.num_tokens)
            its_s = self._steps.step_s(target.cell, with_it)
            is_worth_it = own_s > _LEAST_IMBALANCE * its_s
            if is_worth_it and self._moves.begin(sequence, "balance", place, target):
                return

    def _may_move(self, place: Place, sequence: Sequence) -> bool:
        engine = place.engine
        return (
            self._moves.may_begin(sequence)
            and is_decoding(sequence)
            and engine.stop_rule.num_left(sequence) > _LEAST_LEFT
        )
