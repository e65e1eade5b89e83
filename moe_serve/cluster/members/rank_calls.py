"""Sends orders to ranks and collects their answers. Every wait is bounded, and a silent rank is
given up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.cluster.control.messages import Order, StepDone, StepServed
from moe_serve.cluster.control.rank_link import LinkEvent
from moe_serve.cluster.members.membership import Membership
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.errors import ChannelClosedError, TimelineError

_log = logging.getLogger(__name__)

_STOP_S = 2.0  # time that ranks have to answer once the server ends
_LOOK_S = 0.25  # between two checks for `stop`


def _ignore(name: str, report: object) -> None:
    """Ignores a single answer, for questions whose answers are only needed together."""


class RankCalls:
    """Used by the engine thread only, except `stop`."""

    def __init__(self, membership: Membership, watch: PoolWatch, clock: Clock = REAL_CLOCK) -> None:
        self._membership, self._watch, self.clock = membership, watch, clock
        self.on_event: Callable[[LinkEvent], None] = lambda event: None  # set by the coordinator
        self._stop_at = math.inf

    def next_event(self, timeout_s: float) -> LinkEvent | None:
        """See `Membership.next_event`; also passes the ranks' step reports to the watch."""
        event = self._membership.next_event(timeout_s)
        if event is None:
            return None
        if event.link is not None and isinstance(event.report, StepServed | StepDone):
            try:
                self._watch.heard(event.name, event.report, event.link.clock_offset_ns)
            except TimelineError as error:  # the step's tokens are not affected
                _log.warning("%s%s: %s", self._membership.prefix, event.name, error)
        self.on_event(event)
        return event

    def stop(self) -> None:
        """Ends all waits soon, including the current one, because the server ends. Safe from any
        thread.
        """
        self._stop_at = self.clock() + _STOP_S

    @property
    def is_stopped(self) -> bool:
        return self.clock() >= self._stop_at

    def wait_for_event(self, deadline: float) -> LinkEvent | None:
        """Returns the next event; None at the deadline, or once `stop` was called."""
        while (remaining_s := min(deadline, self._stop_at) - self.clock()) > 0:
            if (event := self.next_event(min(remaining_s, _LOOK_S))) is not None:
                return event
        return self.next_event(0.0)

    def send(self, name: str, order: Order) -> None:
        """Sends an order to a rank that may be gone; the link's reader reports a loss."""
        link = self._membership.roster[name].link
        if link is not None:
            try:
                link.send(order)
            except ChannelClosedError as error:
                _log.warning("%s%s: %s", self._membership.prefix, name, error)

    def ask(
        self,
        orders: Mapping[str, Order],
        kind: type,
        timeout_s: float,
        on_answer: Callable[[str, object], None] = _ignore,
    ) -> dict[str, Any]:
        """Sends orders and collects the answers of one kind, by rank.

        Lost ranks, and ranks that have not answered when the server ends, are left out. `on_answer`
        gets each answer as it comes, and None for a lost rank.
        """
        for name, order in orders.items():
            self.send(name, order)
        roster, answers = self._membership.roster, dict[str, Any]()
        # by process, because a restarted one does not know the order
        waiting = {name: roster[name].num_starts for name in orders}
        deadline = self.clock() + timeout_s
        while True:
            for name, start in list(waiting.items()):
                if not roster[name].is_present or roster[name].num_starts != start:
                    del waiting[name]
                    on_answer(name, None)
            if not waiting:
                return answers
            event = self.wait_for_event(deadline)
            if event is None and self.is_stopped:
                for name in waiting:
                    on_answer(name, None)
                return answers
            if event is None:
                for name in sorted(waiting):
                    self._membership.give_up(name, f"no {kind.__name__} in {timeout_s:g} s")
            elif event.name in waiting and isinstance(event.report, kind):
                del waiting[event.name]
                answers[event.name] = event.report
                on_answer(event.name, event.report)
