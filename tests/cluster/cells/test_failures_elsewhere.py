"""What went wrong in other servers with separate prefill and decode pools, each as a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.cluster.parcels.parcel import ParcelEnd
from tests.support.cluster.fake_cells import ALWAYS, CellsWorld, Limits, prompt


def travelling(**fields: object) -> CellsWorld:
    """Returns a world in which request `a` has left its source, and no parcel has arrived."""
    world = CellsWorld(**fields)  # type: ignore[arg-type]
    world.add("a", prompt(70), max_tokens=20)
    while world.where("a") is not None:
        world.turn(delivers=False)
    assert world.carrier.on_way
    return world


def test_pages_that_a_lease_has_freed_are_never_read_for_its_answer() -> None:
    world = travelling(timeout_s=1.0, limits=Limits(num_pages=12))
    world.clock.now += 2.0
    world.moves.turn()
    world.add("b", prompt(30, 5), max_tokens=40)  # takes the pages that were reserved
    world.run()
    assert world.answer("a") == world.expected("a")
    assert world.moves.stats().ended[("hand_over", "timed_out")] == 1


def test_the_pages_of_an_aborted_receive_are_free_at_once() -> None:
    world = travelling()
    world.carrier.deliver()
    world.abort("a")
    for cell in world.cells:
        load = cell.engine.stats().load
        assert load.num_free_pages == load.num_pages
    world.run()


def test_a_parcel_of_an_aborted_request_does_not_overwrite_pages_of_the_next_one() -> None:
    world = travelling(limits=Limits(num_pages=10))
    parcel = world.carrier.on_way[0].parcel
    world.abort("a")
    world.add("b", prompt(30, 5), max_tokens=60)
    world.turn()
    world.carrier.ended.append(ParcelEnd(parcel, "", 1.0))  # it comes late
    world.run()
    assert world.answer("b") == world.expected("b")
    assert world.moves.stats().num_late_parcels == 1


def test_nothing_waits_for_a_target_that_refused_the_request_before_it_was_admitted() -> None:
    world = CellsWorld(limits=Limits(num_seats=1), timeout_s=480.0)
    world.add("long", prompt(16), max_tokens=120)
    world.turn()
    assert world.where("long") == 1
    world.add("a", prompt(70), max_tokens=10)
    world.turn()
    for _ in range(14):
        world.turn()
    assert world.answer("a") == world.expected("a"), "the cell that read the prompt answers"
    world.run()


def test_a_finish_is_not_counted_without_a_write() -> None:
    world = travelling()
    first = world.carrier.on_way[0].parcel
    for _ in range(9):  # told over and over, also of parcels that were never sent
        world.carrier.ended.append(ParcelEnd(first, "", 0.1))
        world.carrier.ended.append(ParcelEnd(replace(first, number=7), "", 0.1))
    world.moves.turn()
    world.begin(1)
    assert world.where("a") is None, "some pages have not arrived"
    world.moves.abort("a")


def test_an_abort_of_a_finished_prefill_is_no_error() -> None:
    world = travelling()
    world.carrier.deliver_all()
    world.moves.turn()
    world.abort("a")
    world.turn()
    world.abort("a")
    world.run()
    assert world.moves.stats().ended == {("hand_over", "aborted"): 1}


def test_a_burst_of_requests_through_a_narrow_link_hangs_nothing() -> None:
    world = CellsWorld(pages_per_parcel=1, room=1, limits=Limits(num_pages=20, num_seats=2))
    for index in range(30):
        world.add(f"r{index}", prompt(33 + index, index % 7), max_tokens=1 + index % 9)
    world.run(most=2000)
    names = [f"r{index}" for index in range(30)]
    assert all(world.answer(name) == world.expected(name) for name in names)


def test_pages_travel_after_hours_without_a_request() -> None:
    world = CellsWorld()
    world.add("a", prompt(70))
    world.run()
    world.clock.now += 6 * 3600.0
    assert not world.moves.turn() and not world.moves.has_work
    world.add("b", prompt(70, 4))
    world.run()
    assert world.moves.stats().ended == {("hand_over", "done"): 2}


def test_a_request_that_its_target_puts_back_for_lack_of_pages_is_admitted_again() -> None:
    config = replace(ALWAYS, migrate=False)
    world = CellsWorld(config=config, limits=Limits(num_pages=11, num_seats=3))
    for index in range(3):
        world.add(f"r{index}", prompt(40, index), max_tokens=70)
    world.run(most=1500)
    stats = world.cells[1].engine.stats()
    assert stats.counts.num_preemptions > 0, "the test wants the target to run out of pages"


def test_cells_between_which_no_page_can_travel_are_told_apart_before_the_first_transfer() -> None:
    world = CellsWorld()
    world.carrier.refusal = "pages of 16 and of 32 tokens"
    world.add("a", prompt(100), max_tokens=10)
    world.run()
    assert not world.moves.stats().begun and world.carrier.num_sent == 0


@pytest.mark.parametrize("hand_over", ["auto", "always", "off"])
def test_no_setting_of_the_gate_is_silently_ignored(hand_over: str) -> None:
    config = replace(ALWAYS, hand_over=hand_over)  # type: ignore[arg-type]
    world = CellsWorld(config=config)
    for index in range(3):  # rows that a long prompt would delay
        world.add(f"s{index}", prompt(10, index), max_tokens=60)
    for _ in range(4):
        world.turn()
    assert {world.where(f"s{index}") for index in range(3)} == {1}
    world.add("a", prompt(120), max_tokens=8)
    assert world.where("a") == (1 if hand_over == "off" else 0)
    world.run()
    done = world.moves.stats().ended.get(("hand_over", "done"), 0)
    assert done == (0 if hand_over == "off" else 1)
