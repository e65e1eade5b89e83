"""Cells are added and removed while others serve: states, refusals, and what happens at once."""

from __future__ import annotations

import threading

import pytest

from moe_serve.errors import CellsError, ConfigError, UnknownCellError
from tests.support.cluster.held_cells import World, world


def served(cells: World, *names: str) -> None:
    """Sends requests, and asserts that their answers are right."""
    requests = [cells.add(name, place) for place, name in enumerate(names, 1)]
    cells.step_until(lambda: all(map(cells.has_ended, names)))
    assert all(map(cells.is_right, requests))


def add(cells: World, shape: str = "1A1E", number: int | None = None) -> int:
    """Adds a cell, and returns its number when its start has begun."""
    index = cells.engine.add_cell(shape, number=number)
    cells.step_until(lambda: index in cells.maker.starts)
    return index


def wait_for(cells: World, index: int, state: str | None) -> None:
    cells.step_until(lambda: cells.states().get(f"cell-{index}") == state)


def test_an_added_cell_serves_once_it_has_loaded_and_no_other_waits() -> None:
    with world() as cells:
        assert add(cells, "1A1E decode") == 2
        served(cells, "a", "b")
        assert cells.states() == {"cell-0": "serving", "cell-1": "serving", "cell-2": "starting"}
        cells.maker.starts[2].load()
        wait_for(cells, 2, "serving")
        names: list[str] = []
        while {cells.cell_of(name) for name in names} != {0, 1, 2}:  # by measured step times
            assert len(names) < 30, "an added cell gets no request"
            names.append(f"later-{len(names)}")
            cells.add(names[-1], 11 + len(names))
        cells.step_until(lambda: all(map(cells.has_ended, names)))
        cells.engine.check_integrity()
        assert [rank.name for rank in cells.engine.stats().ranks][2] == "cell-2/attention-0"


def test_a_start_that_fails_changes_nothing_and_says_why() -> None:
    with world() as cells:
        add(cells)
        cells.maker.starts[2].fail("cell-2/expert-0 has no place")
        wait_for(cells, 2, "failed")
        status = cells.engine.stats().cells[2]
        assert (status.note, cells.maker.starts[2].num_closed) == (
            "cell-2/expert-0 has no place",
            1,
        )
        served(cells, "a", "b")
        with pytest.raises(CellsError, match="Cell 2 is failed"):
            cells.engine.drain(2, is_draining=True)
        cells.engine.remove_cell(2)
        assert set(cells.states()) == {"cell-0", "cell-1"}
        assert cells.engine.add_cell("1A1E") == 3, "numbers are never used again"


def test_what_is_refused_starts_nothing() -> None:
    with world() as cells:
        for shape in ("", "2x(1A1E)", "1A1E fast", "8D", "(1A1E) (1A1E)"):
            with pytest.raises(ConfigError, match=r"shape cannot be .* it takes one cell such as"):
                cells.engine.add_cell(shape)
        cells.maker.refusal = "no more memory"
        with pytest.raises(CellsError, match="no more memory"):
            cells.engine.add_cell("1A1E")
        assert not cells.maker.starts and len(cells.states()) == 2


def test_a_repeated_call_adds_one_cell() -> None:
    with world() as cells:
        assert add(cells, number=2) == cells.engine.add_cell("(1A1E both)", number=2) == 2
        with pytest.raises(CellsError, match=r"cell 2 is \(1A1E both\): give the next number, 3"):
            cells.engine.add_cell("1A1E decode", number=2)
        with pytest.raises(CellsError, match="number is 7: give the next number, 3"):
            cells.engine.add_cell("1A1E", number=7)
        assert list(cells.maker.starts) == [2]


def test_a_cell_that_starts_is_removed() -> None:
    """Before it has loaded, and after that but before the engine has taken it in."""
    with world() as cells:
        add(cells)
        cells.engine.remove_cell(2)
        cells.engine.remove_cell(2)
        wait_for(cells, 2, None)
        assert cells.maker.starts[2].num_closed >= 1 and not cells.maker.closed
        add(cells)
        cells.maker.starts[3].load()
        while not cells.engine._roll.has_news:
            threading.Event().wait(0.001)
        cells.engine.remove_cell(3)
        wait_for(cells, 3, None)
        assert cells.maker.closed == [3], "its ranks have ended"
        served(cells, "a", "b")


