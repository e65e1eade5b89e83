"""Lets the number of cells of a running server follow its load."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_serve.clock import Clock
from moe_serve.cluster.autoscale.added_cells import AddedCells
from moe_serve.cluster.autoscale.autoscaler import Autoscaler, Possible
from moe_serve.cluster.autoscale.scale_view import CellCounts, ScaleView
from moe_serve.cluster.autoscale.scaling_window import ScaledCell, ScalingWindow, cells_of_role
from moe_serve.config.cells import MAX_CELLS, CellRole, CellShape
from moe_serve.engine.request.stats import EngineStats, ScaleAction, ScalingStats
from moe_serve.engine.watch.cells_control import CellsControl
from moe_serve.errors import MoeServeError

_log = logging.getLogger(__name__)
_CHANGING = ("starting", "leaving", "stopping")
_FULL = 0.9  # the largest share of used KV pages in the other cells after a removal
_MOST_PERIOD_S = 1.0  # between two samples of the load


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRules:
    """The settings of a live scaler. `shapes` has the cell that is added for each role, `num_seats`
    is the number of seats of each attention rank, and `start_s` the expected time of a start until
    one was measured.
    """

    shapes: Mapping[CellRole, CellShape]
    num_seats: int
    every_s: float
    start_s: float


class LiveScaler:
    """Adds and removes cells of a running server by its load, in the way of the admin routes. It
    decides once in every interval on its own thread, and changes nothing while a cell starts or
    leaves.
    """

    def __init__(self, autoscaler: Autoscaler, rules: ScaleRules, clock: Clock) -> None:
        self._autoscaler, self._rules, self._clock = autoscaler, rules, clock
        self._window = ScalingWindow(list(rules.shapes), rules.num_seats, clock())
        self._num_decisions: Counter[ScaleAction] = Counter()
        self._decided_at = clock()
        self._state = ScalingStats(policy=autoscaler.policy.name, wanted={}, num_decisions={})
        self._held: dict[CellRole, int] = {}  # wanted numbers already reported as not possible
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        # Called on the engine's thread.
        self.request_came, self.note = self._window.request_came, self._window.note

    def start(self, stats: Callable[[], EngineStats], cells: CellsControl) -> None:
        """Starts the thread that decides."""
        self.use(stats, cells)
        self._thread = threading.Thread(target=self._run, name="autoscale", daemon=True)
        self._thread.start()

    def use(self, stats: Callable[[], EngineStats], cells: CellsControl) -> None:
        """Sets the observed engine and the cells to change. `turn` may be called from then on."""
        self._engine_stats, self._cells = stats, cells
        self._added = AddedCells(cells, self._rules.start_s, self._rules.every_s)

    def close(self) -> None:
        """Ends the thread. It may be called several times, and without a start."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> ScalingStats:
        """Returns the last decision and the counts. Safe from any thread."""
        return self._state

    def turn(self) -> None:
        """Samples the load, checks starting cells, and decides if an interval has passed."""
        now, stats = self._clock(), self._engine_stats()
        self._window.sample(stats, now)
        if text := self._added.follow(stats.cells, now):
            self._say("failed", text, logging.ERROR)
        if now - self._decided_at >= self._rules.every_s:
            self._decided_at = now
            self._decide(stats, now)

    def _run(self) -> None:
        period_s = min(_MOST_PERIOD_S, self._rules.every_s / 4)
        while not self._ended.wait(period_s):
            try:
                self.turn()
            except Exception:  # top of the thread: the cells stay as they are
                _log.exception("autoscaling could not decide, and tries again")

    def _decide(self, stats: EngineStats, now: float) -> None:
        view = self._window.take(stats, now, self._added.start_s)
        before: CellCounts = {role: load.num_cells for role, load in view.roles.items()}
        cells = {r: cells_of_role(stats, r, self._rules.num_seats) for r in before}
        hold = _Hold.of(stats, self._added.wait_s(now))
        possible = {role: hold.possible(cells[role], before[role]) for role in before}
        wanted = self._autoscaler.wanted(view, possible)
        aim = self._autoscaler.aim
        self._state = replace(self._state, wanted={role: aim[role] for role in aim})
        for role, count in wanted.items():
            why = self._why(role, aim[role], view)
            if count > before[role]:
                self._add(role, count - before[role], why, now)
            elif count < before[role]:
                self._remove(_first_to_leave(cells[role])[: before[role] - count], why)
            elif aim[role] != count:
                reason = "the changes of this hour are used up (cells.max_changes)"
                if not possible[role].fewest <= aim[role] <= possible[role].most:
                    reason = hold.reason(is_more=aim[role] > count)
                self._hold(role, f"{why}, but {reason}.")
            else:
                self._count("keep")
                self._held.pop(role, None)

    def _add(self, role: CellRole, num: int, why: str, now: float) -> None:
        """Starts cells, and stops at the first that cannot start."""
        shape, names = self._rules.shapes[role], []
        for _ in range(num):
            index = self._added.start(shape, now)
            if isinstance(index, str):
                self._say("failed", f"{why}. {index}", logging.ERROR)
                break
            names.append(f"cell-{index}")
        if names:
            self._say("add", f"{why}; {shape} is added as {', '.join(names)}.")

    def _remove(self, cells: Sequence[ScaledCell], why: str) -> None:
        for cell in cells:
            name = cell.status.name
            try:
                self._cells.remove_cell(cell.index)
            except MoeServeError as error:
                self._say("failed", f"{why}, but {name} stays: {error}", logging.WARNING)
                return
            self._say("remove", f"{why}; {name} with {cell.num_requests} requests leaves.")

    def _hold(self, role: CellRole, text: str) -> None:
        """Reports that a wanted number of cells is not possible now, once for each number."""
        self._count("hold")
        wanted = self._state.wanted[role]
        if self._held.get(role) != wanted:
            self._held[role] = wanted
            self._tell(text, logging.INFO)

    def _why(self, role: CellRole, wanted: int, view: ScaleView) -> str:
        load = view.roles[role]
        rate = view.num_arrived / view.interval_s
        return (
            f"cells of the role {role}: {wanted} wanted, {load.num_cells} there, as "
            f"{load.utilisation:.0%} of the seats were taken in the last {view.interval_s:.3g} s "
            f"and {rate:.3g} requests/s came"
        )

    def _say(self, action: ScaleAction, text: str, level: int = logging.INFO) -> None:
        self._count(action)
        self._held.clear()
        self._tell(text, level)

    def _tell(self, text: str, level: int) -> None:
        _log.log(level, "autoscaling by %s: %s", self._state.policy, text)
        self._state = replace(self._state, last=text, num_said=self._state.num_said + 1)

    def _count(self, action: ScaleAction) -> None:
        self._num_decisions[action] += 1
        self._state = replace(self._state, num_decisions=dict(self._num_decisions))


