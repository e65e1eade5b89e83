"""Splits separate clusters, keep sizes near the balanced ones, and lose nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.engine.schedule.policy.arrival_order import BALANCED, FIFO
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost
from moe_serve.engine.schedule.policy.local_search import LocalSearch, SizeLimits
from moe_serve.engine.schedule.policy.longest_first import split
from moe_serve.engine.schedule.policy.standing_split import first_split
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from tests.support.engine.batch_world import World, decode, of_domain


def ids_of(batches: tuple[MicroBatch, ...]) -> list[list[int]]:
    return [sorted(s.sequence_id for s in batch.slices) for batch in batches]


def test_two_clusters_come_apart() -> None:
    world, rng = World(), np.random.default_rng(0)
    for key in range(16):
        world.table.put([key], of_domain(key % 2, rng)[None])
    assert sorted(ids_of(world.policy.split(decode(range(16)), 2))) == [
        list(range(0, 16, 2)),
        list(range(1, 16, 2)),
    ]


def test_a_settled_split_stays_and_follows_who_comes_and_goes() -> None:
    world, rng = World(), np.random.default_rng(1)
    for key in range(12):
        world.table.put([key], of_domain(key % 2, rng)[None])
    first = world.policy.split(decode(range(12)), 2)
    assert ids_of(world.policy.split(decode(range(12)), 2)) == ids_of(first)
    assert ids_of(world.policy.split(decode(range(12)), 1)) == [list(range(12))]
    world.policy.forget([0, 1])
    world.table.put([20], of_domain(0, rng)[None])
    world.table.put([21], of_domain(1, rng)[None])
    later = ids_of(world.policy.split(decode([*range(2, 12), 20, 21]), 2))
    assert sorted(later) == [[2, 4, 6, 8, 10, 20], [3, 5, 7, 9, 11, 21]]


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_what_trying_all_finds(capacity: int, seed: int) -> None:
    """Eight rows in two halves have 35 splits."""
    rng = np.random.default_rng(seed)
    chosen = rng.random((8, 12)).argsort(axis=1)[:, :3]
    signatures = np.zeros((8, 12), dtype=np.float32)
    np.put_along_axis(signatures, chosen, 1.0, axis=1)
    cost = ConcaveCost(capacity)
    x_RD = cost.features(signatures)
    best = min(
        float(cost.total(x_RD[list(half)].sum(0)) + cost.total(np.delete(x_RD, half, 0).sum(0)))
        for half in itertools.combinations(range(8), 4)
    )
    found = []
    for start in (first_split(x_RD, 2), np.arange(8) % 2, np.arange(8) // 4):
        none = np.zeros((2, 12), dtype=np.float32)
        sizes = np.zeros(2, dtype=np.int64)
        search = LocalSearch(cost, x_RD, start, none, sizes, SizeLimits(4, 4))
        before = search.total
        assert search.run(200)
        assert search.total <= before + 1e-4
        assert search.sizes_G.tolist() == [4, 4]
        found.append(search.total)
    assert min(found) <= best * 1.02 + 1e-4, f"{min(found):.3f}, the best is {best:.3f}"


def test_activated_experts_of_known_choices_are_counted() -> None:
    cost = ConcaveCost()
    choices = np.array([[1, 1, 0, 0], [1, 0, 0, 1]], dtype=np.float32)
    assert cost.total(cost.features(choices).sum(0)) == pytest.approx(3, abs=1e-2)
    assert ConcaveCost(2).total(choices.sum(0)) == 4


@pytest.mark.parametrize("capacity", [1, 3])
def test_the_cost_with_each_row_is_that_of_the_sums(capacity: int) -> None:
    rng, cost = np.random.default_rng(0), ConcaveCost(capacity)
    x_RD = cost.features(rng.random((9, 20), dtype=np.float32))
    sums_D = 200 * rng.random(20, dtype=np.float32)
    sums_D[:10] /= 100
    found = cost.with_each(x_RD)(sums_D)
    assert found.tolist() == pytest.approx(cost.total(sums_D + x_RD).tolist(), rel=1e-5)


slices_lists = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(slices_lists, st.integers(1, 4), st.integers(0, 3), st.sampled_from((0.0, 0.12, 0.5)))
def test_every_slice_is_in_one_micro_batch(
    lengths: list[int], most: int, seed: int, tolerance: float
) -> None:
    """No micro-batch is empty, and token counts are within the tolerance of the balanced split."""
    world, rng = World(tolerance=tolerance), np.random.default_rng(seed)
    slices = [
        SequenceSlice(key, 5, np.zeros(max(1, n - 30), dtype=np.int64), (0,), 1)
        for key, n in enumerate(lengths)
    ]
    for step in range(3):
        for key in range(step, len(slices), 2):
            world.table.put([key], of_domain(int(rng.integers(2)), rng)[None])
        kept = [s for s in slices if rng.random() < 0.8] or slices[:1]
        lpt = [batch.num_tokens for batch in split(kept, most)]
        limits = SizeLimits.near(lpt, tolerance)
        for policy in (world.policy, FIFO, BALANCED):
            batches = policy.split(kept, most)
            sizes = [batch.num_tokens for batch in batches]
            assert len(sizes) == len(lpt)
            assert sorted(itertools.chain(*ids_of(batches))) == sorted(s.sequence_id for s in kept)
            assert min(sizes) >= limits.low and max(sizes) <= limits.high, f"{sizes}, {lpt}"


def test_balanced_evens_out_contexts() -> None:
    tokens = np.zeros(1, dtype=np.int64)
    contexts = (900, 10, 800, 20)
    slices = [SequenceSlice(key, n, tokens, (0,), 1) for key, n in enumerate(contexts)]
    assert sorted(ids_of(BALANCED.split(slices, 2))) == [[0, 1], [2, 3]]
    assert ids_of(FIFO.split(slices, 2)) == [[0, 2], [1, 3]]


def test_fifo_while_the_source_is_off() -> None:
    world = World()
    for key in range(8):
        world.table.put([key], of_domain(key // 4)[None])
    world.source.is_on, slices = False, decode(range(8))
    assert world.policy.split(slices, 2) == FIFO.split(slices, 2)
    assert world.policy.stats().policy == "fifo"
    waiting = [world.sequence(of_domain(n % 2)) for n in range(4)]
    assert list(world.policy.candidates(waiting, [])) == waiting
