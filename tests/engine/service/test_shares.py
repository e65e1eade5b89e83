"""Shares of tenants: the bound, the lift on return, and bounded state for a million tenants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.engine.service.shares import Shares
from tests.support.sampled_cases import EVERY_CASE

DELTA_S = 1.0


def test_a_tenant_that_had_more_is_ahead_until_the_others_catch_up() -> None:
    shares = Shares()
    heavy, light = shares.enter(0, "heavy"), shares.enter(0, "light")
    shares.wait(heavy)
    shares.charge(heavy, 5.0)
    assert shares.are_ahead(DELTA_S) is None, "alone in the queue it waits for no other tenant"
    shares.wait(light)
    assert shares.counter_s(light) == 5.0, "it was lifted to those that wait"
    shares.charge(heavy, 1.5)
    ahead = shares.are_ahead(DELTA_S)
    assert ahead is not None and ahead[heavy] and not ahead[light]
    shares.charge(light, 0.6)
    assert shares.are_ahead(DELTA_S) is None


def test_tiers_are_shared_apart() -> None:
    shares = Shares()
    places = [shares.enter(tier, "same") for tier in (0, 1)]
    for place in places:
        shares.wait(place)
    shares.charge(places[0], 100.0)
    assert len(set(places)) == 2 and shares.are_ahead(DELTA_S) is None


def test_return_after_an_hour_earns_nothing() -> None:
    shares = Shares()
    busy, gone = shares.enter(0, "busy"), shares.enter(0, "gone")
    shares.wait(gone)
    shares.stop_waiting(gone)
    shares.leave(gone)
    shares.wait(busy)
    shares.charge(busy, 3600.0)
    back = shares.enter(0, "gone")
    shares.wait(back)
    assert shares.counter_s(back) == 3600.0, "no credit of an hour"
    shares.charge(back, 2.0)
    ahead = shares.are_ahead(DELTA_S)
    assert ahead is not None and ahead[back] and not ahead[busy], "it has no hour before it is"


def test_return_to_an_empty_queue_earns_nothing_either() -> None:
    shares = Shares()
    busy = shares.enter(0, "busy")
    shares.wait(busy)
    shares.charge(busy, 3600.0)
    shares.stop_waiting(busy)  # it runs; nothing waits
    back = shares.enter(0, "back")
    shares.wait(back)
    assert shares.counter_s(back) == 3600.0


def test_a_debt_is_remembered() -> None:
    shares = Shares()
    greedy, other = shares.enter(0, "greedy"), shares.enter(0, "other")
    shares.wait(other)
    shares.charge(greedy, 50.0)
    shares.leave(greedy)
    back = shares.enter(0, "greedy")
    shares.wait(back)
    assert shares.counter_s(back) == 50.0 and shares.counter_s(other) == 0.0


def test_a_million_tenants_are_bounded_state() -> None:
    shares = Shares()
    for number in range(20_000):  # the rule is the same for a million
        place = shares.enter(0, f"tenant {number}")
        shares.wait(place)
        shares.charge(place, 0.1)
        shares.stop_waiting(place)
        shares.leave(place)
    assert shares.num_remembered <= 4096
    assert len(shares._counter_s) == 64 and len(shares._totals) <= 4096
    assert len(shares.top(["tier"])) == 20
    shares.check_integrity()


@settings(deadline=None, max_examples=60 if EVERY_CASE else 30)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.01, 0.4), st.integers(1, 6)),
        min_size=20,
        max_size=80,
    ),
    st.integers(1, 4),
)
def test_counters_of_waiting_tenants_differ_by_delta_and_the_work_in_seats(
    jobs: list[tuple[int, float, int]], num_seats: int
) -> None:
    """Four tenants always have requests waiting. A request is charged `cost` in each of its steps.
    One starts when a seat is free: the next of a tenant that is not ahead. The bound is that of
    docs/internals/deadlines.md: Delta plus the work of the requests in the seats."""
    shares = Shares()
    places = [shares.enter(0, f"t{number}") for number in range(4)]
    for place in places:
        shares.wait(place)
    seats: list[tuple[int, float, int]] = []
    for turn, job in enumerate(jobs):
        ahead = shares.are_ahead(DELTA_S)
        allowed = [place for place in places if ahead is None or not ahead[place]]
        assert allowed, "the least one is never ahead"
        if len(seats) < num_seats:
            greedy = places[job[0]]
            tenant = greedy if greedy in allowed else allowed[turn % len(allowed)]
            seats.append((tenant, job[1], job[2]))
        for tenant, cost, _ in seats:
            shares.charge(tenant, cost)
        seats = [(tenant, cost, left - 1) for tenant, cost, left in seats if left > 1]
        counters = [shares.counter_s(place) for place in places]
        most_in_seats = num_seats * 0.4 * 6
        assert max(counters) - min(counters) <= DELTA_S + most_in_seats + 1e-9


@pytest.mark.parametrize("num_tenants", [1, 63, 64, 65, 300])
def test_places_grow_and_are_used_again(num_tenants: int) -> None:
    shares = Shares()
    for _ in range(2):
        places = [shares.enter(0, f"t{number}") for number in range(num_tenants)]
        assert len(set(places)) == num_tenants
        for number, place in enumerate(places):
            shares.wait(place)
            shares.charge(place, float(number))
        shares.check_integrity()
        for place in places:
            shares.stop_waiting(place)
            shares.leave(place)
    assert len(shares._keys) == num_tenants
