"""Passes the ranks' reports on parcels from the threads that read them to the engine's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable

from moe_serve.cluster.control.parcel_messages import ParcelReport
from moe_serve.cluster.control.rank_link import LinkEvent
from moe_serve.cluster.members.roster import Roster
from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.cluster.parcels.rank_carrier import RankCarrier


class ParcelPost:
    """Collects reports without waiting for the step of their cell. `on_news` is called for each."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.on_news = on_news
        self._reports: queue.SimpleQueue[tuple[int, Roster, LinkEvent]] = queue.SimpleQueue()

    def receiver(self, cell: int, roster: Roster) -> Callable[[LinkEvent], None]:
        """Returns the function that takes the reports of a cell's ranks, on any thread."""

        def receive(event: LinkEvent) -> None:
            self._reports.put((cell, roster, event))
            self.on_news()

        return receive

    @property
    def has_reports(self) -> bool:
        return not self._reports.empty()

    def deliver(self, carrier: RankCarrier) -> None:
        """Passes on the reports of processes that are still there."""
        while not self._reports.empty():
            cell, roster, event = self._reports.get()
            state, report = roster[event.name], event.report
            assert isinstance(report, ParcelReport), f"a {type(report).__name__} is no report"
            if event.link is not None and event.link is state.link:
                carrier.heard(RankPlace(cell, event.name, state.num_starts), report)
