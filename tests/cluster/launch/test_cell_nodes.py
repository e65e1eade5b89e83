"""Ranks of several cells on the nodes of one launch: their names there, their ends, and the end."""

from __future__ import annotations

from typing import Any

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import new_secret
from moe_serve.cluster.launch.cell_nodes import CellNodes, ranks_of_cells
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_layout import share_out
from moe_serve.cluster.launch.node_ranks import StartRank
from moe_serve.cluster.launch.node_starter import CellSeat
from moe_serve.cluster.members.rank_starter import RankExit
from moe_serve.config.cells import parse_cells

SHAPES = parse_cells("1x(1A2E prefill) 1x(2A1E decode)")


class FakeNodes:
    """Stands in for NodeStarter."""

    def __init__(self) -> None:
        self.started: dict[str, CellSeat] = {}
        self.killed: list[str] = []
        self.ended: list[RankExit] = []
        self.num_stops = 0
        self.added: list[str] = []
        self.removed: list[str] = []

    def add(self, ranks: list[RankName], node: str | None = None) -> None:
        self.added += map(str, ranks)

    def remove(self, ranks: list[RankName]) -> None:
        self.removed += map(str, ranks)

    def start(self, rank: RankName, seat: CellSeat) -> None:
        self.started[str(rank)] = seat

    def kill(self, rank: RankName) -> None:
        self.killed.append(str(rank))

    def exited(self) -> list[RankExit]:
        ended, self.ended = self.ended, []
        return ended

    def stop(self) -> None:
        self.num_stops += 1


def test_each_cell_has_its_own_ranks_on_shared_nodes() -> None:
    fake: Any = FakeNodes()
    nodes, secret = CellNodes(lambda secret: fake, SHAPES), new_secret()
    first, second = (
        nodes.starter_of(cell, SHAPES[cell], HostPort("h", 100 + cell), secret) for cell in (0, 1)
    )
    first.start(RankName("expert", 1))
    for index in (0, 1):
        second.start(RankName("attention", index))
    second.start(RankName("expert", 0))
    assert fake.started == {
        "expert-1": CellSeat("cell-0", 1, HostPort("h", 100)),
        "attention-1": CellSeat("cell-1", 0, HostPort("h", 101)),
        "attention-2": CellSeat("cell-1", 1, HostPort("h", 101)),
        "expert-2": CellSeat("cell-1", 0, HostPort("h", 101)),
    }
    fake.ended = [RankExit("attention-2", "it died"), RankExit("expert-0", "it died too")]
    assert first.exited() == [RankExit("expert-0", "it died too")]
    assert second.exited() == [RankExit("attention-1", "it died")], "each gets only its own"
    second.stop()
    assert sorted(fake.killed) == ["attention-1", "attention-2", "expert-2"]
    assert fake.num_stops == 0, "the other cell goes on"
    third = nodes.starter_of(2, SHAPES[0], HostPort("h", 102), secret)
    assert fake.added == ["attention-3", "expert-3", "expert-4"], "names are never used again"
    assert fake.removed == ["attention-1", "attention-2", "expert-2"], "but their places"
    third.start(RankName("expert", 1))
    assert fake.started["expert-4"] == CellSeat("cell-2", 1, HostPort("h", 102))
    third.stop()
    first.stop()
    assert fake.num_stops == 1


def test_nodes_are_filled_cell_by_cell() -> None:
    layout = share_out(ranks_of_cells(SHAPES), 2)
    assert [layout.describe(node) for node in (0, 1)] == [
        "attention 0, expert 0-1",
        "attention 1-2, expert 2",
    ]


def test_a_rank_that_is_added_takes_the_place_of_one_that_has_left() -> None:
    layout, left = share_out(ranks_of_cells(SHAPES), 2), {RankName("expert", 1)}
    third, fourth = RankName("attention", 3), RankName("expert", 3)
    layout = layout.with_rank(third, left)
    assert (layout.node_of(third), layout.place_on_node(third)) == (0, 2)
    layout = layout.with_rank(fourth, left)
    assert (layout.node_of(fourth), layout.place_on_node(fourth)) == (0, 3)


def test_a_node_shows_a_rank_by_its_name_in_its_cell() -> None:
    order = StartRank(
        role="attention", index=2, start=1, coordinator_host="h", coordinator_port=1,
        place=0, num_neighbours=1, cell="cell-1", number=1,
    )  # fmt: skip
    assert order.label == "cell-1/attention-1"
