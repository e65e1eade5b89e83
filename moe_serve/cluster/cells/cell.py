"""A cell: some ranks that step together, their engine, and the thread that waits for them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping

from moe_serve.cluster.cells.waiter import Waiter
from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.step_in_flight import RankLostError
from moe_serve.config.cells import CellShape
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.request import TokenDelta
from moe_serve.engine.request.stats import EngineStats


class Cell:
    """Used by the engine's thread. `on_news` is called, on any thread, when a step has ended."""

    def __init__(
        self,
        index: int,
        shape: CellShape,
        engine: ClusterEngine,
        on_news: Callable[[], None],
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_closed` is called when its ranks have ended, to free what else it has."""
        self.index, self.shape, self.engine, self._on_closed = index, shape, engine, on_closed
        self.lacks: Callable[[int], bool] = lambda adapter: (
            False
        )  # returns whether a rank has lost an adapter
        self._is_draining = False
        self.is_leaving = False  # it drains, and then ends
        self.lost_at = -math.inf  # when `stats` last found more lost ranks than before
        self._num_lost = 0
        self._aborts: list[str] = []  # aborted requests of a cell that is out
        self._waiter = Waiter(self.name, on_news)

    @property
    def name(self) -> str:
        return cell_name(self.index)

    @property
    def is_draining(self) -> bool:
        """True if it gets no new requests, and its running ones move away."""
        return self._is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._is_draining, service = value, self.engine.service
        if service is not None:  # forecasts count only on cells that take requests
            service.admission.set_open(service.number, is_open=not value)

    @property
    def is_out(self) -> bool:
        """True while the waiter waits for its ranks: they get no orders, and the state that the
        running step uses does not change.
        """
        return self._waiter.is_busy

    @property
    def has_come_back(self) -> bool:
        """True if it is out and `end` does not wait."""
        return self._waiter.has_ended

    @property
    def is_live(self) -> bool:
        """True if it can compute steps."""
        return bool(self.engine.rank_engines) and not self.engine.outage_s

    @property
    def rank_engines(self) -> Mapping[str, Engine]:
        """The engines of its attention ranks that are there, by the rank's name."""
        return self.engine.rank_engines

    def place_of(self, rank: str) -> RankPlace:
        """Returns the place of an attention rank that is there."""
        return RankPlace(self.index, rank, self.engine.start_of(rank))

    def begin(self) -> bool:
        """Sends out a step, for which the waiter then waits. Returns False if there is nothing to
        wait for.
        """
        if not self.engine.begin():
            return False
        self._waiter.start(self.engine.wait)
        return True

    def end(self) -> list[TokenDelta]:
        """Ends the step of a cell that has come back, or publishes the results of a `begin` that
        sent no step.
        """
        if self.is_out:
            self._waiter.take()
        deltas = self.engine.end()
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            self.engine.abort(request_id)
        return deltas

    def abort(self, request_id: str) -> None:
        """Ends a request: now, or when the cell is back. Unknown ids are ignored."""
        if self.is_out:
            self._aborts.append(request_id)
        else:
            self.engine.abort(request_id)

    def stats(self) -> EngineStats:
        """Returns the statistics of its engine, and notes losses. Safe from any thread."""
        stats = self.engine.stats()
        if stats.num_lost_ranks > self._num_lost:
            self._num_lost, self.lost_at = stats.num_lost_ranks, time.monotonic()
        return stats

    def retire(self) -> None:
        """Hands over the pages that a tier keeps, and ends the cell's part in forecasts, on the
        engine's thread. The cell must have no requests, and only `close` may follow.
        """
        for engine in self.engine.rank_engines.values():
            with contextlib.suppress(RankLostError):
                engine.close()
            engine.surrender()  # gives back its part of a tier that other cells use
        if self.engine.service is not None:
            self.engine.service.policy.remove_cell(self.engine.service.number)

    def close(self) -> None:
        """Ends its ranks. On any thread, and after `stop_waiting` of its engine."""
        self._waiter.close()
        self.engine.close()
        self._on_closed()


def cell_name(index: int) -> str:
    """Returns the name of a cell, which is the first part of its ranks' names in reports."""
    return f"cell-{index}"
