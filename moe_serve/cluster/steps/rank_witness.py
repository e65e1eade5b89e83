"""Describes the activity of a cell's ranks for hang reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.members.roster import RankState, Roster
from moe_serve.cluster.steps.coordinator import Coordinator

Stacks = Callable[[Iterable[str]], Mapping[str, tuple[str, ...]]]


class RankWitness:
    """Implements ActivityReport. `stacks` is None if the ranks are not all on this host."""

    def __init__(self, roster: Roster, coordinator: Coordinator, stacks: Stacks | None) -> None:
        self._roster, self._coordinator, self._stacks = roster, coordinator, stacks

    def lines(self) -> list[str]:
        """Returns the steps in progress, a line for each rank, and the stacks."""
        lines = self._coordinator.open_steps or ["no step is under way"]
        states = list(self._roster.all())
        lines = [*lines, *(_line(state) for state in states)]
        present = [str(state.name) for state in states if state.is_present]
        if self._stacks is None:
            return [*lines, "stacks: ranks of a launch are not asked; send them SIGUSR1"]
        for name, tail in self._stacks(present).items():
            lines += ["", f"the last output of {name}, with its stacks if it could answer:", *tail]
        return lines


def _line(state: RankState) -> str:
    link = state.link
    if link is None:
        return f"{state.name}: {state.phase.value}, no connection"
    age = REAL_CLOCK() - link.last_beat
    at = "between steps"
    if link.operation:
        at = f"{link.operation}, for {link.operation_s + age:.1f} s"
    return f"{state.name}: {state.phase.value}, last heard of {age:.1f} s ago; {at}"


class CellsWitness:
    """Implements ActivityReport for several cells, by their names."""

    def __init__(self, witnesses: Callable[[], Mapping[str, RankWitness | None]]) -> None:
        """`witnesses` returns the witnesses of the present cells."""
        self._witnesses = witnesses

    def lines(self) -> list[str]:
        """Returns the lines of each cell below its name."""
        lines: list[str] = []
        for name, witness in self._witnesses().items():
            lines += [f"{name}:", *([] if witness is None else witness.lines())]
        return lines
