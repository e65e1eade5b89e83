"""The cells that start or stop, each on its own thread, and those that could not start."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_serve.cluster.cells.cell import Cell, cell_name
from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.config.cells import CellShape
from moe_serve.engine.request.stats import CellState, CellStatus
from moe_serve.engine.watch.cells_control import CellPlace, NodeStatus
from moe_serve.errors import MoeServeError

_log = logging.getLogger(__name__)

_MOST_FAILED = 8  # cells that are listed; older ones are forgotten
_CLOSE_S = 60.0  # for the threads to end, when the server ends


class CellStart(Protocol):
    """A cell that starts."""

    @property
    def note(self) -> str:
        """Tells operators what the cell waits for."""
        ...

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that start the ranks for which it waits, if operators start them."""
        ...

    def run(self) -> Cell:
        """Starts its ranks and waits until they have loaded. Raises MoeServeError."""
        ...

    def close(self) -> None:
        """Ends its ranks and frees everything, also while `run` runs. May be called again."""
        ...


class CellMaker(Protocol):
    """Makes cells of a running server."""

    def check(self, shapes: Sequence[CellShape], place: CellPlace) -> None:
        """Raises ConfigError or CellsError if the server cannot have all these cells, of which the
        last one is to be added."""
        ...

    def begin(self, index: int, shape: CellShape, place: CellPlace) -> CellStart:
        """Makes the parts of a cell in this process. Raises MoeServeError."""
        ...

    def nodes(self) -> Sequence[NodeStatus]:
        """See `CellsControl.nodes`."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class StateChange:
    """A cell that does not serve. `places`: its attention ranks, while they end."""

    index: int
    shape: CellShape
    state: CellState
    why: str = ""
    start: CellStart | None = None
    is_called_off: bool = False
    places: tuple[RankPlace, ...] = ()
    thread: threading.Thread | None = None

    def status(self) -> CellStatus:
        start = self.start
        return CellStatus(
            name=cell_name(self.index),
            role=self.shape.role,
            ranks=self.shape.ranks,
            state=self.state,
            note=self.why or ("" if start is None else start.note),
            commands=() if start is None else start.commands,
        )


class CellChanges:
    """The cells that start, stop or have failed. Any thread may call it; some methods require that
    the caller holds `lock`.
    """

    def __init__(self, maker: CellMaker, lock: threading.RLock) -> None:
        self._maker, self._lock = maker, lock
        self.of: dict[int, StateChange] = {}  # by the numbers of cells; read it with the lock
        # Cells that have loaded.
        self.arrived: queue.SimpleQueue[tuple[Cell, StateChange]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[StateChange] = queue.SimpleQueue()
        self.on_news: Callable[[], None] = lambda: None  # one of the two is no longer empty

    def start(self, index: int, shape: CellShape, place: CellPlace) -> None:
        """Begins to start a cell. Requires the lock."""
        change = self.of[index] = StateChange(index=index, shape=shape, state="starting")
        _log.info("%s starts: %s", cell_name(index), shape)
        self._run(change, lambda: self._start(change, place))

    def call_off(self, change: StateChange) -> None:
        """Cancels a start; its ranks may take seconds to end. Requires the lock."""
        if change.state == "starting" and not change.is_called_off:
            change.is_called_off, change.why = True, "it is cancelled, and its ranks end"
            if (start := change.start) is not None:
                name = f"{cell_name(change.index)}-call-off"
                threading.Thread(target=self._end, args=(start,), name=name, daemon=True).start()

    def stop(self, cell: Cell, change: StateChange) -> None:
        """Begins to end the ranks of a cell that no longer serves, or never has. Requires the
        lock.
        """
        change.state, change.start = "stopping", None
        change.places = tuple(cell.place_of(rank) for rank in cell.rank_engines)
        self._run(change, lambda: self._stop(cell, change))

    def close(self) -> None:
        """Cancels the starts, and waits until all threads have ended."""
        with self._lock:
            changes = list(self.of.values())
            for change in changes:
                self.call_off(change)
        for change in changes:
            if change.thread is not None:
                change.thread.join(_CLOSE_S)
        while not self.arrived.empty():  # it had loaded when it was cancelled
            cell, _ = self.arrived.get()
            cell.engine.stop_waiting()
            cell.close()

    def _start(self, change: StateChange, place: CellPlace) -> None:
        start: CellStart | None = None
        try:
            start = self._maker.begin(change.index, change.shape, place)
            with self._lock:
                change.start = start
                is_called_off = change.is_called_off
            cell = None if is_called_off else start.run()
        except BaseException as error:  # top of the thread: this cell has failed, and no other
            if not (isinstance(error, MoeServeError) or change.is_called_off):
                _log.exception("%s could not start", cell_name(change.index))
            self._fail(change, start, str(error) or type(error).__name__)
            return
        if cell is None:
            self._fail(change, start, "")
            return
        self.arrived.put((cell, change))
        self.on_news()

    @staticmethod
    def _end(start: CellStart) -> None:
        """Ends the ranks of a start, for which its own thread waits."""
        with contextlib.suppress(MoeServeError):  # that thread closes it too, and logs it
            start.close()

    def _fail(self, change: StateChange, start: CellStart | None, why: str) -> None:
        try:
            if start is not None:
                start.close()
        except Exception:  # the cell has failed all the same
            _log.exception("%s did not end as it should", cell_name(change.index))
        with self._lock:
            change.start = None
            if change.is_called_off:
                _log.info("%s does not start: it was cancelled", cell_name(change.index))
                del self.of[change.index]
            else:
                _log.error("%s could not start: %s", cell_name(change.index), why)
                change.state, change.why = "failed", why
                failed = [each.index for each in self.of.values() if each.state == "failed"]
                for index in failed[:-_MOST_FAILED]:
                    del self.of[index]
        self.on_news()

    def _stop(self, cell: Cell, change: StateChange) -> None:
        try:
            cell.engine.stop_waiting()
            cell.close()
        except Exception:  # top of the thread: what is left ends with this process
            _log.exception("%s did not end as it should", cell.name)
        with self._lock:
            self.of.pop(change.index, None)
        _log.info("%s has left", cell.name)
        self.ended.put(change)
        self.on_news()

    def _run(self, change: StateChange, work: Callable[[], None]) -> None:
        name = f"{cell_name(change.index)}-{change.state}"
        change.thread = threading.Thread(target=work, name=name, daemon=True)
        change.thread.start()
