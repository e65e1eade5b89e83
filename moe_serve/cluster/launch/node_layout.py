"""Assigns ranks to nodes.

By default nodes are filled evenly in rank order, attention ranks first, so that neighbours in rank
order share a host. A cluster file may list the ranks of each node instead (`cluster_file.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moe_serve.cluster.control.rank_name import RankName, Role
from moe_serve.errors import ConfigError

_ROLES: tuple[Role, ...] = ("attention", "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """The ranks of every node, in the order in which they take the node's devices."""

    nodes: tuple[tuple[RankName, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def num_ranks(self, role: Role) -> int:
        return sum(rank.role == role for ranks in self.nodes for rank in ranks)

    def has(self, rank: RankName) -> bool:
        return any(rank in ranks for ranks in self.nodes)

    def node_of(self, rank: RankName) -> int:
        for node, ranks in enumerate(self.nodes):
            if rank in ranks:
                return node
        raise AssertionError(f"{rank} is on none of the {self.num_nodes} nodes")

    def place_on_node(self, rank: RankName) -> int:
        """Returns the number of ranks before a rank on its node, which is its device's number."""
        return self.nodes[self.node_of(rank)].index(rank)

    def with_node(self) -> NodeLayout:
        """Returns the layout with one more node, which has no ranks yet."""
        return NodeLayout(nodes=(*self.nodes, ()))

    def with_rank(
        self,
        rank: RankName,
        instead_of: Collection[RankName] = (),
        among: Collection[int] | None = None,
    ) -> NodeLayout:
        """Returns the layout with one more rank: in the place of a rank that has left, or else on
        the node with the fewest ranks. `among` are the nodes that may get it; None means all.
        """
        may = range(self.num_nodes) if among is None else sorted(among)
        old = next((old for node in may for old in self.nodes[node] if old in instead_of), None)
        if old is not None:
            nodes = [[rank if each == old else each for each in ranks] for ranks in self.nodes]
            return NodeLayout(nodes=tuple(map(tuple, nodes)))
        target = min(may, key=lambda node: len(self.nodes[node]))
        return NodeLayout(
            nodes=tuple((*n, rank) if node == target else n for node, n in enumerate(self.nodes))
        )

    def describe(self, node: int) -> str:
        """Describes the ranks of a node, such as "attention 0-3, expert 0"."""
        parts = []
        for role in _ROLES:
            numbers = sorted(rank.index for rank in self.nodes[node] if rank.role == role)
            if numbers:
                parts.append(f"{role} {', '.join(_spans(numbers))}")
        return ", ".join(parts) or "no rank"


def share_out(ranks: Sequence[RankName], num_nodes: int) -> NodeLayout:
    """Gives each node an even share of consecutive ranks; raises ConfigError.

    2 attention and 3 expert ranks on 2 nodes: a0 a1 e0 | e1 e2.
    """
    if num_nodes > len(ranks):
        num_attention = sum(rank.role == "attention" for rank in ranks)
        raise ConfigError(
            f"{len(ranks)} ranks ({num_attention} attention, {len(ranks) - num_attention} expert) "
            f"leave {num_nodes - len(ranks)} of {num_nodes} nodes without any; use fewer nodes."
        )
    share, more = divmod(len(ranks), num_nodes)
    starts = [node * share + min(node, more) for node in range(num_nodes + 1)]
    return NodeLayout(nodes=tuple(tuple(ranks[a:b]) for a, b in itertools.pairwise(starts)))


def explicit_layout(nodes: Sequence[Sequence[RankName]], source: str) -> NodeLayout:
    """Checks a layout written rank by rank: every rank from 0 once; raises ConfigError."""
    counts = Counter(rank for ranks in nodes for rank in ranks)
    for rank, count in sorted(counts.items()):
        if count > 1:
            raise ConfigError(f"{rank} is placed {count} times ({source}); place it once.")
    for role in _ROLES:
        numbers = {rank.index for rank in counts if rank.role == role}
        if not numbers:
            raise ConfigError(f"no {role} rank is placed ({source}); place at least one.")
        missing = sorted(set(range(max(numbers) + 1)) - numbers)
        if missing:
            raise ConfigError(
                f"{role}-{missing[0]} is placed nowhere ({source}), although "
                f"{role}-{max(numbers)} is: they are counted from 0 without gaps."
            )
    empty = [node for node, ranks in enumerate(nodes) if not ranks]
    if empty:
        raise ConfigError(f"node {empty[0]} has no rank ({source}); give it one, or leave it out.")
    return NodeLayout(nodes=tuple(tuple(ranks) for ranks in nodes))


def _spans(numbers: Sequence[int]) -> list[str]:
    """Shortens numbers to spans: [0, 1, 2, 5] becomes "0-2", "5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
