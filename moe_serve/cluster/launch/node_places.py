"""Keeps the places of ranks on the nodes of a launch: its first nodes, and those that joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.launch.node_layout import NodeLayout
from moe_serve.cluster.launch.node_ranks import NodeHello
from moe_serve.engine.watch.cells_control import NodeStatus
from moe_serve.errors import CellsError

MAX_PLACES = 1024
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")


def objection_to_node(name: str, num_places: int) -> str | None:
    """Returns the reason why a node with this name and number of places cannot join, or None. The
    names of the first nodes are their numbers.
    """
    if not _NAME.fullmatch(name):
        return (
            f"{name[:100]!r} cannot name a node: use at most 63 letters, digits, dots, dashes and "
            "underscores, a letter first"
        )
    if not 1 <= num_places <= MAX_PLACES:
        return f"it offers {num_places} places for ranks: give it between 1 and {MAX_PLACES}"
    return None


class NodePlaces:
    """The nodes of a launch and the ranks on them, guarded by the owner's lock. A node that has
    joined keeps its number, and so its ranks, when it comes back. A first node takes any number of
    ranks.
    """

    def __init__(self, layout: NodeLayout) -> None:
        self.layout, self.num_first = layout, layout.num_nodes
        self.leaving: set[int] = set()  # nodes that get no further ranks
        self._names: dict[int, str] = {}  # of nodes that have joined
        self._num_places: dict[int, int] = {}  # likewise
        self._removed: set[RankName] = (
            set()
        )  # removed ranks, still in the layout; their places are free

    def name_of(self, number: int) -> str:
        return self._names.get(number, str(number))

    def number_of(self, name: str) -> int | None:
        """Returns the number of a node that has joined; None if no node had this name."""
        return next((number for number, each in self._names.items() if each == name), None)

    def ranks_on(self, number: int) -> list[RankName]:
        return [rank for rank in self.layout.nodes[number] if rank not in self._removed]

    def join(self, hello: NodeHello) -> int:
        """Adds a node, or finds it again if it has come back. Returns its number."""
        number = self.number_of(hello.joins)
        if number is None:
            number = self.layout.num_nodes
            self.layout = self.layout.with_node()
        self._names[number], self._num_places[number] = hello.joins, hello.num_places
        self.leaving.discard(number)
        return number

    def add(self, ranks: Sequence[RankName], node: str | None, present: Collection[int]) -> None:
        """Gives places to further ranks, those of removed ranks first. For arguments and errors see
        `check_room`.
        """
        self.check_room(len(ranks), node, present)
        for rank in ranks:
            nodes = [n for n, num_free in self._free(node, present).items() if num_free > 0]
            self.layout = self.layout.with_rank(rank, self._removed, nodes)
            self._removed = {old for old in self._removed if self.layout.has(old)}

    def remove(self, ranks: Iterable[RankName]) -> list[int]:
        """Frees the places of ranks. Returns the leaving nodes that now have no rank."""
        self._removed.update(ranks)
        return [number for number in self.leaving if not self.ranks_on(number)]

    def check_room(self, num_ranks: int, node: str | None, present: Collection[int]) -> None:
        """Raises CellsError unless there is room for this many more ranks on a node, or with None
        on all nodes together. `present` are the connected nodes, without node 0.
        """
        free = self._free(node, present)
        if not free:
            known = ", ".join(self.name_of(number) for number in self._free(None, present))
            raise CellsError(
                f"There is no node {(node or '')[:100]!r} that takes ranks: this launch has the "
                f"nodes {known}."
            )
        if sum(free.values()) < num_ranks:
            raise CellsError(
                f"The cell has {num_ranks} ranks and node {node} has {sum(free.values())} free "
                "places: add a smaller cell, or start the node with more --places."
            )

    def statuses(
        self, present: Collection[int], cell_of: Callable[[RankName], str]
    ) -> tuple[NodeStatus, ...]:
        """Returns the nodes that are connected or have ranks. `cell_of`: the cell of a rank."""
        return tuple(
            NodeStatus(
                name=self.name_of(number),
                num_ranks=len(self.ranks_on(number)),
                num_places=self._num_places.get(number),
                is_there=number == 0 or number in present,
                cells=tuple(dict.fromkeys(map(cell_of, self.ranks_on(number)))),
            )
            for number in range(self.layout.num_nodes)
            if number == 0 or number in present or self.ranks_on(number)
        )

    def _free(self, node: str | None, present: Collection[int]) -> dict[int, int]:
        """Returns the free places of the nodes that may get ranks."""
        free = dict.fromkeys(range(self.num_first), MAX_PLACES)
        for number, num_places in self._num_places.items():
            if number in present and number not in self.leaving:
                free[number] = max(0, num_places - len(self.ranks_on(number)))
        return {n: num for n, num in free.items() if node in (None, self.name_of(n))}
