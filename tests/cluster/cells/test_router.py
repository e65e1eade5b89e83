"""The choice of the cells that read a prompt and generate its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_serve.adapters.adapter import Adapter, AdapterVersion
from moe_serve.cluster.cells.places import places_of
from moe_serve.cluster.cells.rates import LinkRates, StepRates, TokenSteps
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.service.step_model import StepWork
from moe_serve.model.stage.adapter_rows import AdapterWeights
from tests.support.cluster.fake_cells import ALWAYS, CellsWorld, Clock, Limits, prompt

REPLICAS = "3x(1A1E)"


def route(world: CellsWorld, tokens: Sequence[int], priority: int = 0) -> tuple[int, int]:
    """Returns the numbers of the cells that would read a prompt and generate its answer."""
    request = GenerationRequest(
        request_id="asks",
        prompt_token_ids=tuple(tokens),
        params=SamplingParams(max_tokens=10),
        priority=priority,
    )
    found = world.moves._router.route(EngineSequence(next(world.ids), request))
    assert found is not None
    return found.reader.cell.index, found.writer.cell.index


def measured(layout: str = REPLICAS) -> CellsWorld:
    """Returns a world in which a token takes a second in each cell."""
    return CellsWorld(layout=layout, make_model=TokenSteps, limits=Limits(num_pages=60))


def test_equal_cells_are_taken_in_their_order() -> None:
    world = measured()
    assert route(world, prompt(40)) == (0, 0)
    world.add("a", prompt(40))
    assert route(world, prompt(40, 2)) == (1, 1)


@pytest.mark.parametrize("layout", ["1x(3A1E)", "1x(1A1E prefill) 1x(3A1E decode)"])
def test_the_ranks_of_a_cell_share_its_sequences(layout: str) -> None:
    """They step together and score alike, so the rank that holds less is taken: for prompts that
    are read where they are answered, and for those that are handed over."""
    world = CellsWorld(layout=layout, config=ALWAYS, limits=Limits(num_pages=60, num_seats=8))
    most = [0, 0, 0]
    for turn in range(200):
        if turn % 5 == 0 and turn < 30:  # when the prompt before has been read
            world.add(f"r{turn}", prompt(40, turn), max_tokens=80)
        world.turn()
        running = [engine.num_running for engine in world.cells[-1].rank_engines.values()]
        most = [max(pair) for pair in zip(most, running, strict=True)]
    assert most == [2, 2, 2] and not world.has_work


def test_a_cached_prefix_counts_exactly() -> None:
    world = measured()
    for cell in world.cells:
        cell.is_draining = cell.index != 2
    world.add("a", prompt(64), max_tokens=2)
    world.run()
    for cell in world.cells:
        cell.is_draining = False
    assert route(world, [*prompt(64), 1, 2, 3]) == (2, 2)
    assert route(world, prompt(15)) == (0, 0), "less than a page is not cached"
    world.add("b", prompt(50, 4), max_tokens=2)
    world.add("c", prompt(40, 5), max_tokens=2)
    assert route(world, [*prompt(64), 1, 2, 3]) == (2, 2)


def test_a_popular_prefix_does_not_draw_all_requests_to_one_cell() -> None:
    world = measured()
    for cell in world.cells:
        cell.is_draining = cell.index != 2
    world.add("warm", prompt(112), max_tokens=1)
    world.run()
    for cell in world.cells:
        cell.is_draining = False
    places = []
    for index in range(6):
        name = f"r{index}"
        world.add(name, [*prompt(112), *prompt(20, 9 + index)], max_tokens=5)
        places.append(world.where(name))
    assert places[0] == 2 and set(places) == {0, 1, 2}
    world.run()


def test_more_urgent_requests_do_not_wait_for_less_urgent_ones() -> None:
    world = measured("2x(1A1E)")
    for index in range(3):
        world.add(f"r{index}", prompt(100, index))
    busy = [world.where(f"r{index}") for index in range(3)].count(0)
    assert busy == 2
    assert route(world, prompt(40, 8)) == (1, 1)
    assert route(world, prompt(40, 8), priority=-1) == (0, 0), "none is ahead in either cell"


def test_a_slow_link_keeps_a_prompt_where_it_is_answered() -> None:
    world = CellsWorld(
        config=ALWAYS.__class__(min_tokens=32), make_model=TokenSteps, limits=Limits(num_pages=60)
    )
    world.add("s", prompt(10), max_tokens=50)
    world.turn()
    world.turn()
    assert route(world, prompt(100)) == (0, 1)
    world.moves._router._links.arrived(0, 1, seconds=500.0, num_pages=1)
    assert route(world, prompt(100)) == (1, 1)
    world.run()


def test_a_link_rests_after_failures_for_longer_and_longer() -> None:
    clock = Clock()
    links = LinkRates(clock)
    links.failed(0, 1)
    assert not links.is_resting(0, 1), "the pages of one request may be bad"
    links.failed(0, 1)
    assert links.is_resting(0, 1) and not links.is_resting(1, 0)
    clock.now = 1.5
    assert not links.is_resting(0, 1)
    links.failed(0, 1)
    clock.now = 3.0
    assert links.is_resting(0, 1)
    clock.now = 4.0
    links.arrived(0, 1, 0.1, 4)
    links.failed(0, 1)
    assert not links.is_resting(0, 1), "a parcel that arrived ends the series"
    links.failed(1, 0, is_late=True)
    assert links.is_resting(1, 0)


def test_steps_are_measured_from_the_end_of_the_step_before() -> None:
    world = CellsWorld(layout="2x(1A1E)", step_s=0.25)
    rates = StepRates(world.cells, world.clock, 32)
    cell, unmeasured = world.cells
    rows = StepWork(2, 10, 0)
    assert rates.model(cell).seconds(rows) == 12, "tokens count before anything is measured"
    world.add("a", prompt(60), max_tokens=8)
    for _ in range(6):
        rates.begins(cell)
        world.begin(0)
        if cell.is_out:
            world.end(0)
        rates.ended(cell)
    assert 0.2 < rates.usual_s(cell) < 0.3
    assert rates.model(unmeasured) is rates.model(cell), "alike until it is measured itself"
    world.run()


def test_all_that_is_left_takes_the_roles_of_lost_cells() -> None:
    world = measured("1x(1A1E prefill) 1x(1A1E decode) 1x(1A1E)")
    assert route(world, prompt(100)) == (0, 1)
    world.lose(1, is_back=False)
    world.begin(1)
    assert route(world, prompt(100)) == (0, 2)
    world.lose(2, is_back=False)
    world.begin(2)
    assert route(world, prompt(100)) == (0, 0)
    world.come_back()
    world.lose(0, is_back=False)
    world.turn()
    world.turn()
    assert route(world, prompt(100)) == (2, 1)


def test_a_cell_that_has_lost_an_adapter_gets_none_of_its_requests() -> None:
    world = measured()
    world.cells[0].lost.add(7)
    weights = AdapterWeights(digest=b"x", layers=(), num_bytes=0, kind="lora", rank=1, number=7)
    version = AdapterVersion(
        name="a", folder=Path("a"), digest=b"x", kind="lora", rank=1, num_bytes=0, loaded_at=0
    )
    request = GenerationRequest(
        request_id="asks",
        prompt_token_ids=tuple(prompt(40)),
        params=SamplingParams(max_tokens=10),
        adapter=Adapter(version=version, weights=weights),
    )
    router, sequence = world.moves._router, EngineSequence(next(world.ids), request)
    found = router.route(sequence)
    assert found is not None and found.reader.cell.index == 1
    assert route(world, prompt(40)) == (0, 0), "the base model"
    targets = router.targets(sequence, places_of(world.cells)[2])
    assert [place.cell.index for place in targets] == [1]
    for cell in world.cells[1:]:
        cell.lost.add(7)
    found = router.route(sequence)
    assert found is not None and found.reader.cell.index == 0, "it fails there, and says why"
