"""A prompt is read in one cell and its answer generated in another one, with the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.cluster.fake_cells import ALWAYS, POISON, CellsWorld, Limits, prompt


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("length", [64, 65, 70, 79, 80, 100])
def test_a_prompt_is_read_in_one_cell_and_its_answer_generated_in_another(
    length: int, is_ahead: bool
) -> None:
    world = CellsWorld(limits=Limits(is_ahead=is_ahead))
    world.add("a", prompt(length), max_tokens=20)
    assert world.where("a") == 0
    world.run()
    assert world.answer("a") == world.expected("a")
    decode = world.cells[1].coordinator.ranks["attention-0"].runner
    assert {len(piece.token_ids) for plan in decode.plans for piece in plan.slices} == {1}
    stats = world.moves.stats()
    assert stats.ended == {("hand_over", "done"): 1}
    assert stats.num_pages == -(-length // 16) and stats.num_recomputed_tokens == 0
    assert stats.num_bytes == stats.num_pages * world.carrier.page_bytes


def test_pages_travel_while_the_prompt_is_still_read() -> None:
    world = CellsWorld()
    world.add("a", prompt(128))
    world.turn()
    world.turn()
    assert 0 < world.moves.stats().num_pages < 8 and not world.answer("a")
    world.run()


def test_a_short_prompt_is_read_where_it_is_answered() -> None:
    world = CellsWorld(config=replace(ALWAYS, min_tokens=40))
    world.add("short", prompt(39))
    assert world.where("short") == 1
    world.run()
    assert not world.moves.stats().begun


def test_a_prompt_that_is_mostly_cached_is_read_where_it_is_answered() -> None:
    world = CellsWorld(config=replace(ALWAYS, min_tokens=40))
    world.add("first", prompt(100), max_tokens=4)
    world.run()
    world.add("second", [*prompt(100), *prompt(20, 2)], max_tokens=4)
    assert world.where("second") == 1
    world.run()
    assert world.deltas["second"][0].num_cached_tokens >= 96


def test_only_pages_that_the_target_lacks_travel() -> None:
    world = CellsWorld()
    world.add("first", prompt(64), max_tokens=2)
    world.run()
    num_pages = world.moves.stats().num_pages
    world.add("second", [*prompt(64), *prompt(64, 2)], max_tokens=5)
    assert world.where("second") == 0
    world.run()
    assert world.moves.stats().num_pages - num_pages == 4
    assert world.moves.stats().ended == {("hand_over", "done"): 2}


def test_the_cell_that_read_the_prompt_keeps_its_pages_for_others() -> None:
    world = CellsWorld()
    world.add("first", prompt(96), max_tokens=6)
    world.run()
    reader = world.cells[0].coordinator.ranks["attention-0"].runner
    before = reader.num_computed_tokens
    world.add("second", [*prompt(96), *prompt(60, 3)], max_tokens=2)
    world.run()
    assert reader.num_computed_tokens - before == 60


def test_a_full_cell_leaves_the_answer_to_the_cell_that_read_the_prompt() -> None:
    world = CellsWorld(limits=Limits(num_seats=1))
    world.add("a", prompt(64), max_tokens=40)
    for _ in range(6):
        world.turn()
    assert world.where("a") == 1
    world.add("b", prompt(64, 2), max_tokens=12)
    for _ in range(8):
        world.turn()
    assert world.where("b") == 0 and len(world.answer("b")) > 2
    world.run()
    assert world.moves.stats().ended[("hand_over", "done")] == 1


def test_off_means_that_no_prompt_travels() -> None:
    world = CellsWorld(config=replace(ALWAYS, hand_over="off"))
    world.add("a", prompt(120))
    assert world.where("a") == 1
    world.run()


def test_a_request_for_one_token_ends_where_its_prompt_is_read() -> None:
    world = CellsWorld()
    world.add("a", prompt(120), max_tokens=1)
    world.run()
    assert not world.moves.stats().begun


def test_prompt_log_probabilities_come_with_the_first_token_before_the_request_moves() -> None:
    world = CellsWorld()
    world.add("a", prompt(70), max_tokens=6, prompt_logprobs=1, logprobs=2)
    world.run()
    first, *others = world.deltas["a"]
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 70
    assert all(delta.prompt_logprobs is None for delta in others)
    assert all(delta.logprobs is not None for delta in world.deltas["a"])
    assert world.moves.stats().ended == {("hand_over", "done"): 1}


def test_many_requests_share_a_carrier_with_little_room() -> None:
    world = CellsWorld(pages_per_parcel=1, room=2, limits=Limits(num_pages=60, num_seats=6))
    for index in range(12):
        world.add(f"r{index}", prompt(40 + 9 * index, index), max_tokens=5 + index)
    world.run()
    assert world.moves.stats().ended[("hand_over", "done")] > 6


def test_pages_that_a_failed_request_left_are_wiped_before_others_arrive_in_them() -> None:
    world = CellsWorld()
    world.add("bad", [POISON] * 25, max_tokens=4)
    world.run()
    assert world.deltas["bad"][-1].error is not None
    world.add("a", prompt(100), max_tokens=12)
    world.run()
    assert world.answer("a") == world.expected("a")
    assert world.moves.stats().ended == {("hand_over", "done"): 1}
