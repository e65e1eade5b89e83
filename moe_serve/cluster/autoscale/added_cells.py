"""The cells that autoscaling has added: how long they take to start, and when to try again after
one that could not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_serve.config.cells import CellShape
from moe_serve.engine.request.stats import CellStatus
from moe_serve.engine.watch.cells_control import CellsControl
from moe_serve.errors import MoeServeError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 60.0, 3600.0
_log = logging.getLogger(__name__)


class AddedCells:
    """Starts cells as `POST /admin/cells` does. After each failure in turn it waits twice as long
    for the next start."""

    def __init__(self, cells: CellsControl, start_s: float) -> None:
        """`start_s`: how long a start takes, until one was measured."""
        self._cells, self.start_s = cells, start_s
        self._starting: dict[int, float] = {}  # since when, by cell
        self._failed: list[int] = []  # cells that are listed with their reason
        self._num_failures = 0  # in turn
        self._retry_at = 0.0

    def wait_s(self, now: float) -> float:
        """Returns the seconds until a cell may be started; 0: now."""
        return max(0.0, self._retry_at - now) if self._num_failures else 0.0

    def start(self, shape: CellShape, now: float) -> int | str:
        """Begins to start a cell. Returns its number, or why it cannot start."""
        self.forget_failed()
        try:
            index = self._cells.add_cell(str(shape))
        except MoeServeError as error:
            return self._note_failure(f"({shape.ranks} {shape.role})", str(error), now)
        self._starting[index] = now
        return index

    def follow(self, cells: Sequence[CellStatus], now: float) -> str:
        """Looks at the cells that start. Returns why one could not; empty: none has failed."""
        states = {cell.name: cell for cell in cells}
        text = ""
        for index, since in list(self._starting.items()):
            cell = states.get(f"cell-{index}")
            if cell is not None and cell.state == "starting":
                continue
            del self._starting[index]
            if cell is None:
                continue  # operators have called it off
            if cell.state == "failed":
                self._failed.append(index)
                text = self._note_failure(cell.name, cell.note, now)
            else:
                self.start_s, self._num_failures = now - since, 0
        return text

    def forget_failed(self) -> None:
        """Takes its cells that have failed off the list."""
        for index in self._failed:
            try:
                self._cells.remove_cell(index)
            except MoeServeError as error:  # operators were faster
                _log.debug("%s", error)
        self._failed = []

    def _note_failure(self, name: str, why: str, now: float) -> str:
        self._num_failures += 1
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(16, self._num_failures - 1))
        self._retry_at = now + wait_s
        return (
            f"{name} could not start ({self._num_failures} in turn), and no cell is added for the "
            f"next {wait_s:g} s: {why.rstrip('.')}."
        )
