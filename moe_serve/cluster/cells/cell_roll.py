"""The cells of a server: those that serve, and those that start, leave or could not start.

    add     starting --> serving, or failed, which is listed with its reason until it is removed
    remove  serving --> leaving, while its requests move away --> stopping --> gone

Only the engine's thread lets a cell serve, or gives up one that leaves. Numbers are never used
again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.cell_changes import CellChanges, CellMaker, StateChange
from moe_serve.cluster.cells.cell_stats import past_of
from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.config.cells import CellShape, parse_cell
from moe_serve.engine.request.stats import CellStatus, EngineStats
from moe_serve.engine.watch.cells_control import ANYWHERE, CellPlace, NodeStatus
from moe_serve.errors import CellsError, UnknownCellError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """The cells that serve, and what remains of the statistics of those that have left."""

    cells: tuple[Cell, ...]
    past: EngineStats = EngineStats()


class CellRoll:
    """`now` is replaced, never changed, so any thread may read it."""

    def __init__(self, cells: Sequence[Cell], maker: CellMaker) -> None:
        self.now = Serving(tuple(cells))
        self._maker, self._lock = maker, threading.RLock()
        self._changes = CellChanges(maker, self._lock)
        self._next = len(cells)
        self._is_closed = False
        # Attention ranks that drain although their cell does not: the number of the cell, and the
        # name.
        self.drained_ranks: Callable[[], Sequence[tuple[int, str]]] = list

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when the engine's thread has something to do here."""
        self._changes.on_news = wake

    def nodes(self) -> Sequence[NodeStatus]:
        """See `CellsControl.nodes`."""
        return self._maker.nodes()

    def add(self, shape: str, *, number: int | None = None, place: CellPlace = ANYWHERE) -> int:
        """See `CellsControl.add_cell`."""
        wanted = parse_cell(shape)
        with self._lock:
            if self._is_closed:
                raise CellsError("No cell is added, because the server is shutting down.")
            if self._is_known(number, wanted):
                return int(number or 0)
            changes = [c.shape for c in self._changes.of.values() if c.state != "failed"]
            shapes = [*(cell.shape for cell in self.now.cells), *changes, wanted]
            self._maker.check(shapes, place)
            index, self._next = self._next, self._next + 1
            self._changes.start(index, wanted, place)
        return index

    def remove(self, index: int) -> None:
        """See `CellsControl.remove_cell`."""
        with self._lock:
            cell, change = self._live(index), self._changes.of.get(index)
            if cell is not None:
                if not cell.is_leaving:
                    self._check_others(cell, "removed")
                    cell.is_draining = cell.is_leaving = True
                    _log.info("%s leaves: its requests move away", cell.name)
            elif change is not None and change.state == "failed":
                del self._changes.of[index]
            elif change is not None:
                self._changes.call_off(change)
            elif not 0 <= index < self._next:
                raise self._unknown(index)
        self._changes.on_news()

    def drain(self, index: int, *, is_draining: bool) -> None:
        """See `CellsControl.drain`."""
        with self._lock:
            cell = self._live(index)
            if cell is None:
                raise self._not_serving(index)
            if is_draining and not cell.is_draining:
                self._check_others(cell, "drained")
            if cell.is_leaving and not is_draining:
                _log.info("%s stays and takes requests again", cell.name)
            elif cell.is_draining != is_draining:
                what = "drains: its requests move away" if is_draining else "takes requests again"
                _log.info("%s %s", cell.name, what)
            cell.is_draining, cell.is_leaving = is_draining, is_draining and cell.is_leaving
        self._changes.on_news()

    def all(self) -> tuple[Serving, list[CellStatus]]:
        """Returns the cells that serve, and the states of the others. Safe from any thread."""
        with self._lock:
            return self.now, [change.status() for change in self._changes.of.values()]

    @property
    def has_news(self) -> bool:
        """Returns True if `take_arrived` or `take_ended` has something to return."""
        return not (self._changes.arrived.empty() and self._changes.ended.empty())

    @property
    def has_leaving(self) -> bool:
        return any(cell.is_leaving for cell in self.now.cells)

    def take_arrived(self) -> list[Cell]:
        """Returns the cells that have loaded, which serve from now on. On the engine's thread."""
        found = []
        while not self._changes.arrived.empty():
            cell, change = self._changes.arrived.get()
            with self._lock:
                if change.is_called_off:
                    self._changes.stop(cell, change)
                    continue
                del self._changes.of[cell.index]
                self.now = Serving((*self.now.cells, cell), self.now.past)
            _log.info("%s serves: %s", cell.name, cell.shape)
            found.append(cell)
        return found

    def give_up(self, is_free: Callable[[Cell], bool]) -> list[Cell]:
        """Returns the leaving cells for which `is_free` returns True: they no longer serve. `stop`
        must follow for each of them. Call it on the engine's thread.
        """
        found = []
        with self._lock:
            for cell in [cell for cell in self.now.cells if cell.is_leaving]:
                others = [c for c in self.now.cells if c.is_live and not c.is_draining]
                if others and is_free(cell):
                    change = StateChange(index=cell.index, shape=cell.shape, state="stopping")
                    self._changes.of[cell.index] = change
                    left = tuple(other for other in self.now.cells if other is not cell)
                    self.now = Serving(left, past_of(self.now.past, cell.stats()))
                    found.append(cell)
        return found

    def stop(self, cell: Cell) -> None:
        """Begins to end the ranks of a cell that was given up."""
        with self._lock:
            self._changes.stop(cell, self._changes.of[cell.index])

    def take_ended(self) -> list[RankPlace]:
        """Returns the attention ranks that have ended with their cells. On the engine's thread."""
        found: list[RankPlace] = []
        while not self._changes.ended.empty():
            found += self._changes.ended.get().places
        return found

    def close(self) -> None:
        """Ends the cells that start or stop. Those that serve are the caller's."""
        with self._lock:
            self._is_closed = True
        self._changes.close()

    def _is_known(self, number: int | None, wanted: CellShape) -> bool:
        """Returns True if a cell with this number was asked for before. Raises CellsError if that
        was another one."""
        if number is None or number == self._next:
            return False
        cell, change = self._live(number), self._changes.of.get(number)
        shape = cell.shape if cell is not None else None if change is None else change.shape
        if shape == wanted:
            return True
        what = f"is {shape}" if shape is not None else "has left" if number < self._next else ""
        what = f", and cell {number} {what}" if what else ""
        raise CellsError(
            f"number is {number}{what}: give the next number, {self._next}, or leave it out."
        )

    def _live(self, index: int) -> Cell | None:
        return next((cell for cell in self.now.cells if cell.index == index), None)

    def _check_others(self, cell: Cell, what: str) -> None:
        """Raises CellsError unless another cell takes requests and can compute."""
        others = [other for other in self.now.cells if other is not cell]
        draining = [other for other in others if self._is_drained(other)]
        num_draining = len(draining)
        num_away = sum(not (other in draining or other.is_live) for other in others)
        if num_draining + num_away < len(others):
            return
        num_starting = sum(c.state == "starting" for c in self._changes.of.values())
        raise CellsError(
            f"Cell {cell.index} is not {what}: it is the only one that takes requests. Of the "
            f"other cells {num_draining} drain, {num_away} cannot compute now and {num_starting} "
            "start. Undrain another one, or add one and wait until it serves."
        )

    def _is_drained(self, cell: Cell) -> bool:
        """Returns True if a cell drains, or if each of its attention ranks does."""
        num_drained = sum(index == cell.index for index, _ in self.drained_ranks())
        return cell.is_draining or num_drained >= cell.shape.attention_ranks

    def _unknown(self, index: int) -> UnknownCellError:
        known = sorted({*self._changes.of, *(cell.index for cell in self.now.cells)})
        return UnknownCellError(
            f"There is no cell {index}: this server has the cells {', '.join(map(str, known))}."
        )

    def _not_serving(self, index: int) -> CellsError:
        change = self._changes.of.get(index)
        if change is None:
            return self._unknown(index)
        return CellsError(
            f"Cell {index} is {change.state}, and only a cell that serves can be drained, or take "
            "requests again."
        )
