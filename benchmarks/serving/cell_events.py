"""Counts with which events the gaps between two tokens of a stream coincide, cell by cell.

long      a step of its cell read more than 64 tokens of prompts
short     a step of its cell read fewer, such as the prompt of another stream
pages     its cell took KV pages that arrived, beside the step or before it
moved     its token came from another cell than the one before
beside    none of these, but another cell reads a prompt, and shares the cores
nothing   none of these
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np

from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.engine.request.request import TokenDelta

EVENTS = ("long", "short", "pages", "moved", "beside", "nothing")
_SHORT = 64  # tokens of prompts in a step


class GapEvents:
    """Watches the steps of an engine's cells from now on; `gaps` are those of requests that
    `watch` named, in seconds."""

    def __init__(self, engine: CellsEngine) -> None:
        self.gaps: defaultdict[str, list[float]] = defaultdict(list)
        self.steps: Counter[tuple[str, str]] = Counter()  # by the cell and the event
        self._cells, self._watched = engine.cells, set[str]()
        self._last: dict[str, tuple[float, str]] = {}  # time and cell of a stream's last token
        self._num_pages = engine_pages(engine)
        for cell in engine.cells:
            cell.end = functools.partial(self._end, cell, cell.end, [0])  # type: ignore[method-assign]

    def watch(self, name: str) -> None:
        self._watched.add(name)

    def shares(self) -> dict[str, float]:
        """Returns the share of the gaps that coincide with each event."""
        num = sum(map(len, self.gaps.values()))
        return {event: len(self.gaps[event]) / max(1, num) for event in EVENTS}

    def medians_ms(self) -> dict[str, float]:
        """Returns the median gap with each event that there was."""
        return {event: 1e3 * float(np.median(self.gaps[event])) for event in EVENTS
                if self.gaps[event]}  # fmt: skip

    def _end(
        self, cell: Cell, end: Callable[[], list[TokenDelta]], seen: list[int]
    ) -> list[TokenDelta]:
        """Ends a step as `Cell.end` does. `seen`: tokens of prompts that the cell has read."""
        before = seen[0]
        deltas, now = end(), time.monotonic()
        seen[0] = sum(engine.progress[0] for engine in cell.rank_engines.values())
        event = self._event(cell, seen[0] - before)
        self.steps[cell.name, event] += 1
        for delta in deltas:
            name = delta.request_id
            if name in self._watched and delta.token_ids:
                if name in self._last:
                    at, where = self._last[name]
                    self.gaps[event if where == cell.name else "moved"].append(now - at)
                self._last[name] = now, cell.name
        return deltas

    def _event(self, cell: Cell, num_prompt: int) -> str:
        if num_prompt > 0:
            return "long" if num_prompt > _SHORT else "short"
        if self._num_pages(cell):
            return "pages"
        others = (other for other in self._cells if other is not cell and other.is_out)
        return "beside" if any(map(_is_reading, others)) else "nothing"


def _is_reading(cell: Cell) -> bool:
    """Returns whether a sequence of a cell has many tokens of its prompt to read."""
    running = (s for engine in cell.rank_engines.values() for s in engine.moving.running)
    return any(sequence.num_pending_tokens > _SHORT for sequence in running)


def engine_pages(engine: CellsEngine) -> Callable[[Cell], int]:
    """Returns what tells how many pages came to a cell since it was asked last."""
    carrier, came = engine._parcels.carrier, Counter[int]()
    take_ended = carrier.take_ended

    def noted():  # type: ignore[no-untyped-def]
        ended = take_ended()
        for each in ended:
            came[each.parcel.target.cell] += len(each.parcel.target_pages)
        return ended

    carrier.take_ended = noted  # type: ignore[method-assign]
    return lambda cell: came.pop(cell.index, 0)
