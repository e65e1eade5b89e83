"""Keys of the orders: the formulas, the classes on top, and the scalar twin of the columns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.clock import REAL_CLOCK
from moe_serve.config.sections import OrderName, SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.service.order import (
    StartOrder,
    all_in_time,
    behind_the_others,
    bucket_of,
    rule_of,
)
from moe_serve.engine.service.waiting_table import WaitingTable
from tests.support.engine.timed_engine import TIERS, request, service_of

TOKEN_S = 0.001
CONFIG = SchedulerConfig(tiers=TIERS, patience_s=2.0, max_wait_s=90.0)


def order(name: OrderName = "atc", **changes: object) -> StartOrder:
    config = replace(CONFIG, order=name, **changes)  # type: ignore[arg-type]
    return StartOrder(rule_of(config, lambda: 0.1), config.max_wait_s, config.late)


def waiting(
    key: int, *, tier: int = 0, queued: float = 0.0, deadline: float = 1.0, num_left: int = 100
) -> Sequence:
    sequence = Sequence(key, request(f"r{key}", service_of(TIERS[tier]), at_s=queued, token=key))
    sequence.standing = Standing(
        queued_s=queued, deadline_s=deadline, clock=REAL_CLOCK, tier=tier, num_left=num_left
    )
    return sequence


def table_of(*sequences: Sequence) -> WaitingTable:
    table = WaitingTable()
    for sequence in sequences:
        table.add(sequence)
    return table


def ids(order: StartOrder, now_s: float, *sequences: Sequence) -> list[int]:
    keys = order.keys(table_of(*sequences), now_s, TOKEN_S, None)
    return [sequences[row].id for row in np.argsort(keys, kind="stable")]


def test_atc_is_its_index_in_seconds() -> None:
    """A key is -K log(index), up to a constant: index = w / p exp(-max(0, D - p - now) / K)."""
    rows = [
        waiting(0, tier=0, deadline=9.0, num_left=80),
        waiting(1, tier=1, deadline=3.0, num_left=120),
        waiting(2, tier=2, deadline=1.5, num_left=100),
        waiting(3, tier=0, deadline=-4.0, num_left=130),
    ]
    keys = order().keys(table_of(*rows), 1.0, TOKEN_S, None)
    for row, sequence in enumerate(rows):
        standing = sequence.standing
        assert standing is not None
        p = standing.num_left * TOKEN_S
        slack = max(0.0, standing.deadline_s - p - 1.0)
        index = sequence.request.service.weight / (p / 0.1) * math.exp(-slack / 2.0)
        assert keys[row] == pytest.approx(-2.0 * math.log(index))


def test_early_requests_go_by_deadline_and_late_ones_by_weight_and_length() -> None:
    early, later = waiting(0, deadline=50.0), waiting(1, deadline=60.0)
    assert ids(order(), 0.0, later, early) == [0, 1]
    light, heavy = waiting(0, tier=2, deadline=-9.0), waiting(1, tier=0, deadline=-1.0)
    assert ids(order(), 0.0, light, heavy) == [1, 0], "edf would take the one that is later"
    assert ids(order("edf"), 0.0, light, heavy) == [0, 1]
    long, short = waiting(0, deadline=-2.0, num_left=170), waiting(1, deadline=-1.0, num_left=60)
    assert ids(order(), 0.0, long, short) == [1, 0]


def test_a_long_and_a_short_prompt_count_as_at_most_twice_each_other() -> None:
    """The ratio of lengths is bounded by 2, so a long prompt of a heavy tier stays in front."""
    keys = order().keys(
        table_of(
            waiting(0, tier=0, deadline=-1.0, num_left=8000),
            waiting(1, tier=0, deadline=-1.0, num_left=200),
            waiting(2, tier=0, deadline=-1.0, num_left=1),
        ),
        0.0,
        TOKEN_S,
        None,
    )
    assert keys[0] == pytest.approx(keys[1])
    assert keys[0] - keys[2] == pytest.approx(2.0 * math.log(2.0))


def test_who_waited_for_the_bound_goes_first_and_the_oldest_of_them() -> None:
    rows = [
        waiting(0, tier=0, queued=92.0, deadline=93.0),
        waiting(1, tier=2, queued=8.0, deadline=68.0, num_left=9000),
        waiting(2, tier=2, queued=5.0, deadline=500.0, num_left=9000),
    ]
    assert ids(order(), 94.0, *rows)[0] == 0
    assert ids(order(), 99.0, *rows) == [2, 1, 0]


def test_demoted_requests_go_last_but_not_beyond_the_bound() -> None:
    rows = [waiting(0, tier=0, deadline=1.0), waiting(1, tier=2, deadline=60.0)]
    assert ids(order(late="demote"), 10.0, *rows) == [1, 0]
    assert ids(order(late="keep"), 10.0, *rows) == [0, 1]
    assert ids(order(late="demote"), 90.0, *rows) == [0, 1]


def test_preempted_requests_keep_their_place_in_front() -> None:
    late = waiting(1, queued=5.0, deadline=400.0)
    late.num_preemptions = 1
    assert ids(order(), 100.0, waiting(0, queued=0.0), late) == [1, 0]


def test_rows_of_tenants_that_are_ahead_are_behind_the_last_other_of_their_tier() -> None:
    keys = behind_the_others(
        np.array([0.0, 5.0, 9.0, 1.0]),
        np.array([True, False, False, False]),
        np.array([0, 0, 1, 0]),
        0.25,
    )
    assert keys.tolist() == [5.0 + 2 * 0.25, 5.0, 9.0, 1.0]


def test_a_tenant_that_is_ahead_goes_by_age_after_twice_the_bound() -> None:
    """Until then the others of its tier go first, however long it has waited."""
    rows = table_of(waiting(0, queued=0.0), waiting(1, queued=99.0, deadline=100.0))
    ahead = np.array([True, False])
    for now_s, goes_first in ((100.0, False), (179.9, False), (180.0, True), (200.0, True)):
        keys = order().keys(rows, now_s, TOKEN_S, ahead)
        assert (keys[0] < keys[1]) == goes_first, now_s


def test_all_are_in_time_in_order_of_arrival() -> None:
    """Reading takes 1, 2 and 4 s in order of arrival: they end after 1, 3 and 7 s."""
    queued, work = np.array([9.0, 5.0, 7.0]), np.array([4.0, 1.0, 2.0])
    none, ones = np.zeros(3), np.ones(3)
    assert all_in_time(queued, work, none, np.array([7.0, 1.0, 3.0]), 0.0)
    for row in range(3):
        slack = np.array([7.0, 1.0, 3.0])
        slack[row] -= 0.1
        assert not all_in_time(queued, work, none, slack, 0.0)
    # Seats become free after 5, 10 and 15 s, and each prompt is read when it has one.
    assert all_in_time(queued, work, ones, np.array([19.0, 6.0, 12.0]), 5.0)
    assert not all_in_time(queued, work, ones, np.array([19.0, 6.0, 11.9]), 5.0)


@settings(deadline=None)
@given(
    st.sampled_from(("atc", "edf", "fifo", "priority")),
    st.integers(0, 2),
    st.floats(0.0, 80.0),
    st.floats(-50.0, 100.0),
    st.integers(1, 20_000),
)
def test_the_key_of_one_request_is_that_of_its_row(
    name: OrderName, tier: int, now: float, deadline: float, num_left: int
) -> None:
    made = waiting(0, tier=tier, deadline=deadline, num_left=num_left)
    (key,) = order(name).keys(table_of(made), now, TOKEN_S, None)
    work_s = num_left * TOKEN_S
    weight = TIERS[tier].weight
    keys_at = order(name).keys_over_time(deadline - work_s, work_s, weight, 0)
    assert keys_at(np.array([0.0, now]))[1] == pytest.approx(key)


def test_a_bucket_is_a_small_part_of_the_strictest_target() -> None:
    """Else requests of all tiers with short targets would be equally urgent."""
    strict, slack = TierConfig(name="a", ttft_s=0.4), TierConfig(name="b", ttft_s=60.0)
    assert bucket_of(SchedulerConfig(tiers=(slack, strict))) == pytest.approx(0.025)
    assert bucket_of(SchedulerConfig(tiers=(slack,))) == bucket_of(SchedulerConfig()) == 0.25


@pytest.mark.parametrize("name", ["atc", "edf", "fifo", "priority"])
def test_a_key_never_falls_below_its_floor(name: OrderName) -> None:
    """ATC's keys stop falling when the latest start has passed, all others fall for ever."""
    made = order(name)
    table = table_of(*[waiting(key, tier=key % 3, deadline=2.0 * key) for key in range(6)])
    keys = made.keys(table, 0.5, TOKEN_S, None)
    floors = made.floors(table, keys, TOKEN_S)
    later = made.keys(table, 40.0, TOKEN_S, None)
    assert np.maximum(floors, keys - 39.5) == pytest.approx(later)
    assert np.isfinite(floors).all() if name == "atc" else np.isneginf(floors).all()
