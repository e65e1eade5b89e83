"""Several cells behind one engine: none waits for another, and requests outlive a cell."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.cell_stats import stats_of
from moe_serve.config.cells import CellShape
from moe_serve.engine.request.moves_stats import MovesStats
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.stats import EngineStats
from moe_serve.errors import CellsError, ClusterError
from tests.support.cluster.held_cells import world

LONGEST_S = 200.0


def test_a_cell_that_comes_back_slowly_delays_no_other() -> None:
    with world() as cells:
        requests = {name: cells.add(name, place) for place, name in enumerate("abcd", 1)}
        by_cell = {name: cells.cell_of(name) for name in requests}
        assert sorted(by_cell.values()) == [0, 0, 1, 1], "the cells share the work"
        slow, fast = ([n for n, c in by_cell.items() if c == index] for index in (0, 1))
        cells.coordinators[0].free.clear()
        cells.step_until(lambda: all(map(cells.has_ended, fast)))
        assert cells.engine.cells[0].is_out and not any(cells.deltas[name] for name in slow)
        cells.engine.abort(slow[0])  # waits until the cell is back
        assert cells.engine.has_work and not cells.deltas[slow[0]]
        cells.coordinators[0].free.set()
        cells.step_until(lambda: all(map(cells.has_ended, slow)))
        assert cells.deltas[slow[0]][-1].finish_reason is FinishReason.ABORT
        assert all(cells.is_right(requests[name]) for name in (*fast, slow[1]))
        cells.step_until(lambda: not cells.engine.has_work)
        cells.engine.check_integrity()
        stats = cells.engine.stats()
        assert [rank.name for rank in stats.ranks] == ["cell-0/attention-0", "cell-1/attention-0"]
        assert stats.num_steps == sum(cell.num_steps for cell in stats.cells)


def test_a_new_request_ends_the_wait_for_cells() -> None:
    with world() as cells:
        cells.add("a", 1)
        for coordinator in cells.coordinators:
            coordinator.free.clear()
        told: list[list[TokenDelta]] = []
        thread = threading.Thread(target=lambda: told.append(cells.engine.step()))
        thread.start()
        while not any(cell.is_out for cell in cells.engine.cells):
            time.sleep(0.001)
        assert thread.is_alive()
        cells.engine.nudge()
        thread.join(LONGEST_S)
        assert told == [[]]


def test_requests_of_a_lost_cell_go_on_in_another_one() -> None:
    with world() as cells:
        requests = [cells.add(name, place, 30) for place, name in enumerate("abcd", 1)]
        cells.step_until(lambda: all(cells.deltas.values()))
        cells.coordinators[0].lose("attention-0", is_back=False)
        cells.step_until(lambda: all(map(cells.has_ended, "abcd")))
        assert all(map(cells.is_right, requests))
        assert cells.engine.stats().outage_s == 0.0, "one cell lives"
        late = cells.add("e", 7)
        cells.coordinators[0].away.clear()
        cells.step_until(lambda: cells.has_ended("e") and cells.engine.cells[0].is_live)
        assert cells.is_right(late)


def test_without_a_live_cell_requests_wait_and_the_server_ends_at_last() -> None:
    with world(outage_limit_s=10.0) as cells:
        for coordinator in cells.coordinators:
            coordinator.lose("attention-0", is_back=False)
        cells.step_until(lambda: all(cell.engine.outage_s for cell in cells.engine.cells))
        cells.add("a", 1)
        assert cells.engine.num_waiting == 1
        for _ in range(10):
            assert cells.engine.step() == []
        cells.engine._outage_limit_s = 1.0
        with pytest.raises(ClusterError, match="no cell could compute a step for 1 s"):
            cells.step_until(lambda: False)


def test_the_last_cell_that_takes_requests_is_not_drained() -> None:
    with world() as cells:
        cells.engine.drain(1, is_draining=True)
        for place, name in enumerate("abc", 1):
            cells.add(name, place)
            assert cells.cell_of(name) == 0
        with pytest.raises(CellsError, match="the only one that takes requests"):
            cells.engine.drain(0, is_draining=True)
        with pytest.raises(CellsError, match="this server has the cells 0, 1"):
            cells.engine.drain(2, is_draining=True)
        cells.engine.drain(1, is_draining=False)
        cells.add("d", 4)
        assert cells.cell_of("d") == 1


def test_a_cell_whose_ranks_all_drain_counts_as_one_that_drains() -> None:
    with world() as cells:
        cells.engine.drain_rank("cell-1/attention-0", is_draining=True)
        with pytest.raises(CellsError, match="Of the other cells 1 drain"):
            cells.engine.drain(0, is_draining=True)
        with pytest.raises(CellsError, match="Cell 0 is not removed"):
            cells.engine.remove_cell(0)
        cells.engine.drain_rank("cell-1/attention-0", is_draining=False)
        cells.engine.drain(0, is_draining=True)


def test_the_last_loss_is_that_of_the_cell_that_lost_a_rank_last() -> None:
    losses = {0: EngineStats(num_lost_ranks=3, last_loss="cell-0/expert-0: old"), 1: EngineStats()}
    shape = CellShape(attention_ranks=1, expert_ranks=1)
    cells = [
        Cell(i, shape, cast(Any, SimpleNamespace(stats=lambda i=i: losses[i])), lambda: None)
        for i in (0, 1)
    ]
    moves = cast(Any, SimpleNamespace(waiting=(), stats=MovesStats, draining_ranks=[]))
    assert stats_of(cells, moves).last_loss == "cell-0/expert-0: old"
    losses[1] = EngineStats(num_lost_ranks=1, last_loss="cell-1/expert-0: new")
    stats = stats_of(cells, moves)
    assert (stats.num_lost_ranks, stats.last_loss) == (4, "cell-1/expert-0: new")
    for cell in cells:
        cell._waiter.close()
