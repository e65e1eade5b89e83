"""Orders to ranks and their answers: every wait has an end, and who keeps silent is given up."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from moe_serve.cluster.control.messages import Order, StepDone, StepServed
from moe_serve.cluster.control.rank_link import Event
from moe_serve.cluster.members.membership import Membership
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.errors import ChannelClosedError, TimelineError

_log = logging.getLogger(__name__)

_STOP_S = 2.0  # that ranks still get to answer when the server ends
_LOOK_S = 0.25  # between two looks whether it ends


def _ignore(name: str, report: object) -> None:
    """For questions whose answers can wait for each other."""


class RankCalls:
    """Used by the engine thread only, but for `stop`."""

    def __init__(self, membership: Membership, watch: PoolWatch) -> None:
        self._membership, self._watch = membership, watch
        self.on_event: Callable[[Event], None] = lambda event: None  # whoever waits for it
        self._stop_at = math.inf

    def next_event(self, timeout_s: float) -> Event | None:
        """See `Membership.next_event`; what ranks tell of their steps goes to the watch too."""
        event = self._membership.next_event(timeout_s)
        if event is None:
            return None
        if event.link is not None and isinstance(event.report, StepServed | StepDone):
            try:
                self._watch.heard(event.name, event.report, event.link.clock_offset_ns)
            except TimelineError as error:  # its tokens are none the worse
                _log.warning("%s: %s", event.name, error)
        self.on_event(event)
        return event

    def stop(self) -> None:
        """The server ends: all waits do so soon, also the one that goes on. On any thread."""
        self._stop_at = time.monotonic() + _STOP_S

    @property
    def is_stopped(self) -> bool:
        return time.monotonic() >= self._stop_at

    def wait_for_event(self, deadline: float) -> Event | None:
        """The next one; None at the deadline, or once this was stopped."""
        while (remaining_s := min(deadline, self._stop_at) - time.monotonic()) > 0:
            if (event := self.next_event(min(remaining_s, _LOOK_S))) is not None:
                return event
        return self.next_event(0.0)

    def send(self, name: str, order: Order) -> None:
        """To a rank that may be gone: its reader tells the rest."""
        link = self._membership.roster[name].link
        if link is not None:
            try:
                link.send(order)
            except ChannelClosedError as error:
                _log.warning("%s: %s", name, error)

    def ask(
        self,
        orders: Mapping[str, Order],
        kind: type,
        timeout_s: float,
        on_answer: Callable[[str, object], None] = _ignore,
    ) -> dict[str, Any]:
        """Collect the answers of one kind; ranks that are lost give none,
        nor do those that have not answered when the server ends.

        `on_answer` gets each as it comes, and None for a rank that is lost."""
        for name, order in orders.items():
            self.send(name, order)
        roster, answers = self._membership.roster, dict[str, Any]()
        waiting = {name: roster[name].num_starts for name in orders}  # a new process knows nothing
        deadline = time.monotonic() + timeout_s
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
