"""Starts the ranks of several cells on the nodes of one launch.

Nodes know ranks by numbers that count through all cells. Each cell counts its own from 0:

    cells      1x(1A2E)                            1x(1A1E)
    a node     attention-0  expert-0  expert-1     attention-1  expert-2
    its cell   attention-0  expert-0  expert-1     attention-0  expert-0
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from moe_serve.cluster.control.rank_name import RankName, Role, all_ranks
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_starter import CellSeat, NodeStarter
from moe_serve.cluster.members.rank_starter import RankExit, RankStarter
from moe_serve.config.cells import CellShape


def ranks_of_cells(shapes: Sequence[CellShape]) -> list[RankName]:
    """Returns all ranks as nodes know them, cell by cell."""
    return [
        global_rank(shapes, cell, rank)
        for cell, shape in enumerate(shapes)
        for rank in all_ranks(shape.attention_ranks, shape.expert_ranks)
    ]


def global_rank(shapes: Sequence[CellShape], cell: int, rank: RankName) -> RankName:
    """Returns the name by which nodes know a rank of a cell."""
    return RankName(
        rank.role, rank.index + sum(_count(shape, rank.role) for shape in shapes[:cell])
    )


def _count(shape: CellShape, role: Role) -> int:
    return shape.attention_ranks if role == "attention" else shape.expert_ranks


class CellNodes:
    """One starter of nodes for all cells. `make_starter` makes it and waits for the nodes; it is
    called once, when the first cell starts. Any thread may call."""

    def __init__(
        self, make_starter: Callable[[ClusterSecret], NodeStarter], shapes: Sequence[CellShape]
    ) -> None:
        self._make_starter, self._shapes = make_starter, shapes
        self._lock = threading.Lock()
        self._starter: NodeStarter | None = None
        self._running: set[int] = set()  # cells
        self._cells = {
            str(global_rank(shapes, cell, rank)): (cell, str(rank))
            for cell, shape in enumerate(shapes)
            for rank in all_ranks(shape.attention_ranks, shape.expert_ranks)
        }
        self._ended: list[tuple[int, RankExit]] = []

    def starter_of(self, cell: int, host: str, port: int, secret: ClusterSecret) -> RankStarter:
        """Returns what starts the ranks of a cell, which connect to its coordinator."""
        with self._lock:
            self._running.add(cell)
            if self._starter is None:
                try:
                    self._starter = self._make_starter(secret)
                except BaseException:
                    self._running.discard(cell)
                    raise
            return CellStarter(self, self._starter, self._shapes, cell, HostPort(host, port))

    def exited(self, cell: int) -> list[RankExit]:
        """Returns the ranks of a cell that ended since the last call, by their names there."""
        assert self._starter is not None, "a cell has started"
        with self._lock:
            for ended in self._starter.exited():
                owner, name = self._cells[ended.name]
                self._ended.append((owner, RankExit(name, ended.why)))
            own = [ended for owner, ended in self._ended if owner == cell]
            self._ended = [item for item in self._ended if item[0] != cell]
        return own

    def stop(self, cell: int) -> None:
        """Notes that a cell ends. The last one dismisses the nodes."""
        with self._lock:
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
        shapes: Sequence[CellShape],
        cell: int,
        at: HostPort,
    ) -> None:
        self._nodes, self._starter, self._shapes = nodes, starter, shapes
        self._cell, self._at = cell, at
        self._started: set[RankName] = set()

    def start(self, rank: RankName) -> None:
        self._started.add(rank)
        seat = CellSeat(f"cell-{self._cell}", rank.index, self._at)
        self._starter.start(self._global(rank), seat)

    def place_of(self, rank: RankName) -> str:
        return self._starter.place_of(self._global(rank))

    def kill(self, rank: RankName) -> None:
        self._starter.kill(self._global(rank))

    def exited(self) -> list[RankExit]:
        return self._nodes.exited(self._cell)

    def stop(self) -> None:
        """Ends the ranks of this cell; those of others go on."""
        for rank in self._started:
            self.kill(rank)
        self._nodes.stop(self._cell)

    def _global(self, rank: RankName) -> RankName:
        return global_rank(self._shapes, self._cell, rank)
