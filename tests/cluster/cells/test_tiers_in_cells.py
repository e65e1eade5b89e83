"""Service tiers over several cells: one policy, and standings that go along with requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_stats import ServiceStats
from moe_serve.engine.request.service_terms import Service, Targets
from tests.support.cluster.fake_cells import CellsWorld, Limits, prompt

URGENT = TierConfig(name="urgent", weight=4.0, ttft_s=300.0)
FLEX = TierConfig(name="flex", ttft_s=50_000.0)
TIERS = (URGENT, FLEX)
REPLICAS = "2x(1A1E)"


def world_of(layout: str, **fields: object) -> CellsWorld:
    return CellsWorld(layout=layout, tiers=TIERS, **fields)  # type: ignore[arg-type]


def stats_of(world: CellsWorld) -> ServiceStats:
    found = [cell.engine.stats().service for cell in world.cells]
    assert world.policy is not None and all(each is not None for each in found)
    return world.policy.stats()


def sequence_of(world: CellsWorld, name: str) -> Sequence:
    """Returns a request that runs or waits in some cell."""
    for cell in world.cells:
        for engine in cell.rank_engines.values():
            if name in engine._sequences:
                return engine._sequences[name]
    raise AssertionError(f"no cell has {name}")


@pytest.mark.parametrize("layout", ["1x(1A1E)", REPLICAS, "1x(1A1E prefill) 2x(2A1E decode)"])
def test_each_token_is_charged_once_to_its_tenant(layout: str) -> None:
    world = world_of(layout)
    for number in range(12):
        tenant = "a" if number % 3 else "b"
        service = Service.of_tier(TIERS[number % 2], tenant)
        world.add(f"r{number}", prompt(40, number + 1), max_tokens=5, service=service)
    world.run()
    stats = stats_of(world)
    served = {(each.tier, each.tenant): each.service_s for each in stats.tenants}
    each = 40 + 4  # a second for a prompt token and for a row that decodes
    assert served == pytest.approx(
        {("urgent", "a"): 4 * each, ("urgent", "b"): 2 * each}
        | {("flex", "a"): 4 * each, ("flex", "b"): 2 * each}
    )
    assert [each.num_finished for each in stats.tiers] == [6, 6]
    assert world.policy is not None and world.policy.shares.num_open == 0


def test_a_standing_goes_along_with_hand_overs_and_drains() -> None:
    """The clock of a cell leaves out its own pauses, and a move keeps the time that is left."""
    world = world_of("1x(1A1E prefill) 2x(1A1E decode)", step_s=0.1)
    targets = Targets(e2e_s=9000.0, is_strict=True)
    service = replace(Service.of_tier(FLEX, "t"), targets=targets)
    world.add("a", prompt(40), max_tokens=60, service=service)
    world.turn()
    sequence, clock = sequence_of(world, "a"), world.clock
    standing = sequence.standing
    assert standing is not None and standing.tier == 1
    clock.now += 500.0  # a pause, of which the first cell's clock counts a part
    seen: list[int | None] = []
    while world.has_work:
        left_s = standing.last_due_s - standing.clock()
        world.turn()
        assert sequence.standing is standing
        assert standing.last_due_s - standing.clock() == pytest.approx(left_s, abs=2.0)
        seen.append(world.where("a"))
        if seen.count(1) == 15:
            world.cells[1].is_draining = True
    assert [cell for cell in (0, 1, 2) if cell in seen] == [0, 1, 2]
    world.check_idle()
    assert world.policy is not None and world.policy.num_strict == 0
    counts = stats_of(world).tiers[1]
    assert counts.num_with_e2e == counts.num_e2e_met == counts.num_finished == 1


def test_standings_survive_losses_and_aborts_in_between() -> None:
    world = world_of("1x(1A1E prefill) 1x(1A1E decode)")
    service = replace(Service.of_tier(URGENT, "t"), targets=Targets(e2e_s=900.0, is_strict=True))
    for name in ("a", "b", "c"):
        world.add(name, prompt(40, ord(name) % 9), max_tokens=30, service=service)
    world.turn(delivers=False)
    world.turn(delivers=False)
    world.abort("b")
    world.lose(0)
    world.turn()
    world.lose(1)
    world.run()
    assert world.policy is not None
    assert world.policy.num_strict == world.policy.shares.num_open == 0
    assert stats_of(world).tiers[0].num_finished == 2


def test_the_router_takes_the_cell_with_the_earliest_forecast() -> None:
    """Cell 0 has more tokens to read, but the newcomer passes them."""
    world = world_of(REPLICAS, limits=Limits(num_pages=60, num_seats=2))
    for number, tier in enumerate((FLEX, URGENT)):
        world.cells[1 - number].is_draining = True
        for each in range(6 if tier is FLEX else 3):
            name = f"{tier.name} {each}"
            tokens = prompt(60, 10 * number + each)
            world.add(name, tokens, max_tokens=20, service=Service.of_tier(tier))
        world.cells[1 - number].is_draining = False
    for cell in world.cells:
        world.begin(cell.index)
        world.end(cell.index)
    world.add("new", prompt(40, 20), service=Service.of_tier(URGENT))
    assert world.where("new") == 0
    world.add("flexible", prompt(40, 21), service=Service.of_tier(FLEX))
    assert world.where("flexible") == 1
    world.run()


def test_forecasts_leave_out_a_rank_that_drains_by_itself() -> None:
    world = world_of("1x(2A1E)")
    (cell,) = world.cells
    assert world.policy is not None
    for rank in (*cell.rank_engines, "attention-1"):
        world.moves.drain_rank(cell, rank, is_draining=rank == "attention-1")
    world.add("a", prompt(40, 1), max_tokens=3, service=Service.of_tier(URGENT))
    world.run()
    closed = world.policy.admission._closed_engines
    assert len(closed) == 1
    world.moves.drain_rank(cell, "attention-1", is_draining=False)
    world.add("b", prompt(40, 2), max_tokens=3, service=Service.of_tier(URGENT))
    world.run()
    assert not closed


def test_more_urgent_requests_have_the_first_claim_to_seats() -> None:
    """A request with a first token does not take a seat for which a more urgent one waits."""
    layout, limits = "1x(1A1E prefill) 1x(1A1E decode)", Limits(num_seats=1, num_pages=60)
    world = world_of(layout, limits=limits)
    world.add("a", prompt(40), max_tokens=30, service=Service.of_tier(FLEX))
    while world.where("a") != 1:
        world.turn()
    world.add("b", prompt(40, 2), max_tokens=30, service=Service.of_tier(FLEX))
    world.turn()
    assert world.where("b") == 0
    world.add("c", prompt(20, 3), max_tokens=4, service=Service.of_tier(URGENT))
    assert world.where("c") == 1, "it is short"
    target = world.cells[1].rank_engines["attention-0"]
    assert target.moving._num_before(sequence_of(world, "b")) == 1
    world.run()
