"""Starts the cells that autoscaling adds, measures their start times, and delays the next attempt
after a failure."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_serve.config.cells import CellShape
from moe_serve.engine.request.stats import CellStatus
from moe_serve.engine.watch.cells_control import CellsControl
from moe_serve.errors import MoeServeError

_FIRST_WAIT, _LONGEST_WAIT_S = 2, 3600.0  # the first in intervals between decisions
_log = logging.getLogger(__name__)


class AddedCells:
    """Starts cells as `POST /admin/cells` does. After each further failure in a row it waits twice
    as long before the next start.
    """

    def __init__(self, cells: CellsControl, start_s: float, every_s: float) -> None:
        """`start_s` is the expected time of a start until one has been measured, and `every_s` the
        time between two decisions.
        """
        self._cells, self.start_s, self._every_s = cells, start_s, every_s
        self._starting: dict[int, float] = {}  # start time by cell
        self._failed: list[int] = []  # cells that are still listed, with the reason
        self._num_failures = 0  # in a row
        self._retry_at = 0.0

    def wait_s(self, now: float) -> float:
        """Returns the seconds until a cell may be started; 0: now."""
        return max(0.0, self._retry_at - now) if self._num_failures else 0.0

    def start(self, shape: CellShape, now: float) -> int | str:
        """Begins to start a cell. Returns its number, or the reason why it cannot start."""
        self.forget_failed()
        try:
            index = self._cells.add_cell(str(shape))
        except MoeServeError as error:
            return self._note_failure(f"({shape.ranks} {shape.role})", str(error), now)
        self._starting[index] = now
        return index

    def follow(self, cells: Sequence[CellStatus], now: float) -> str:
        """Checks the cells that are starting. Returns the reason of a failed start, or an empty
        text."""
        states = {cell.name: cell for cell in cells}
        text = ""
        for index, since in list(self._starting.items()):
            cell = states.get(f"cell-{index}")
            if cell is not None and cell.state == "starting":
                continue
            del self._starting[index]
            if cell is None:
                continue  # an operator removed it
            if cell.state == "failed":
                self._failed.append(index)
                text = self._note_failure(cell.name, cell.note, now)
            else:
                self.start_s, self._num_failures = now - since, 0
        return text

    def forget_failed(self) -> None:
        """Removes its failed cells from the list of cells."""
        for index in self._failed:
            try:
                self._cells.remove_cell(index)
            except MoeServeError as error:  # an operator removed it already
                _log.debug("%s", error)
        self._failed = []

    def _note_failure(self, name: str, why: str, now: float) -> str:
        self._num_failures += 1
        wait_s = self._every_s * _FIRST_WAIT * 2 ** min(16, self._num_failures - 1)
        wait_s = min(_LONGEST_WAIT_S, wait_s)
        self._retry_at = now + wait_s
        return (
            f"{name} could not start ({self._num_failures} in turn), and no cell is added for the "
            f"next {wait_s:g} s: {why.rstrip('.')}."
        )
