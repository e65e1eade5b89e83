"""The placements of a server's cells. Each cell has its own expert ranks and placement."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from moe_serve.engine.routes.placement_control import (
    OUTCOMES,
    BalanceFigures,
    PlacementControl,
    PlacementStatus,
    PlanOutcome,
)
from moe_serve.errors import CellsError


class CellPlacements:
    """The controls by the numbers of their cells. Safe from any thread."""

    def __init__(self) -> None:
        self._controls: Mapping[int, PlacementControl] = {}  # replaced, never changed
        self._lock = threading.Lock()  # cells are added and removed on other threads

    def add(self, cell: int, control: PlacementControl) -> None:
        """Adds a cell that has started."""
        with self._lock:
            controls = {**self._controls, cell: control}
            self._controls = dict(sorted(controls.items()))

    def remove(self, cell: int) -> None:
        """Removes a cell that ends. Unknown ones are ignored."""
        with self._lock:
            self._controls = {key: each for key, each in self._controls.items() if key != cell}

    @property
    def by_cell(self) -> Mapping[int, PlacementControl]:
        """The controls, in the order of their cells."""
        return self._controls

    def of(self, cell: int) -> PlacementControl:
        """Returns the control of a cell. Raises CellsError if there is no such cell."""
        controls = self._controls
        if cell not in controls:
            raise CellsError(f"There is no cell {cell}: this server has {self.names}.")
        return controls[cell]

    @property
    def names(self) -> str:
        """The cells, as words for a sentence."""
        return f"the cells {', '.join(map(str, self._controls))}"

    def status(self) -> PlacementStatus:
        """Returns sums over all cells, and of each balance the worst; for metrics."""
        return combined([control.status() for control in self._controls.values()])


AnyPlacement = PlacementControl | CellPlacements  # of a server: its only cell's, or each cell's


def combined(each: Sequence[PlacementStatus]) -> PlacementStatus:
    """Returns sums of counts, the newest version, and the worst of all other figures."""
    num_plans: Counter[PlanOutcome] = Counter()
    for status in each:
        num_plans.update(status.num_plans)
    states = [status.state for status in each]
    modes = [status.mode for status in each if status.mode != "off"]

    def least(figure: Callable[[BalanceFigures], float | None]) -> float | None:
        found = [figure(status.balance) for status in each]
        return min((value for value in found if value is not None), default=None)

    def most(values: Sequence[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    return PlacementStatus(
        mode=modes[0] if modes else "off",
        state=next((s for s in ("copying", "planning") if s in states), "idle"),
        version=max((status.version for status in each), default=0),
        age_s=min((status.age_s for status in each), default=0.0),
        num_counted_tokens=sum(status.num_counted_tokens for status in each),
        balance=BalanceFigures(
            before=least(lambda b: b.before),
            predicted=least(lambda b: b.predicted),
            achieved=least(lambda b: b.achieved),
        ),
        last=None,  # it is unclear which cell's it would be
        num_plans={outcome: num_plans[outcome] for outcome in OUTCOMES},
        num_copies=sum(status.num_copies for status in each),
        num_bytes=sum(status.num_bytes for status in each),
        before_p99_s=most([status.before_p99_s for status in each]),
        during_p99_s=most([status.during_p99_s for status in each]),
    )
