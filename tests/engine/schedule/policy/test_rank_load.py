"""Prompts that load the same rank go to different micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experts.placement.problem.placement import contiguous
from moe_serve.engine.schedule.policy.expert_aware import Bounds, ExpertAware
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from tests.support.engine.batch_world import NUM_EXPERTS, World, decode, of_domain


def test_the_load_of_a_signature() -> None:
    loads = RankLoads(contiguous([1, 3], NUM_EXPERTS, 2))
    expected = [[10 * 4 * 0.5, 10 * 4 * 0.02]] * 2
    assert np.allclose(loads.of(of_domain(0).ravel(), 10), expected)


def test_it_follows_the_placement() -> None:
    before = contiguous([1, 3], NUM_EXPERTS, 2)
    others = tuple((1 - ranks[0],) for ranks in before.ranks_of[3])
    after = replace(before, ranks_of={1: before.ranks_of[1], 3: others})
    signature = np.linspace(0, 1, 2 * NUM_EXPERTS, dtype=np.float32)
    loads = RankLoads(before)
    loads.use(after)
    assert np.array_equal(loads.of(signature, 5), RankLoads(after).of(signature, 5))
    assert not np.array_equal(loads.of(signature, 5), RankLoads(before).of(signature, 5))


def test_prompts_of_one_domain_are_taken_apart() -> None:
    """Domain 0 lives on rank 0, so both of its prompts in one micro-batch would overload that
    rank."""
    world = World()
    loads = RankLoads(contiguous([1, 3], NUM_EXPERTS, 2))
    policy = ExpertAware(
        world.source, world.table, world.ageing, world.cost, Bounds(tolerance=0.2), loads
    )
    for key, domain in enumerate((0, 1, 0, 1)):  # balanced would pair 0 with 2
        world.table.put([key], of_domain(domain)[None])
    batches = policy.split(decode(range(4), num_tokens=50), 2)
    assert sorted(sorted(s.sequence_id % 2 for s in b.slices) for b in batches) == [[0, 1], [0, 1]]
