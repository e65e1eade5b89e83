"""Cells of ranks that start beside others: what is left of starts that fail, and the answers."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_serve.cluster.cell_start import FreeNumbers, NewCell, check_alike
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import read_secret
from moe_serve.cluster.members.rank_starter import HandStarter
from moe_serve.cluster.started_cells import build_cells
from moe_serve.cluster.started_ranks import MakeStarter
from moe_serve.engine.watch.cells_control import CellPlace
from moe_serve.errors import CellsError, ClusterError, ConfigError
from tests.support.cluster.cells_drive import (
    cells_config,
    check_nothing_is_held,
    in_one_process,
    serving_cells,
    wait_until_whole,
)
from tests.support.cluster.layouts import Answer, requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

WANTED = requests(6, 4096, num_tokens=16)
OF = cells_config("1x(1A1E)", can_grow=True)


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    """The answers of one process."""
    return in_one_process(OF, WANTED)


class Absent(ThreadStarter):
    """Its ranks never come."""

    def start(self, rank: RankName) -> None: ...


class Refused(ThreadStarter):
    def start(self, rank: RankName) -> None:
        raise ClusterError(f"{rank} has no place")


def states(engine: CellsEngine) -> dict[str, str]:
    return {cell.name: cell.state for cell in engine.stats().cells}


def step_until(engine: CellsEngine, is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not is_done():
        assert time.monotonic() < end, f"{engine.stats().cells}"
        engine.step()
        time.sleep(0.002)


def cell_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("cell-")]


def refuse_what_cannot_be_had(engine: CellsEngine) -> None:
    """Asserts that nothing starts for it."""
    with pytest.raises(ConfigError, match="use at most 8192"):
        engine.add_cell("1A9000E")
    for shape, why in (("1A1E tp3", "divide the model's"), ("1A99E", "are more than the")):
        with pytest.raises(ConfigError, match=f"cannot be served: .*{why}"):
            engine.add_cell(shape)
    with pytest.raises(CellsError, match="set MOE_SERVE_CLUSTER_SECRET before"):
        engine.add_cell("1A1E", place=CellPlace(by_hand=True))
    with pytest.raises(CellsError, match="node is 'b', but all ranks of this server run on one"):
        engine.add_cell("1A1E", place=CellPlace(node="b"))
    assert states(engine) == {"cell-0": "serving"}


def test_a_cell_is_added_after_starts_that_fail_and_takes_over(
    expected: dict[str, Answer],
) -> None:
    """One server: a start that fails, one that is called off, one that succeeds; then the first
    cell leaves, and the answers are those of one process."""
    makers: dict[int, MakeStarter] = {1: Refused, 2: Absent}
    places: list[int] = []

    def starter_of(cell: NewCell) -> MakeStarter:
        places.append(cell.first_place)
        return makers.get(cell.index, ThreadStarter)

    with serving_cells(OF, starter_of) as engine:
        refuse_what_cannot_be_had(engine)
        assert engine.add_cell("1A1E") == 1
        step_until(engine, lambda: states(engine)["cell-1"] == "failed")
        assert engine.stats().cells[1].note == "attention-0 has no place"
        assert engine.add_cell("1A1E") == 2
        engine.remove_cell(1)
        engine.remove_cell(2)
        step_until(engine, lambda: states(engine) == {"cell-0": "serving"})
        assert serve(engine, WANTED) == expected
        assert engine.add_cell("1A2E") == 3
        step_until(engine, lambda: states(engine).get("cell-3") == "serving")
        engine.remove_cell(0)
        assert serve(engine, WANTED) == expected
        step_until(engine, lambda: states(engine) == {"cell-3": "serving"})
        assert serve(engine, WANTED) == expected
        wait_until_whole(engine)
        check_nothing_is_held(engine)
        assert places == [0, 2, 2, 2], "the places of cells that have gone are used again"
        assert engine.add_cell("1A1E") == 4  # starts while the server ends
    assert not cell_threads()


def test_a_cell_comes_with_requests_and_goes_without_and_answers_stay_the_same(
    expected: dict[str, Answer],
) -> None:
    """Autoscaling on real ranks: one request takes more than 1% of the seats."""
    scaled = {"autoscale": "target", "max_cells": 2, "target_load": 0.01, "max_changes": 100}
    of = cells_config("1x(1A1E)", scale_every_s=0.1, calm_s=0.3, **scaled)
    built = build_cells(of, starter_of=lambda cell: ThreadStarter)
    engine, end = built.engine, time.monotonic() + 100
    assert isinstance(engine, CellsEngine) and built.scale_with is not None
    try:
        built.scale_with(engine.stats, engine)
        while list(states(engine).values()) != ["serving", "serving"]:
            assert time.monotonic() < end, f"{engine.stats().scaling}"
            assert serve(engine, WANTED) == expected
        step_until(engine, lambda: list(states(engine).values()) == ["serving"])
        scaling = engine.stats().scaling
        assert scaling is not None and scaling.num_decisions["add"] >= 1
        assert engine._scaler is not None
        engine._scaler.close()
        assert serve(engine, WANTED) == expected
        wait_until_whole(engine)
        check_nothing_is_held(engine)
    finally:
        engine.close()
    assert "autoscale" not in {each.name for each in threading.enumerate()}


def test_pages_in_memory_outlive_their_cell(expected: dict[str, Answer]) -> None:
    """The pages of a cell are in the memory tier when it has left, and nothing is reserved."""
    of = replace(OF, cache=replace(OF.cache, memory_tier_bytes=64 * 2**20))
    with serving_cells(of) as engine:
        assert serve(engine, WANTED) == expected
        engine.add_cell("1A1E")
        step_until(engine, lambda: states(engine).get("cell-1") == "serving")
        engine.remove_cell(0)
        step_until(engine, lambda: states(engine) == {"cell-1": "serving"})
        before = engine.stats().tier
        assert before is not None
        assert serve(engine, WANTED) == expected
        after = engine.stats().tier
        assert after is not None and after.hit_tokens > before.hit_tokens
        wait_until_whole(engine)
        check_nothing_is_held(engine)


def test_ranks_that_are_started_by_hand_join(
    expected: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_SERVE_CLUSTER_SECRET", "ab" * 32)
    secret = read_secret(os.environ)
    assert secret is not None

    def commands() -> tuple[str, ...]:
        return next((c.commands for c in engine.stats().cells if c.name == "cell-1"), ())

    with serving_cells(OF) as engine:
        engine.add_cell("1A1E", place=CellPlace(by_hand=True))
        step_until(engine, lambda: len(commands()) == 2)
        found = re.search(r"--coordinator 127.0.0.1:(\d+) --role attention", commands()[0])
        assert found is not None, commands()
        by_hand = ThreadStarter("127.0.0.1", int(found[1]), secret, 1)
        by_hand.start(RankName("attention", 0))
        step_until(engine, lambda: len(commands()) == 1)
        by_hand.start(RankName("expert", 0))
        step_until(engine, lambda: states(engine)["cell-1"] == "serving")
        assert serve(engine, WANTED) == expected
        assert engine.stats().cells[1].num_steps > 0
        engine.remove_cell(1)
        step_until(engine, lambda: states(engine) == {"cell-0": "serving"})
    by_hand.stop()


def test_cells_that_compute_other_bits_are_refused() -> None:
    names = ("kernels", "build", "device", "dtype", "expert_weights", "kv_dtype")
    report = SimpleNamespace(**dict.fromkeys(names, "same"))
    for name in names:
        other = SimpleNamespace(**{**vars(report), name: "other"})
        starts: Any = [SimpleNamespace(index=i, report=of) for i, of in enumerate((report, other))]
        with pytest.raises(ConfigError, match=rf"cell-1 and cell-0 differ in {name} \(other and"):
            check_alike(starts)


def test_numbers_are_the_lowest_that_are_free() -> None:
    numbers = FreeNumbers()
    first, second, third = (numbers.take(count) for count in (2, 3, 1))
    assert (first, second, third) == (range(2), range(2, 5), range(5, 6))
    numbers.give_back(second)
    assert [numbers.take(2), numbers.take(2), numbers.take(1)] == [
        range(2, 4), range(6, 8), range(4, 5)
    ]  # fmt: skip


def test_the_command_of_a_rank_names_its_place_and_no_secret() -> None:
    rank = RankName("expert", 1)
    assert HandStarter("cell-2", "127.0.0.1", 77, 3).command(rank) == (
        "OMP_NUM_THREADS=3 python -m moe_serve.cluster.ranks.rank_worker --coordinator "
        "127.0.0.1:77 --role expert --rank 1 --host 127.0.0.1"
    )
    assert HandStarter("cell-2", "10.0.0.7", 77, 3).command(rank).endswith("--host HOST")
