"""Several cells behind the interface of one engine.

step:  end the steps of cells that have come back
       take in cells that were added, and give up those that leave
       move requests between cells
       begin the next step of every cell that has work
       wait, unless there is something to tell
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moe_serve.cluster.autoscale.live_scaler import LiveScaler
from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.cell_roll import CellRoll
from moe_serve.cluster.cells.cell_stats import stats_of
from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.cluster.cells.parcel_post import ParcelPost
from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.cluster.parcels.rank_carrier import RankCarrier
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.watch.cells_control import ANYWHERE, CellPlace, NodeStatus
from moe_serve.errors import CellsError, ClusterError, UnknownCellError

_log = logging.getLogger(__name__)

_RETRY_S = 0.02  # until a cell that could begin nothing, or that leaves, is looked at again
_LAST_WORK_S = 2.0  # time for a tier to take the pages of a leaving cell without requests


@dataclass(frozen=True, slots=True)
class Parcels:
    """The parts by which KV pages travel. `close` closes the parts that cells share, after the
    cells.
    """

    carrier: RankCarrier
    post: ParcelPost
    close: Callable[[], None]


class CellsEngine:
    """Implements DrivenEngine and CellsControl. `news` is set, on any thread, when there is
    something to do."""

    def __init__(
        self,
        roll: CellRoll,
        moves: CellMoves,
        parcels: Parcels,
        ids: itertools.count[int],
        news: threading.Event,
        *,
        outage_limit_s: float,
        scaler: LiveScaler | None = None,
    ) -> None:
        """After `outage_limit_s` seconds without a live cell, `step` raises ClusterError. `scaler`
        observes the load; its owner starts it.
        """
        self._roll, self._moves, self._ids, self._news = roll, moves, ids, news
        self._parcels = parcels
        self._outage_limit_s, self._scaler = outage_limit_s, scaler
        self._pending: list[TokenDelta] = []
        self._is_nudged = False
        self._free_since: dict[int, float] = {}  # when leaving cells had no more requests
        for cell in self.cells:
            cell.engine.on_lost = functools.partial(self._rank_lost, cell)
        roll.drained_ranks = lambda: moves.draining_ranks
        self.set_waker(lambda: None)
        self.max_model_len = min(cell.engine.max_model_len for cell in self.cells)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that serve. Only the engine's thread changes them; any thread may read."""
        return self._roll.now.cells

    @property
    def has_work(self) -> bool:
        is_any_busy = any(cell.is_out or cell.engine.has_work for cell in self.cells)
        has_news = self._parcels.post.has_reports or self._parcels.carrier.has_news
        is_changing = self._roll.has_news or self._roll.has_leaving
        has_moves = bool(self._pending) or self._moves.has_work
        return is_any_busy or has_moves or has_news or is_changing

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

        self._wake_all = wake_all
        for cell in self.cells:
            cell.engine.set_waker(wake_all)
        self._parcels.post.on_news = wake_all
        self._roll.set_waker(wake_all)

    def nudge(self) -> None:
        """Ends the wait of `step`, because a request or an abort waits to be handed in. Safe from
        any thread.
        """
        self._is_nudged = True
        self._news.set()

    def stop_waiting(self) -> None:
        """See `DrivenEngine.stop_waiting`."""
        for cell in self.cells:
            cell.engine.stop_waiting()
        self.nudge()

    def close(self) -> None:
        """See `DrivenEngine.close`."""
        if self._scaler is not None:
            self._scaler.close()
        self.stop_waiting()
        self._roll.close()
        for cell in self.cells:
            cell.close()
        self._parcels.close()

    def add(self, request: GenerationRequest) -> None:
        """Queues a request in the cell with the best route."""
        length = len(request.prompt_token_ids)
        assert 0 < length < self.max_model_len, f"prompt of {length} tokens reached the engine"
        self._moves.add(EngineSequence(next(self._ids), request))
        if self._scaler is not None:
            self._scaler.request_came()

    def abort(self, request_id: str) -> None:
        """Ends a request. A request of a cell that is out ends when the cell is back."""
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
            is_changed = self._end_steps() | self._change_cells() | self._moves.turn()
            num_stuck = self._begin_steps()
            if is_changed or self._pending or self._is_nudged or not self.has_work:
                break
            self._check_outage()
            is_stuck = num_stuck > 0 or self._moves.has_work or self._roll.has_leaving
            self._news.wait(_RETRY_S if is_stuck else None)
        self._is_nudged = False
        deltas, self._pending = self._pending, []
        if self._scaler is not None:
            self._scaler.note(deltas)
        return deltas

    def add_cell(
        self, shape: str, *, number: int | None = None, place: CellPlace = ANYWHERE
    ) -> int:
        """See `CellsControl.add_cell`."""
        return self._roll.add(shape, number=number, place=place)

    def nodes(self) -> Sequence[NodeStatus]:
        """See `CellsControl.nodes`."""
        return self._roll.nodes()

    def remove_cell(self, index: int) -> None:
        """See `CellsControl.remove_cell`."""
        self._roll.remove(index)

    def drain(self, index: int, *, is_draining: bool) -> None:
        """See `CellsControl.drain`."""
        self._roll.drain(index, is_draining=is_draining)

    def drain_rank(self, name: str, *, is_draining: bool) -> None:
        """See `CellsControl.drain_rank`."""
        cells, drained = self.cells, set(self._moves.draining_ranks)
        ranks = {
            f"{cell.name}/attention-{index}": (cell, f"attention-{index}")
            for cell in cells
            for index in range(cell.shape.attention_ranks)
        }
        if name not in ranks:
            raise UnknownCellError(
                f"There is no attention rank {name[:100]!r}: this server has {', '.join(ranks)}. "
                "Expert ranks have no requests of their own."
            )
        cell, rank = ranks[name]
        open_ranks = [
            other
            for other, (of, at) in ranks.items()
            if of.is_live and not of.is_draining and (of.index, at) not in drained and other != name
        ]
        if is_draining and not open_ranks:
            raise CellsError(
                f"{name} is not drained: of {len(ranks)} attention ranks it is the only one that "
                "takes requests. Undrain another one first."
            )
        if ((cell.index, rank) in drained) != is_draining:
            what = "drains: its requests move away" if is_draining else "takes requests again"
            _log.info("%s %s", name, what)
        self._moves.drain_rank(cell, rank, is_draining=is_draining)
        self._wake_all()

    def stats(self) -> EngineStats:
        """Returns the sums over all cells. Names of ranks begin with that of their cell."""
        now, others = self._roll.all()
        stats = stats_of(now.cells, self._moves, now.past, others)
        return stats if self._scaler is None else replace(stats, scaling=self._scaler.stats())

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

    def _change_cells(self) -> bool:
        """Takes in the cells that have loaded, and gives up those that leave and have no requests
        any more. Returns True if there were any."""
        arrived, ended = self._roll.take_arrived(), self._roll.take_ended()
        for cell in arrived:
            cell.engine.on_lost = functools.partial(self._rank_lost, cell)
            cell.engine.set_waker(self._wake_all)
            self._moves.add_cell(cell)
        if not self._roll.has_leaving:
            self._free_since.clear()
        given_up = self._roll.give_up(self._is_free)
        for cell in given_up:
            self._pending += cell.end()
            self._moves.remove_cell(cell)
            cell.retire()
            self._roll.stop(cell)
        for place in ended:
            self._parcels.carrier.rank_lost(place)  # its slots are free now
        return bool(arrived or given_up or ended)

    def _is_free(self, cell: Cell) -> bool:
        """Returns True if a leaving cell has nothing left that other cells need."""
        has_requests = cell.engine.num_running > 0 or cell.engine.num_waiting > 0
        if cell.is_out or has_requests or self._moves.concerns(cell):
            self._free_since.pop(cell.index, None)
            return False
        now = time.monotonic()
        is_late = now - self._free_since.setdefault(cell.index, now) > _LAST_WORK_S
        is_free = is_late or not (cell.is_live and cell.engine.has_work)
        return is_free

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
