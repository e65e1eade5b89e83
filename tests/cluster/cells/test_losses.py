"""Ranks, links and clients are lost while a request moves: it ends once, with its tokens."""

from __future__ import annotations

import pytest

from moe_serve.engine.request.request import FinishReason
from tests.support.cluster.fake_cells import CellsWorld, Limits, prompt


def on_way(**fields: object) -> CellsWorld:
    """Returns a world in which a request has left its source and its last pages travel."""
    world = CellsWorld(**fields)  # type: ignore[arg-type]
    world.add("a", prompt(70), max_tokens=20)
    for _ in range(8):
        world.turn(delivers=False)
        if world.where("a") is None:
            break
    assert world.where("a") is None and world.carrier.on_way
    return world


def test_the_source_is_lost_before_all_has_arrived() -> None:
    world = on_way()
    world.carrier.deliver()
    world.moves.turn()
    world.lose(0)
    world.run()
    stats = world.moves.stats()
    assert stats.ended[("hand_over", "lost")] == 1
    decode = world.cells[1].coordinator.ranks["attention-0"].runner
    first = decode.plans[0].slices[0]
    assert first.key_start == 32, "the pages that had arrived were not computed again"


def test_the_source_is_lost_after_all_has_arrived_and_nothing_is_computed_again() -> None:
    world = on_way()
    world.carrier.deliver_all()
    world.moves.turn()
    world.lose(0)
    world.begin(0)
    world.run()
    stats = world.moves.stats()
    assert stats.ended == {("hand_over", "done"): 1} and stats.num_recomputed_tokens == 0
    decode = world.cells[1].coordinator.ranks["attention-0"].runner
    assert decode.num_computed_tokens == 19


def test_the_target_is_lost_and_the_request_goes_on_at_the_source() -> None:
    world = on_way()
    reader = world.cells[0].coordinator.ranks["attention-0"].runner
    before = reader.num_computed_tokens
    world.lose(1, is_back=False)
    world.begin(1)
    world.end(1) if world.cells[1].is_out else None
    world.moves.turn()
    assert world.where("a") == 0
    world.run()
    assert world.moves.stats().num_recomputed_tokens == 0
    assert reader.num_computed_tokens - before == 19, "each token once, and none of the prompt"


def test_the_target_comes_back_and_does_not_get_parcels_of_its_past() -> None:
    world = on_way()
    world.lose(1)
    world.begin(1)
    world.moves.turn()
    assert not world.carrier.on_way and world.where("a") == 0
    world.run()
    assert world.answer("a") == world.expected("a")


def test_a_parcel_fails_and_the_request_goes_on_at_the_source() -> None:
    world = on_way()
    world.carrier.deliver(why="its checksum is wrong")
    world.moves.turn()
    assert world.where("a") == 0 and not world.carrier.on_way
    world.run()
    stats = world.moves.stats()
    assert stats.num_failed_parcels == 1 and stats.ended[("hand_over", "failed")] == 1
    world.add("b", prompt(20), max_tokens=2)
    world.run()
    assert world.cells[1].coordinator.ranks["attention-0"].runner.cleared, "garbage is wiped"


def test_a_link_that_is_dead_is_given_up_after_the_time_out() -> None:
    world = on_way(timeout_s=5.0)
    world.clock.now += 4.0
    world.moves.turn()
    assert world.where("a") is None
    world.clock.now += 1.1
    world.moves.turn()
    assert world.where("a") == 0
    assert world.moves.stats().ended == {("hand_over", "timed_out"): 1}
    world.run()


def test_the_source_has_no_seat_any_more_and_the_request_waits_with_its_prefix() -> None:
    world = on_way(limits=Limits(num_seats=1))
    world.add("b", prompt(60, 2), max_tokens=30)
    world.turn(delivers=False)
    world.turn(delivers=False)
    world.cells[1].is_draining = True
    world.carrier.deliver(why="its checksum is wrong")
    world.run()
    assert world.moves.stats().num_recomputed_tokens < 16


@pytest.mark.parametrize("num_delivered", [0, 1, 9])
def test_an_abort_between_two_cells_ends_the_request_once(num_delivered: int) -> None:
    world = on_way()
    for _ in range(min(num_delivered, len(world.carrier.on_way))):
        world.carrier.deliver()
    world.abort("a")
    world.abort("a")
    world.run()
    ends = [d.finish_reason for d in world.deltas["a"] if d.finish_reason is not None]
    assert ends == [FinishReason.ABORT]
    assert world.moves.stats().ended == {("hand_over", "aborted"): 1}


def test_both_cells_are_lost_at_once() -> None:
    world = on_way()
    world.lose(0)
    world.lose(1)
    world.run()
    assert world.answer("a") == world.expected("a")


def test_all_decode_cells_are_gone_and_the_others_take_their_role() -> None:
    world = CellsWorld()
    world.lose(1, is_back=False)
    world.begin(1)
    world.add("a", prompt(70), max_tokens=10)
    world.run()
    assert not world.moves.stats().begun and world.answer("a") == world.expected("a")


def test_a_request_waits_while_no_cell_is_live() -> None:
    world = CellsWorld()
    for index in (0, 1):
        world.lose(index, is_back=False)
        world.begin(index)
    world.add("a", prompt(70), max_tokens=10)
    assert world.moves.has_work and list(world.moves.waiting)
    world.come_back()
    world.run()
