"""Running requests move off cells that drain, run out of pages or are slower."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.cluster.cells.rates import TokenSteps
from tests.support.cluster.fake_cells import ALWAYS, CellsWorld, Limits, prompt

REPLICAS = "2x(1A1E)"


def both(**fields: object) -> CellsWorld:
    return CellsWorld(layout=REPLICAS, **fields)  # type: ignore[arg-type]


def test_a_drained_cell_gives_up_all_its_requests_and_nothing_is_computed_again() -> None:
    world = both()
    for index in range(3):
        world.add(f"r{index}", prompt(50, index), max_tokens=60)
    for _ in range(6):
        world.turn()
    moved = [f"r{index}" for index in range(3) if world.where(f"r{index}") == 0]
    assert moved
    world.cells[0].is_draining = True
    for _ in range(8):
        world.turn()
    assert not world.cells[0].engine.has_work
    assert {world.where(f"r{index}") for index in range(3)} == {1}
    stats = world.moves.stats()
    assert stats.ended == {("drain", "done"): len(moved)}
    assert stats.num_recomputed_tokens == 0
    assert max(i for i, n in enumerate(stats.downtime_steps.counts) if n) <= 2, "at most 2 steps"
    world.run()


def test_a_reader_that_leaves_is_forgotten_once_its_hand_overs_have_ended() -> None:
    """Its removal waits for the pages that travel, at every moment of a hand-over."""
    for turns in range(8):
        world = CellsWorld(layout="1x(1A1E decode) 2x(1A1E prefill)", pages_per_parcel=1, room=2)
        reader = world.cells[2]
        for index in range(4):
            world.add(f"r{index}", prompt(100, index), max_tokens=10)
        assert world.where("r1") == 2
        for _ in range(turns):
            world.turn(delivers=False)
        reader.is_draining = True
        while reader.is_out or reader.engine.has_work or world.moves.concerns(reader):
            world.turn()
        world.moves.remove_cell(reader)
        del world.cells[2]
        world.add("late", prompt(90, 9), max_tokens=5)
        world.run()
        assert world.moves.stats().num_recomputed_tokens == 0, turns


def test_the_downtime_does_not_depend_on_the_context() -> None:
    for length in (20, 60, 120):
        world = both(pages_per_parcel=1, room=3)
        world.add("a", prompt(length), max_tokens=30)
        for _ in range(8):
            world.turn()
        source = world.where("a")
        assert source is not None
        world.cells[source].is_draining = True
        world.run()
        counts = world.moves.stats().downtime_steps.counts
        assert sum(counts[:3]) == 1 and sum(counts) == 1


def test_waiting_requests_of_a_drained_cell_wait_elsewhere() -> None:
    world = both(limits=Limits(num_seats=1))
    for index in range(6):
        world.add(f"r{index}", prompt(40, index), max_tokens=12)
    world.turn()
    world.cells[1].is_draining = True
    world.turn()
    assert all(world.where(f"r{index}") == 0 for index in range(4, 6))
    world.run()


def test_the_last_cell_cannot_be_emptied() -> None:
    world = both()
    for cell in world.cells:
        cell.is_draining = True
    world.add("a", prompt(40), max_tokens=10)
    world.run()
    assert not world.moves.stats().begun


def test_a_rank_of_a_cell_drains_to_its_other_rank() -> None:
    world = CellsWorld(layout="1x(2A1E)")
    for index in range(4):
        world.add(f"r{index}", prompt(40, index), max_tokens=40)
    for _ in range(4):
        world.turn()
    world.moves.drain_rank(world.cells[0], "attention-1", is_draining=True)
    for _ in range(8):
        world.turn()
    assert not world.cells[0].rank_engines["attention-1"].has_work
    assert world.moves.stats().num_recomputed_tokens == 0
    world.run()


def test_without_migration_a_drained_cell_ends_its_requests_itself() -> None:
    world = both(config=replace(ALWAYS, migrate=False))
    world.add("a", prompt(40), max_tokens=30)
    world.turn()
    world.turn()
    source = world.where("a")
    assert source is not None
    world.cells[source].is_draining = True
    world.run()
    assert not world.moves.stats().begun


def test_a_request_moves_before_its_rank_runs_out_of_pages() -> None:
    world = both(limits=Limits(num_pages=14, num_seats=4))
    world.cells[1].is_draining = True  # all start on cell 0
    for index in range(3):
        world.add(f"r{index}", prompt(45, index), max_tokens=60)
    for _ in range(5):
        world.turn()
    world.cells[1].is_draining = False
    world.run()
    assert world.moves.stats().ended[("pages", "done")] >= 1
    assert all(delta[-1].num_preemptions == 0 for delta in world.deltas.values())


def test_a_request_moves_to_a_cell_with_shorter_steps_and_never_back() -> None:
    world = both(limits=Limits(num_pages=60, num_seats=6), make_model=TokenSteps)
    world.cells[1].is_draining = True
    for index in range(6):
        world.add(f"r{index}", prompt(20, index), max_tokens=80)
    for _ in range(5):
        world.turn()
    world.cells[1].is_draining = False
    for _ in range(40):
        world.turn()
    places = [world.where(f"r{index}") for index in range(6)]
    assert places.count(0) == places.count(1) == 3
    num_moves = world.moves.stats().begun["balance"]
    for _ in range(20):
        world.turn()
    assert num_moves == world.moves.stats().begun["balance"] == 3
    world.run()


def test_a_request_moves_at_most_once_in_a_second() -> None:
    world = both()
    world.add("a", prompt(40), max_tokens=100)
    for _ in range(5):
        world.turn()
    for turn in range(40):
        for cell in world.cells:
            cell.is_draining = cell.index == turn // 5 % 2
        world.turn()
    assert world.moves.stats().begun["drain"] <= 1 + 40 * 2 * world.step_s


def test_a_request_can_come_back_to_a_rank_that_had_it_before() -> None:
    world = both()
    world.add("a", prompt(40), max_tokens=90)
    first = world.where("a")
    assert first is not None
    for turn in range(3):
        for _ in range(6):
            world.turn()
        for cell in world.cells:
            cell.is_draining = cell.index == (first + turn) % 2
        world.clock.now += 2.0
        for _ in range(6):
            world.turn()
        assert world.where("a") == (first + turn + 1) % 2
    world.run()
    assert world.moves.stats().ended == {("drain", "done"): 3}
