"""Starts the ranks of several cells on the nodes of one launch.

Nodes know ranks by numbers that count through all cells. Each cell counts its own from 0:

    cells      1x(1A2E)                            1x(1A1E)
    a node     attention-0  expert-0  expert-1     attention-1  expert-2
    its cell   attention-0  expert-0  expert-1     attention-0  expert-0
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from moe_serve.cluster.control.rank_name import RankName, Role, all_ranks
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_starter import CellSeat, NodeStarter
from moe_serve.cluster.members.rank_starter import RankExit, RankStarter
from moe_serve.config.cells import CellShape
from moe_serve.engine.watch.cells_control import NodeStatus
from moe_serve.errors import MoeServeError

_log = logging.getLogger(__name__)


def ranks_of_cells(shapes: Sequence[CellShape]) -> list[RankName]:
    """Returns all ranks as nodes know them, cell by cell."""
    counts: Counter[Role] = Counter()
    return [name for shape in shapes for name in _named(shape, counts).values()]


def _name_of(cell: int) -> str:
    return f"cell-{cell}"


def _named(shape: CellShape, counts: Counter[Role]) -> dict[RankName, RankName]:
    """Returns the names by which nodes know the ranks of a cell, by their names in the cell.
    `counts` has the numbers of ranks that nodes already know.
    """
    names: dict[RankName, RankName] = {}
    for rank in all_ranks(shape.attention_ranks, shape.expert_ranks):
        names[rank] = RankName(rank.role, counts[rank.role])
        counts[rank.role] += 1
    return names


class CellNodes:
    """One starter of nodes for all cells. `make_starter` makes it and waits for the nodes; it is
    called once, when the first cell starts. Any thread may call."""

    def __init__(
        self, make_starter: Callable[[ClusterSecret], NodeStarter], shapes: Sequence[CellShape]
    ) -> None:
        self._make_starter = make_starter
        self._lock = threading.Lock()
        self._starter: NodeStarter | None = None
        self._running: set[int] = set()  # cells
        self._counts: Counter[Role] = Counter()  # numbers of ranks that nodes know
        self._names: dict[int, dict[RankName, RankName]] = {}  # on nodes, by those in the cell
        self._cells: dict[str, tuple[int, str]] = {}  # the opposite
        self._ended: list[tuple[int, RankExit]] = []
        for cell, shape in enumerate(shapes):
            self._name(cell, shape)
        # removes a cell in the way of the admin route; set once the cells serve
        self.remove_cell: Callable[[int], None] = lambda cell: None

    def starter_of(
        self,
        cell: int,
        shape: CellShape,
        at: HostPort,
        secret: ClusterSecret,
        node: str | None = None,
    ) -> RankStarter:
        """Returns the starter of a cell's ranks, which connect to its coordinator at `at`. A cell
        that is added later runs on `node`, or spread over all nodes. Raises CellsError."""
        with self._lock:
            if cell not in self._names:
                assert self._starter is not None, "the first cells have started"
                self._starter.add(self._name(cell, shape), node)
            if self._starter is None:
                self._starter = self._make_starter(secret)
                self._starter.on_leaves = self._leave
            self._running.add(cell)
            return CellStarter(self, self._starter, self._names[cell], cell, at)

    def check_room(self, num_ranks: int, node: str | None) -> None:
        """See `NodeStarter.check_room`."""
        assert self._starter is not None, "the first cells have started"
        self._starter.check_room(num_ranks, node)

    def nodes(self) -> Sequence[NodeStatus]:
        """See `CellsControl.nodes`."""
        return () if self._starter is None else self._starter.statuses(self._cell_of)

    def _cell_of(self, rank: RankName) -> str:
        return _name_of(self._cells[str(rank)][0])

    def _leave(self, ranks: Sequence[RankName]) -> None:
        """Removes the cells of these ranks because their node leaves or is lost."""
        with self._lock:
            found = {self._cells[str(rank)][0] for rank in ranks} & self._running
        for cell in sorted(found):
            try:
                self.remove_cell(cell)
            except MoeServeError as error:
                _log.error("cell-%d has ranks on a node that leaves, and stays: %s", cell, error)

    def _name(self, cell: int, shape: CellShape) -> list[RankName]:
        """Gives the ranks of a cell the names by which nodes know them."""
        names = _named(shape, self._counts)
        self._cells |= {str(name): (cell, str(rank)) for rank, name in names.items()}
        self._names[cell] = names
        return list(names.values())

    def exited(self, cell: int) -> list[RankExit]:
        """Returns the ranks of a cell that ended since the last call, by their names in the
        cell.
        """
        assert self._starter is not None, "a cell has started"
        with self._lock:
            for ended in self._starter.exited():
                owner, name = self._cells[ended.name]
                if owner in self._running:
                    self._ended.append((owner, RankExit(name, ended.why)))
            own = [ended for owner, ended in self._ended if owner == cell]
            self._ended = [item for item in self._ended if item[0] != cell]
        return own

    def stop(self, cell: int) -> None:
        """Notes that a cell ends. The last one dismisses the nodes."""
        with self._lock:
            if cell in self._running and self._starter is not None:
                self._starter.remove(self._names[cell].values())
            self._running.discard(cell)
            is_last = not self._running
        if is_last and self._starter is not None:
            self._starter.stop()


class CellStarter:
    """Implements RankStarter for one cell."""

    def __init__(
        self,
        nodes: CellNodes,
        starter: NodeStarter,
        names: Mapping[RankName, RankName],
        cell: int,
        at: HostPort,
    ) -> None:
        """`names` are the names by which nodes know its ranks."""
        self._nodes, self._starter, self._names = nodes, starter, names
        self._cell, self._at = cell, at
        self._started: set[RankName] = set()

    def start(self, rank: RankName) -> None:
        self._started.add(rank)
        seat = CellSeat(_name_of(self._cell), rank.index, self._at)
        self._starter.start(self._global(rank), seat)

    def place_of(self, rank: RankName) -> str:
        return self._starter.place_of(self._global(rank))

    def kill(self, rank: RankName) -> None:
        self._starter.kill(self._global(rank))

    def exited(self) -> list[RankExit]:
        return self._nodes.exited(self._cell)

    def stop(self) -> None:
        """Ends the ranks of this cell. Ranks of other cells continue."""
        started, self._started = self._started, set()
        for rank in started:
            self.kill(rank)
        self._nodes.stop(self._cell)

    def _global(self, rank: RankName) -> RankName:
        return self._names[rank]