@dataclass(frozen=True, slots=True)
class _Hold:
    """The reasons not to change the number of cells now. An empty text means no reason."""

    any: str = ""
    more: str = ""  # not to add
    fewer: str = ""  # not to remove

    @staticmethod
    def of(stats: EngineStats, wait_s: float) -> _Hold:
        changing = [f"{c.name} is {c.state}" for c in stats.cells if c.state in _CHANGING]
        away = [f"{cell.name} cannot compute" for cell in stats.cells if cell.outage_s]
        wait = f"no cell is added for {wait_s:.3g} s after one that could not start"
        return _Hold(
            any="" if stats.is_alive and not changing else "; ".join(changing) or "it has stopped",
            more=wait if wait_s else "",
            fewer="; ".join(away),
        )

    def possible(self, cells: Sequence[ScaledCell], now: int) -> Possible:
        """Returns the numbers of cells of a role that are possible now."""
        if self.any:
            return Possible(now, now)
        fewest = now if self.fewer else now - _num_spare(cells)
        return Possible(fewest, now if self.more else MAX_CELLS)

    def reason(self, *, is_more: bool) -> str:
        own = self.more if is_more else self.fewer
        return self.any or own or "the others have no room for the requests"


def _first_to_leave(cells: Sequence[ScaledCell]) -> list[ScaledCell]:
    """Returns the serving cells, those with the fewest requests first; of equal ones, the newest
    first.
    """
    serving = [cell for cell in cells if cell.status.state == "serving"]
    return sorted(serving, key=lambda cell: (cell.num_requests, -cell.index))


def _num_spare(cells: Sequence[ScaledCell]) -> int:
    """Returns how many cells can leave while the others have seats and pages for all requests."""
    left = _first_to_leave(cells)
    num_serving = len(left)
    num_requests = sum(cell.num_requests for cell in left)
    used = sum(cell.status.load.num_used_pages for cell in left)
    while len(left) > 1:
        rest = left[1:]
        num_pages = sum(cell.status.load.num_pages for cell in rest)
        if num_requests > sum(cell.num_seats for cell in rest) or used > _FULL * num_pages:
            break
        left = rest
    return num_serving - len(left)
