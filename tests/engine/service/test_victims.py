"""Victims: the cheapest for pages, and for an urgent request only where it pays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moe_serve.engine.service.victims import Candidate, Newcomer, cheapest, for_urgent

FREE = Candidate(weight=1.0, slack_s=math.inf, again_s=0.1, num_pages=10, num_left=100)
URGENT = Newcomer(weight=4.0, slack_s=0.5, num_steps=2)
SEAT_S = 3.0


def test_the_cost_is_the_added_lateness_and_the_time_to_compute_it_again() -> None:
    late_soon = replace(FREE, weight=4.0, slack_s=1.0)
    assert late_soon.cost(2.0) == pytest.approx(4.0 * (2.0 + 0.1 - 1.0) + 0.1)
    assert replace(late_soon, slack_s=-9.0).cost(2.0) == pytest.approx(4.0 * 2.1 + 0.1), (
        "one that is late already becomes later by the whole delay"
    )
    assert FREE.cost(2.0) == pytest.approx(0.1), "without a target nothing is late"


def test_pages_come_from_the_one_that_costs_least_for_each() -> None:
    """The largest prompt costs most in all, but least for a page."""
    small, large = replace(FREE, num_pages=1), replace(FREE, again_s=0.5, num_pages=10)
    promised = replace(FREE, weight=4.0, slack_s=0.0)
    assert cheapest([small, large, promised], 1.0) == 1
    assert cheapest([FREE, FREE, FREE], 1.0) == 2, "equal ones: the one that started last"


@pytest.mark.parametrize(
    ("newcomer", "victim", "is_chosen"),
    [
        (URGENT, FREE, True),
        (replace(URGENT, slack_s=-0.1), FREE, False),  # it is late anyway
        (replace(URGENT, slack_s=3.0), FREE, False),  # it has time to wait
        (URGENT, replace(FREE, slack_s=3.05), False),  # the victim would miss its own target
        (URGENT, replace(FREE, slack_s=3.2), True),
        (URGENT, replace(FREE, again_s=6.66), True),  # gain 4 x 2.5 = 10, 1.5 x 6.66 = 9.99
        (URGENT, replace(FREE, again_s=6.67), False),
        (URGENT, replace(FREE, num_urgent_preemptions=2), False),
        (URGENT, replace(FREE, num_left=2), False),  # it ends before the newcomer has its token
        (URGENT, replace(FREE, num_left=3), True),
    ],
)
def test_a_seat_changes_hands_only_where_it_pays(
    newcomer: Newcomer, victim: Candidate, is_chosen: bool
) -> None:
    assert for_urgent(newcomer, [(7, victim)], SEAT_S) == (7 if is_chosen else None)


def test_the_cheapest_gives_its_seat() -> None:
    running = [(1, replace(FREE, again_s=0.5)), (2, FREE), (3, replace(FREE, again_s=0.3))]
    assert for_urgent(URGENT, running, SEAT_S) == 2
