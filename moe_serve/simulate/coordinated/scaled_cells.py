"""Starts and drains simulated cells on the decisions of an autoscaler, and counts their costs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_serve.cluster.autoscale.autoscaler import Autoscaler
from moe_serve.cluster.autoscale.scale_view import CellCounts, RoleLoad, ScaleView
from moe_serve.config.cells import CellRole
from moe_serve.simulate.coordinated.coordinated_cell import CoordinatedCell
from moe_serve.simulate.steps_ahead import RequestTimes
from moe_serve.simulate.virtual_clock import VirtualClock

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTimes:
    """`every_s`: between decisions; `start_s`: from the start of a cell until it serves."""

    every_s: float = 60.0
    start_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """A moment at which other numbers of cells were wanted."""

    at_s: float
    before: CellCounts
    after: CellCounts


@dataclass(slots=True)
class _RequestCounts:
    """The load since the last decision. `busy`: request-seconds by cell."""

    num_arrived: int = 0
    prompt_tokens: int = 0
    num_ended: int = 0
    output_tokens: int = 0
    busy: dict[int, float] = field(default_factory=dict)


class ScaledCells:
    """Implements Watcher. Cells that are off exist, but the router gives them nothing.

    A cell that is to go drains: the router passes it over, and its requests move to other cells or
    end. It costs until it is empty. If cells are wanted again meanwhile, it simply goes on.
    """

    def __init__(
        self,
        cells: Sequence[CoordinatedCell],
        autoscaler: Autoscaler,
        clock: VirtualClock,
        times: ScaleTimes,
    ) -> None:
        self.changes: list[ScaleChange] = []
        self._cells, self._autoscaler, self._clock, self._times = cells, autoscaler, clock, times
        self._counts = _RequestCounts()
        self._on_since: dict[int, float] = {}  # cells that cost, and since when
        self._starting: list[tuple[float, int]] = []  # (when it serves, cell)
        self._device_s = 0.0
        self._decide_s = times.every_s
        first = autoscaler.first(self._view())
        for role, count in first.items():
            for cell in [cell for cell in cells if cell.shape.role == role][:count]:
                self._on_since[cell.index] = 0.0
        for cell in cells:
            cell.is_draining = cell.index not in self._on_since

    @property
    def next_s(self) -> float:
        return min(self._decide_s, self._starting[0][0] if self._starting else self._decide_s)

    def advance_to(self, now: float) -> None:
        """See `Watcher.advance_to`."""
        while self._starting and self._starting[0][0] <= now:
            self._cells[heapq.heappop(self._starting)[1]].is_draining = False
        self._end_drained(now)
        if now >= self._decide_s:
            self._decide_s = now + self._times.every_s
            self._decide(now)

    def request_came(self) -> None:
        """See `Watcher`; so are the next four."""
        self._counts.num_arrived += 1

    def request_refused(self, times: RequestTimes) -> None:
        """Counts a refused request as load: more cells would have taken it."""
        self._counts.num_arrived += 1
        self._counts.prompt_tokens += times.num_prompt

    def first_token_came(self, times: RequestTimes) -> None:
        self._counts.prompt_tokens += times.num_prompt - times.num_cached

    def request_ended(self, times: RequestTimes) -> None:
        self._counts.num_ended += 1
        self._counts.output_tokens += len(times.token_times)

    def step_ended(self, cell: CoordinatedCell, seconds: float) -> None:
        num = cell.engine.num_running + cell.engine.num_waiting
        self._counts.busy[cell.index] = self._counts.busy.get(cell.index, 0.0) + num * seconds

    def device_hours(self, now: float) -> float:
        """Returns the device hours of all cells from their starts until they were empty."""
        on = [now - since for since in self._on_since.values()]
        sizes = [self._cells[index].num_devices for index in self._on_since]
        open_s = sum(seconds * size for seconds, size in zip(on, sizes, strict=True))
        return (self._device_s + open_s) / _HOUR_S

    def most_changes(self) -> int:
        """Returns the largest number of changes within an hour."""
        at = [change.at_s for change in self.changes]
        return max((sum(t - _HOUR_S < other <= t for other in at) for t in at), default=0)

    def _decide(self, now: float) -> None:
        view = self._view()
        self._counts = _RequestCounts()
        before = {role: load.num_cells for role, load in view.roles.items()}
        wanted = self._autoscaler.wanted(view)
        if wanted != before:
            self.changes.append(ScaleChange(now, before, wanted))
        for role, count in wanted.items():
            for _ in range(count - before[role]):
                self._start_one(role, now)
            for _ in range(before[role] - count):
                self._stop_one(role)

    def _view(self) -> ScaleView:
        counts = self._counts
        return ScaleView(
            at_s=self._clock.now,
            interval_s=self._times.every_s,
            num_arrived=counts.num_arrived,
            prompt_tokens=counts.prompt_tokens,
            num_ended=counts.num_ended,
            output_tokens=counts.output_tokens,
            start_s=self._times.start_s,
            roles={role: self._load(role) for role in self._roles()},
        )

    def _roles(self) -> list[CellRole]:
        return list(dict.fromkeys(cell.shape.role for cell in self._cells))

    def _load(self, role: CellRole) -> RoleLoad:
        of_role = [cell for cell in self._cells if cell.shape.role == role]
        on = [cell for cell in of_role if cell.index in self._on_since]
        starting = {index for _, index in self._starting}
        serving = [cell for cell in on if not cell.is_draining]
        seats_s = self._times.every_s * sum(cell.num_seats for cell in serving)
        busy = self._counts.busy
        return RoleLoad(
            num_serving=len(serving),
            num_starting=len(starting & {cell.index for cell in on}),
            num_draining=sum(cell.is_draining and cell.index not in starting for cell in on),
            num_requests=sum(c.engine.num_running + c.engine.num_waiting for c in of_role),
            utilisation=sum(busy.get(c.index, 0.0) for c in of_role) / seats_s if seats_s else 0.0,
        )

    def _start_one(self, role: CellRole, now: float) -> None:
        """Lets a draining cell of a role go on, or starts one that is off."""
        starting = {index for _, index in self._starting}
        of_role = [cell for cell in self._cells if cell.shape.role == role]
        for cell in of_role:
            if cell.is_draining and cell.index in self._on_since and cell.index not in starting:
                cell.is_draining = False
                return
        cell = next(cell for cell in of_role if cell.index not in self._on_since)
        self._on_since[cell.index] = now
        heapq.heappush(self._starting, (now + self._times.start_s, cell.index))

    def _stop_one(self, role: CellRole) -> None:
        """Gives up the cell that starts last, or drains the one with the fewest requests."""
        starting = sorted(self._starting, reverse=True)
        for at_s, index in starting:
            if self._cells[index].shape.role == role:
                self._starting.remove((at_s, index))
                heapq.heapify(self._starting)
                self._end_cell(index)
                return
        serving = [c for c in self._cells if c.shape.role == role and not c.is_draining]
        cell = min(serving, key=lambda c: c.engine.num_running + c.engine.num_waiting)
        cell.is_draining = True

    def _end_drained(self, now: float) -> None:
        starting = {index for _, index in self._starting}
        for index in [index for index in self._on_since if index not in starting]:
            cell = self._cells[index]
            is_empty = not (cell.is_out or cell.engine.num_running or cell.engine.num_waiting)
            if cell.is_draining and is_empty:
                self._end_cell(index)

    def _end_cell(self, index: int) -> None:
        since = self._on_since.pop(index)
        self._device_s += (self._clock.now - since) * self._cells[index].num_devices
