"""Experts move between the expert ranks of one cell; the other cells keep their placements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.started_cells import build_cells
from moe_serve.engine.routes.cell_placements import CellPlacements
from moe_serve.errors import CellsError, RebalanceError
from tests.support.cluster.cells_drive import cells_config, in_one_process, thread_starters
from tests.support.cluster.layouts import requests, serve
from tests.support.cluster.live_moves import shuffled

VOCAB_SIZE = 4096  # of the demonstration model


def test_a_plan_is_put_into_effect_in_one_cell() -> None:
    of = cells_config("1x(1A2E prefill) 1x(1A2E) 1x(1A1E decode)")
    of = replace(of, cluster=replace(of.cluster, rebalance="manual", rebalance_max_moves=32))
    wanted = requests(6, VOCAB_SIZE, num_tokens=12)
    expected = in_one_process(of, wanted)
    built = build_cells(of, starter_of=thread_starters)
    engine, placements = built.engine, built.cell_placements
    assert isinstance(engine, CellsEngine) and placements is not None
    try:
        before = {cell: each.plan() for cell, each in placements.by_cell.items()}
        target = shuffled(before[1], 1)
        assert placements.of(1).apply(target).state == "copying"
        with pytest.raises(RebalanceError, match="already in progress"):
            placements.of(1).apply(target)
        while placements.of(1).state != "idle":
            assert serve(engine, wanted) == expected
        assert placements.of(1).plan() == target
        assert placements.of(0).plan() == before[0] and placements.of(2).plan() == before[2]
        for _ in range(20):  # the router may send all of them to the cell that counts nothing
            assert serve(engine, wanted) == expected
            if placements.status().num_counted_tokens > 0:
                break
        check_statuses(placements)
    finally:
        engine.close()


def check_statuses(placements: CellPlacements) -> None:
    """The cells count only their own tokens, and the sums are those of all."""
    each = [control.status() for control in placements.by_cell.values()]
    assert [status.mode for status in each] == ["manual", "manual", "off"]
    assert [status.num_copies > 0 for status in each] == [False, True, False]
    assert each[1].last is not None and each[1].last.outcome == "moved"
    whole = placements.status()
    assert (whole.mode, whole.state, whole.version) == ("manual", "idle", each[1].version)
    assert whole.num_copies == each[1].num_copies and whole.num_plans["moved"] == 1
    assert whole.num_counted_tokens == sum(status.num_counted_tokens for status in each) > 0
    with pytest.raises(RebalanceError, match="a single expert rank has all experts"):
        placements.of(2).rebalance()
    with pytest.raises(CellsError, match="There is no cell 3: this server has the cells 0, 1, 2"):
        placements.of(3)