def test_a_removed_cell_leaves_when_its_requests_have_ended() -> None:
    with world() as cells:
        requests = {name: cells.add(name, place, 30) for place, name in enumerate("abcd", 1)}
        cells.step_until(lambda: all(cells.deltas.values()))
        before = cells.engine.stats().counts
        cells.engine.remove_cell(0)
        cells.engine.remove_cell(0)
        assert cells.states()["cell-0"] == "leaving"
        late = cells.add("e", 7)
        assert cells.cell_of("e") == 1
        cells.step_until(lambda: all(map(cells.has_ended, "abcde")))
        assert all(map(cells.is_right, (*requests.values(), late)))
        wait_for(cells, 0, None)
        stats = cells.engine.stats()
        assert [cell.name for cell in stats.cells] == ["cell-1"]
        assert stats.counts.num_prompt_tokens >= before.num_prompt_tokens, "counts never shrink"
        assert stats.counts.num_generated_tokens == 4 * 30 + 12
        cells.engine.remove_cell(0)  # it has left already
        with pytest.raises(
            UnknownCellError, match="There is no cell 0: this server has the cells 1"
        ):
            cells.engine.drain(0, is_draining=True)
        cells.engine.check_integrity()
        cells.step_until(lambda: not cells.engine.has_work)


def test_a_removal_is_called_off_while_the_cell_drains() -> None:
    with world() as cells:
        cells.coordinators[0].free.clear()
        request = cells.add("a", 1)
        cells.turn()
        assert cells.engine.cells[0].is_out
        cells.engine.remove_cell(0)
        cells.engine.drain(0, is_draining=False)
        cells.coordinators[0].free.set()
        cells.step_until(lambda: cells.has_ended("a"))
        assert cells.is_right(request) and cells.states()["cell-0"] == "serving"
        cells.engine.drain(0, is_draining=True)
        cells.engine.remove_cell(0)
        wait_for(cells, 0, None)


def test_the_last_cell_that_can_serve_stays() -> None:
    with world() as cells:
        cells.engine.drain(1, is_draining=True)
        with pytest.raises(CellsError, match="1 drain, 0 cannot compute now and 0 start"):
            cells.engine.remove_cell(0)
        cells.engine.drain(1, is_draining=False)
        cells.coordinators[1].lose("attention-0", is_back=False)
        cells.step_until(lambda: not cells.engine.cells[1].is_live)
        with pytest.raises(CellsError, match="0 drain, 1 cannot compute now and 0 start"):
            cells.engine.remove_cell(0)
        with pytest.raises(UnknownCellError, match="There is no cell 9"):
            cells.engine.remove_cell(9)


def test_a_cell_whose_ranks_die_while_it_drains_leaves() -> None:
    with world() as cells:
        requests = {name: cells.add(name, place, 30) for place, name in enumerate("abcd", 1)}
        cells.step_until(lambda: all(cells.deltas.values()))
        cells.engine.remove_cell(0)
        cells.coordinators[0].lose("attention-0", is_back=False)
        cells.step_until(lambda: all(map(cells.has_ended, "abcd")))
        assert all(map(cells.is_right, requests.values()))
        wait_for(cells, 0, None)


def test_a_cell_that_leaves_stays_while_no_other_can_serve() -> None:
    with world() as cells:
        cells.coordinators[0].free.clear()
        request = cells.add("a", 1)
        cells.turn()
        assert cells.engine.cells[0].is_out
        cells.engine.remove_cell(0)
        cells.coordinators[1].lose("attention-0", is_back=False)
        while cells.engine.cells[1].is_live:
            cells.turn()
        cells.coordinators[0].free.set()
        cells.step_until(lambda: cells.has_ended("a"))
        assert cells.is_right(request)
        for _ in range(20):
            cells.turn()
        assert cells.states()["cell-0"] == "leaving"
        cells.coordinators[1].away.clear()
        wait_for(cells, 0, None)


def test_the_end_of_the_server_calls_off_the_starts() -> None:
    with world() as cells:
        add(cells)
        cells.engine.close()
        assert cells.maker.starts[2].num_closed >= 1
        with pytest.raises(CellsError, match="the server is shutting down"):
            cells.engine.add_cell("1A1E")
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("cell-2")], names


def test_one_rank_is_drained() -> None:
    with world() as cells:
        cells.engine.drain_rank("cell-0/attention-0", is_draining=True)
        for place, name in enumerate("ab", 1):
            cells.add(name, place)
            assert cells.cell_of(name) == 1
        assert cells.engine.stats().cells[0].draining_ranks == ("attention-0",)
        with pytest.raises(CellsError, match="of 2 attention ranks it is the only one"):
            cells.engine.drain_rank("cell-1/attention-0", is_draining=True)
        for name in ("attention-0", "cell-0/expert-0", "cell-2/attention-0"):
            with pytest.raises(UnknownCellError, match="There is no attention rank"):
                cells.engine.drain_rank(name, is_draining=True)
        cells.engine.drain_rank("cell-0/attention-0", is_draining=False)
        cells.add("c", 3)
        assert cells.cell_of("c") == 0
