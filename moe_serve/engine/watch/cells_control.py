"""The operator's interface to the cells of a server; `cluster/cells` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node of a launch. `name`: the name of a joined node, or the number of a first node;
    `cells`: those that have ranks there, such as cell-0."""

    name: str
    num_ranks: int
    num_places: int | None  # None: no limit
    is_there: bool
    cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlace:
    """The place of a new cell's ranks. With `by_hand` operators start them, with `node` they run on
    this node of a launch, and otherwise the server chooses.
    """

    by_hand: bool = False
    node: str | None = None


ANYWHERE = CellPlace()


class CellsControl(Protocol):
    """Adds and removes cells, and controls which ones take requests. Safe from any thread, and no
    method waits. `EngineStats.cells` lists the cells with their states. All methods raise
    UnknownCellError for an unknown cell, and CellsError, without changing anything, if the change
    is not possible now.
    """

    def add_cell(
        self, shape: str, *, number: int | None = None, place: CellPlace = ANYWHERE
    ) -> int:
        """Begins to start a cell such as "1A1E decode", and returns its number.

        `number` makes the call safe to repeat: if a cell of the same shape has this number, the
        call returns it. Raises ConfigError for a shape that the server cannot have.
        """
        ...

    def nodes(self) -> Sequence[NodeStatus]:
        """Returns the nodes on which ranks run; empty: they run on this machine."""
        ...

    def remove_cell(self, index: int) -> None:
        """Begins to remove a cell: its requests move away, then its ranks end. A start in progress
        is cancelled, and a cell whose start has failed is no longer listed. May be repeated.
        """
        ...

    def drain(self, index: int, *, is_draining: bool) -> None:
        """Stops or resumes giving requests to a cell; its running requests move away. Resuming also
        cancels a removal, as long as the cell still has requests.
        """
        ...

    def drain_rank(self, name: str, *, is_draining: bool) -> None:
        """Does the same for one attention rank, such as "cell-1/attention-0"."""
        ...
