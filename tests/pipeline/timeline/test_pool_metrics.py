"""The pools' metrics, computed on paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.errors import TimelineError
from moe_serve.pipeline.timeline.pool_metrics import covered, measure
from moe_serve.pipeline.timeline.timeline_recorder import Role, Stage, Track
from pictures.timeline_figure import SimulatedPipeline, StageTimes
from tests.support.pipeline.stage_rows import ATTENTION_0, ATTENTION_1, EXPERT_0, EXPERT_1, records

S = Stage


def test_one_attention_and_two_expert_ranks() -> None:
    """A letter is 10 ns: A attention, D dispatch, C combine, L logits, P pack, X experts, S send,
    - waiting.

        attention 0   A A A D - - - - C L    step 0 is [0, 100)
        expert 0      - - - - P X S            busy 30
        expert 1      - - - P X X S            busy 40

    attention: busy 60 of 100, bubble 0.4; experts: busy 70 of 2 * 100, bubble 0.65; expert 1 is
    the slowest, by 40 / 30 - 1. Waiting for the combine: 40 of 100, all but 10 covered by expert 1.
    """
    tracks = {
        ATTENTION_0: records(
            (S.ATTENTION, 0, 0, 0, 30),
            (S.DISPATCH, 0, 0, 30, 40),
            (S.WAIT_COMBINE, 0, 0, 40, 80),
            (S.COMBINE, 0, 0, 80, 90),
            (S.LOGITS, 0, -1, 90, 100),
            (S.STEP, 0, -1, 0, 100),
        ),
        EXPERT_0: records(
            (S.WAIT_DISPATCH, 0, 0, 0, 40),
            (S.PACK, 0, 0, 40, 50),
            (S.EXPERTS, 0, 0, 50, 60),
            (S.SEND, 0, 0, 60, 70),
        ),
        EXPERT_1: records(
            (S.WAIT_DISPATCH, 0, 0, 0, 30),
            (S.PACK, 0, 0, 30, 40),
            (S.EXPERTS, 0, 0, 40, 60),
            (S.SEND, 0, 0, 60, 70),
        ),
    }
    metrics = measure(tracks)
    attention, expert = metrics.pool(Role.ATTENTION), metrics.pool(Role.EXPERT)
    assert attention is not None and expert is not None
    assert (metrics.num_steps, metrics.elapsed_ns, metrics.slowest_step) == (1, 100, (0, 100))
    assert (attention.busy_ns, attention.bubble_ratio) == (60, pytest.approx(0.4))
    assert (expert.busy_ns, expert.bubble_ratio) == (70, pytest.approx(0.65))
    assert (attention.slowest, attention.slowest_excess) == (ATTENTION_0, 0.0)
    assert (expert.slowest, expert.slowest_excess) == (EXPERT_1, pytest.approx(1 / 3))
    assert metrics.exposed_communication_ratio == pytest.approx(0.4)
    assert metrics.exposed_transfer_ratio == pytest.approx(0.1)
    assert metrics.steps_by_micro_batches == {1: 1}
    packs = [total for total in metrics.stages if total.stage is S.PACK]
    assert [(total.track, total.total_ns, total.num_rows) for total in packs] == [
        (EXPERT_0, 10, 10),
        (EXPERT_1, 10, 10),
    ]


def test_steps_micro_batches_and_a_rank_without_work() -> None:
    """Step 5 has two micro-batches and both attention ranks, step 6 one of each; step 7 is not
    over, and what lies between steps does not count: elapsed is 40 + 20.

    Attention: busy 2 * 30 + 10 of 2 * 60.
    """
    tracks = {
        ATTENTION_0: records(
            (S.ATTENTION, 5, 0, 0, 15),
            (S.ATTENTION, 5, 1, 15, 30),
            (S.STEP, 5, -1, 0, 30),
            (S.ATTENTION, 6, 0, 100, 110),
            (S.STEP, 6, -1, 100, 120),
            (S.ATTENTION, 7, 0, 200, 230),
        ),
        ATTENTION_1: records((S.ATTENTION, 5, 0, 10, 40), (S.STEP, 5, -1, 10, 40)),
    }
    metrics = measure(tracks)
    pool = metrics.pool(Role.ATTENTION)
    assert pool is not None and metrics.pool(Role.EXPERT) is None
    assert (metrics.steps, metrics.elapsed_ns) == ((5, 6), 60)
    assert metrics.steps_by_micro_batches == {1: 1, 2: 1}
    assert (pool.busy_ns, pool.bubble_ratio) == (70, pytest.approx(1 - 70 / 120))
    assert (pool.slowest, pool.slowest_excess) == (ATTENTION_0, pytest.approx(40 / 30 - 1))
    assert metrics.exposed_communication_ratio == 0


def test_waiting_without_experts_is_all_transfer() -> None:
    tracks = {ATTENTION_0: records((S.WAIT_COMBINE, 0, 0, 0, 5), (S.STEP, 0, -1, 0, 10))}
    metrics = measure(tracks)
    assert (metrics.exposed_communication_ratio, metrics.exposed_transfer_ratio) == (0.5, 0.5)


@pytest.mark.parametrize(
    "tracks",
    [
        {},
        {EXPERT_0: records((S.STEP, 0, -1, 0, 1))},
        {ATTENTION_0: records((S.LOGITS, 0, -1, 0, 1))},
    ],
)
def test_without_a_whole_step_there_is_nothing_to_say(tracks: dict[Track, object]) -> None:
    with pytest.raises(TimelineError, match="no complete step of an attention rank"):
        measure(tracks)  # type: ignore[arg-type]


def test_covered() -> None:
    def of(union: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
        starts_I, ends_I = np.array(union, dtype=np.int64).T
        starts_N, ends_N = np.array(others, dtype=np.int64).T
        return covered(starts_I, ends_I, starts_N, ends_N)

    assert of([(0, 4), (2, 6), (8, 9)], [(5, 10)]) == 2
    assert of([(8, 9), (0, 10), (2, 3)], [(1, 2), (20, 30), (-5, 0)]) == 1


_spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda s: (s[0], s[0] + s[1])),
    min_size=1,
    max_size=6,
)


@given(_spans, _spans)
def test_covered_counts_each_point_once(
    union: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    inside = {point for start, end in union for point in range(start, end)}
    expected = sum(point in inside for start, end in others for point in range(start, end))
    starts_I, ends_I = np.array(union, dtype=np.int64).T
    starts_N, ends_N = np.array(others, dtype=np.int64).T
    assert covered(starts_I, ends_I, starts_N, ends_N) == expected


def test_more_micro_batches_fill_the_bubbles_of_a_simulated_pipeline() -> None:
    bubbles, exposed = [], []
    for num_micro_batches in (1, 2, 3):
        pipeline = SimulatedPipeline(1, 1, num_layers=6, times=StageTimes(transfer_ns=90_000))
        pipeline.run_step(0, num_micro_batches)
        metrics = measure(pipeline.tracks())
        assert metrics.steps_by_micro_batches == {num_micro_batches: 1}
        bubbles.append([pool.bubble_ratio for pool in metrics.pools])
        exposed.append(metrics.exposed_communication_ratio)
    assert bubbles[0] > bubbles[1] > bubbles[2] and exposed[0] > exposed[1] > exposed[2]
    assert min(bubbles[0]) > 0.5 and max(bubbles[2]) < 0.2, bubbles


def test_a_straggler_is_named() -> None:
    slow = Track(Role.EXPERT, 1)
    times = StageTimes(jitter=0.0, slow_ranks={slow: 1.25})
    pipeline = SimulatedPipeline(2, 3, num_layers=4, times=times)
    for step in range(3):
        pipeline.run_step(step, 2)
    pool = measure(pipeline.tracks()).pool(Role.EXPERT)
    assert pool is not None and pool.slowest == slow
    assert pool.slowest_excess == pytest.approx(0.25, abs=1e-3)
