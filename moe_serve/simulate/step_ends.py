"""Computes when the steps of simulated cells end, alone or on a machine that they share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

_DONE_S = 1e-12  # of a step's time; less is a rounding error


class StepEnds(Protocol):
    """The steps of cells that were sent out, by the number of the cell. A step begins when the one
    before it in its cell has ended."""

    def put(self, cell: int, seconds: float, now: float) -> None:
        """Adds a step that takes this long on its own machine."""
        ...

    def next_end(self, cell: int) -> float | None:
        """Returns when the step ends that a cell runs, as far as is known; None if it runs none."""
        ...

    def last_end(self, cell: int) -> float | None:
        """Returns the same of the last step that was sent out to a cell."""
        ...

    def take(self, cell: int) -> tuple[float, float]:
        """Removes the step that a cell runs -> when it began and ended."""
        ...


class OwnMachines:
    """Implements StepEnds: no cell slows another one down."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, float]]] = {}

    def put(self, cell: int, seconds: float, now: float) -> None:
        steps = self._steps.setdefault(cell, deque())
        begin = steps[-1][1] if steps else now
        steps.append((begin, begin + seconds))

    def next_end(self, cell: int) -> float | None:
        steps = self._steps.get(cell)
        return steps[0][1] if steps else None

    def last_end(self, cell: int) -> float | None:
        steps = self._steps.get(cell)
        return steps[-1][1] if steps else None

    def take(self, cell: int) -> tuple[float, float]:
        return self._steps[cell].popleft()


@dataclass(slots=True)
class _Step:
    left_s: float
    begin_s: float = 0.0


class SharedMachine:
    """Implements StepEnds: cells with a step share one machine. If together they take more than all
    of it, every step goes on slower by as much."""

    def __init__(self, shares: dict[int, float]) -> None:
        """`shares`: of the machine, which each cell takes while it computes."""
        self._shares = shares
        self._steps: dict[int, deque[_Step]] = {cell: deque() for cell in shares}
        self._now = 0.0

    def put(self, cell: int, seconds: float, now: float) -> None:
        self._advance(now)
        self._steps[cell].append(_Step(seconds, now))

    def next_end(self, cell: int) -> float | None:
        steps = self._steps[cell]
        return self._now + steps[0].left_s * self._slowdown if steps else None

    def last_end(self, cell: int) -> float | None:
        steps = self._steps[cell]
        left_s = sum(step.left_s for step in steps)
        return self._now + left_s * self._slowdown if steps else None

    def take(self, cell: int) -> tuple[float, float]:
        end = self.next_end(cell)
        assert end is not None, f"cell {cell} has no step"
        self._advance(end)
        steps = self._steps[cell]
        begin = steps.popleft().begin_s
        if steps:
            steps[0].begin_s = end
        return begin, end

    @property
    def _slowdown(self) -> float:
        return max(1.0, sum(self._shares[cell] for cell, steps in self._steps.items() if steps))

    def _advance(self, now: float) -> None:
        gap_s = max(0.0, now - self._now) / self._slowdown
        for steps in self._steps.values():
            if steps:
                left_s = steps[0].left_s - gap_s
                steps[0].left_s = left_s if left_s > _DONE_S else 0.0
        self._now = max(self._now, now)
