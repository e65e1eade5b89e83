"""Several cells behind the interface of one engine.

step:  end the steps of cells that have come back
       move requests between cells
       begin the next step of every cell that has work
       wait, unless there is something to tell
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.cell_stats import stats_of
from moe_serve.cluster.cells.moves import Moves
from moe_serve.cluster.cells.parcel_post import ParcelPost
from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.cluster.parcels.rank_carrier import RankCarrier
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.service.admission import Admission
from moe_serve.errors import CellsError, ClusterError

_log = logging.getLogger(__name__)

_RETRY_S = 0.02  # until a cell that could begin nothing is asked again


@dataclass(frozen=True, slots=True)
class Parcels:
    """The parts by which KV pages travel. `close` closes what the cells share, after them."""

    carrier: RankCarrier
    post: ParcelPost
    close: Callable[[], None]


class CellsEngine:
    """Implements DrivenEngine. `news` is set, on any thread, when there is something to do."""

    def __init__(
        self,
        cells: Sequence[Cell],
        moves: Moves,
        parcels: Parcels,
        ids: itertools.count[int],
        news: threading.Event,
        *,
        outage_limit_s: float,
    ) -> None:
        """`outage_limit_s`: seconds without a live cell after which `step` raises ClusterError."""
        self.cells, self._moves, self._ids, self._news = tuple(cells), moves, ids, news
        self._parcels = parcels
        self._outage_limit_s = outage_limit_s
        self._pending: list[TokenDelta] = []
        self._is_nudged = False
        for cell in self.cells:
            cell.engine.on_lost = functools.partial(self._rank_lost, cell)
        self.set_waker(lambda: None)
        self.max_model_len = min(cell.engine.max_model_len for cell in self.cells)

    @property
    def has_work(self) -> bool:
        is_any_busy = any(cell.is_out or cell.engine.has_work for cell in self.cells)
        has_news = self._parcels.post.has_reports or self._parcels.carrier.has_news
        return is_any_busy or bool(self._pending) or self._moves.has_work or has_news

    @property
    def num_waiting(self) -> int:
        return sum(cell.engine.num_waiting for cell in self.cells) + len(self._moves.waiting)

    @property
    def num_running(self) -> int:
        return sum(cell.engine.num_running for cell in self.cells)

    @property
    def num_seats(self) -> int:
        return sum(cell.engine.num_seats for cell in self.cells)

    @property
    def admission(self) -> Admission | None:
        """See `DrivenEngine.admission`. It is the same in all cells."""
        return self.cells[0].engine.admission

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `DrivenEngine.set_waker`."""

        def wake_all() -> None:
            self._news.set()
            wake()

        for cell in self.cells:
            cell.engine.set_waker(wake_all)
        self._parcels.post.on_news = wake_all

    def nudge(self) -> None:
        """Ends the wait of `step`, as a request or an abort waits to be handed in. Safe from any
        thread."""
        self._is_nudged = True
        self._news.set()

    def stop_waiting(self) -> None:
        """See `DrivenEngine.stop_waiting`."""
        for cell in self.cells:
            cell.engine.stop_waiting()
        self.nudge()

    def close(self) -> None:
        """See `DrivenEngine.close`."""
        self.stop_waiting()
        for cell in self.cells:
            cell.close()
        self._parcels.close()

    def add(self, request: GenerationRequest) -> None:
        """Queues a request in the cell that suits it best."""
        length = len(request.prompt_token_ids)
        assert 0 < length < self.max_model_len, f"prompt of {length} tokens reached the engine"
        self._moves.add(EngineSequence(next(self._ids), request))

    def abort(self, request_id: str) -> None:
        """Ends a request; one in a cell that is out ends when that is back."""
        deltas = self._moves.abort(request_id)
        if deltas is not None:
            self._pending += deltas
            return
        for cell in self.cells:
            cell.abort(request_id)

    def step(self) -> list[TokenDelta]:
        """Ends and begins steps of cells. Waits while that is all there is to do, but not for one
        cell while another has ended a step."""
        while True:
            self._news.clear()
            self._parcels.post.deliver(self._parcels.carrier)
            is_changed = self._end_steps() | self._moves.turn()
            num_stuck = self._begin_steps()
            if is_changed or self._pending or self._is_nudged or not self.has_work:
                break
            self._check_outage()
            is_stuck = num_stuck > 0 or self._moves.has_work
            self._news.wait(_RETRY_S if is_stuck else None)
        self._is_nudged = False
        deltas, self._pending = self._pending, []
        return deltas

    def drain(self, index: int, *, is_draining: bool) -> None:
        """Stops or resumes giving requests to a cell. Safe from any thread; raises CellsError."""
        if not 0 <= index < len(self.cells):
            raise CellsError(
                f"There is no cell {index}: this server has the cells 0 to {len(self.cells) - 1}."
            )
        others = [cell for cell in self.cells if cell.index != index and not cell.is_draining]
        if is_draining and not others:
            raise CellsError(
                f"Cell {index} is not drained: it is the only one that takes requests. Undrain "
                "another one first."
            )
        self.cells[index].is_draining = is_draining
        what = "drains: its requests move away" if is_draining else "takes requests again"
        _log.info("%s %s", self.cells[index].name, what)
        self._news.set()

    def stats(self) -> EngineStats:
        """Returns the sums over all cells. Names of ranks begin with that of their cell."""
        return stats_of(self.cells, self._moves)

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`. Cells that are out are not checked."""
        for cell in self.cells:
            if not cell.is_out:
                cell.engine.check_integrity()
        self._moves.check_integrity()
        self._parcels.carrier.check_integrity()

    def _rank_lost(
        self, cell: Cell, rank: str, start: int, sequences: list[EngineSequence]
    ) -> None:
        self._parcels.carrier.rank_lost(RankPlace(cell.index, rank, start))
        self._moves.rank_lost(cell, rank, sequences)

    def _end_steps(self) -> bool:
        """Returns True if a step has ended."""
        back = [cell for cell in self.cells if cell.has_come_back]
        for cell in back:
            self._end(cell)
        return bool(back)

    def _end(self, cell: Cell) -> None:
        self._pending += cell.end()
        self._moves.after_step(cell)

    def _begin_steps(self) -> int:
        """Returns the number of cells that have work but could not begin any."""
        num_stuck = 0
        for cell in self.cells:
            if cell.is_out:
                continue
            self._moves.before_step(cell)
            if cell.engine.has_work and not cell.begin():
                self._end(cell)
                num_stuck += 1
        return num_stuck

    def _check_outage(self) -> None:
        """Ends the server if no cell has been able to compute for too long."""
        outages = [cell.engine.outage_s for cell in self.cells]
        if min(outages) > self._outage_limit_s:
            raise ClusterError(
                f"no cell could compute a step for {self._outage_limit_s:g} s; the last loss: "
                f"{self.stats().last_loss}. The ranks' output says why they do not come back."
            )
