"""Forecasts and refusals from snapshots of a queue."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.request.service_terms import Service, Targets
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.service.arrivals import RecentArrivals
from moe_serve.engine.service.forecast import QueueSnapshot
from moe_serve.engine.service.forecast_calibration import Factors, ForecastCalibration, error_of
from moe_serve.engine.service.near_steps import Remaining, Survival
from moe_serve.engine.service.order import StartOrder, rule_of

EDF = StartOrder(rule_of(SchedulerConfig(order="edf"), lambda: 0.1), 90.0, "keep")
# A step of 10 ms reads 10 prompt tokens.
IDLE = QueueSnapshot(turn=1, token_s=0.001, step_s=0.01, budget=10.0, num_free_seats=4, seat_s=0.5)
STRICT = Service(tier="a", targets=Targets(ttft_s=1.0, is_strict=True))


def reading(num_tokens: int, key: float = -math.inf) -> dict[str, Any]:
    """Returns the fields of a snapshot in which one prompt is being read."""
    return {"reading_keys": np.array([key]), "reading_left": np.array([float(num_tokens)])}


def admission(ratio: float = 1.0) -> Admission:
    return Admission(EDF, 5.0, 90.0, lambda tier, raw_s: Factors(1.0, ratio, ratio), lambda: 0.0)


def test_nothing_is_forecast_or_refused_before_a_step_was_measured() -> None:
    made = admission()
    assert made.forecast(STRICT, 10_000) is None and made.check(STRICT, 10_000) is None


def test_an_idle_engine_takes_the_time_of_the_prompt() -> None:
    made = admission(1.5)
    made.publish(0, IDLE)
    found = made.forecast(STRICT, 400)
    assert found is not None
    assert found.predicted_s == pytest.approx(0.4) and found.p90_s == pytest.approx(0.6)
    short = made.forecast(STRICT, 1)
    assert short is not None and short.predicted_s == 0.01, "at least a step"


def test_only_what_is_more_urgent_counts() -> None:
    """Two requests wait with deadlines of 0.5 s and 3 s. The new one is due in 1 s and passes the
    second."""
    made = admission()
    queue = replace(IDLE, keys=np.array([0.5, 3.0]), num_left=np.array([200.0, 5000.0]))
    made.publish(0, replace(queue, **reading(100)))
    found = made.forecast(STRICT, 400)
    assert found is not None and found.predicted_s == pytest.approx(0.7)
    relaxed = replace(STRICT, targets=Targets(ttft_s=9.0))
    found = made.forecast(relaxed, 400)
    assert found is not None and found.predicted_s == pytest.approx(5.7)
    shifted = made.forecast(STRICT, 400, priority=1)
    assert shifted is not None and shifted.predicted_s == pytest.approx(5.7), "5 s for a level"


def test_a_prompt_that_is_being_read_yields_to_a_more_urgent_one() -> None:
    made = admission()
    made.publish(0, replace(IDLE, **reading(5000, key=30.0)))
    found = made.forecast(STRICT, 400)
    assert found is not None and found.predicted_s == pytest.approx(0.4)


def test_a_seat_is_waited_for() -> None:
    made = admission()
    queue = replace(IDLE, num_free_seats=0, keys=np.array([0.1, 0.2]), num_left=np.ones(2))
    made.publish(0, queue)
    found = made.forecast(STRICT, 100)
    assert found is not None and found.predicted_s == pytest.approx(3 * 0.5 + 0.1)


def test_a_snapshot_ages_by_the_steps_that_were_begun_since() -> None:
    """The only seat is free after 8 more steps. Three of them have begun since the snapshot."""
    remaining = Remaining(np.array([2.0]), np.array([10.0]), Survival(np.zeros(0), np.zeros(0)))
    queue = replace(IDLE, num_free_seats=0, remaining=remaining, usual_step_s=0.01)
    made = admission()
    made.publish(0, queue)
    fresh = made.raw_s(STRICT, 5)
    for _ in range(3):
        made.step_begun(0, 0.0, 0.0, is_ahead=False)
    aged = made.raw_s(STRICT, 5)
    assert fresh is not None and aged == pytest.approx(fresh - 3 * 0.01)
    made.publish(0, queue)
    assert made.raw_s(STRICT, 5) == fresh, "a new snapshot is of now"


def test_an_older_snapshot_has_read_on_and_its_queue_is_more_urgent() -> None:
    """Two steps of 10 tokens read the more urgent of two prompts and a part of the other one."""
    queue = replace(
        IDLE,
        usual_step_s=0.01,
        reading_keys=np.array([5.0, 1.0]),
        reading_left=np.array([30.0, 12.0]),
        keys=np.array([2.0, -1.0]),
        floors=np.array([-9.0, -1.0]),
        num_left=np.ones(2),
    )
    later = queue.after(2)
    assert later.reading_left.tolist() == [22.0, 0.0]
    assert later.keys.tolist() == pytest.approx([1.98, -1.0])
    assert queue.after(0) is queue


def test_those_that_wait_without_a_seat_fill_no_steps() -> None:
    """A less urgent prompt of 1 000 tokens makes the step of a short one longer, if it has a seat
    in it."""
    queue = replace(IDLE, more_s=0.001, keys=np.array([50.0]), num_left=np.array([1000.0]))
    found = {}
    for num_free_seats in (1, 2):
        made = admission()
        made.publish(0, replace(queue, num_free_seats=num_free_seats))
        found[num_free_seats] = made.raw_s(STRICT, 4)
    assert found == {1: pytest.approx(0.01 + 4 * 0.001), 2: pytest.approx(0.01 + 10 * 0.001)}


def test_arrivals_that_will_go_first_are_foreseen() -> None:
    """Half of the engine's time goes to later, more urgent requests, so 10 s become 20 s."""
    arrivals = RecentArrivals()
    for number in range(64):
        arrivals.note(number * 0.1, -100.0, 50)
    queue = replace(IDLE, **reading(10_000), arrivals=arrivals.rates)
    made = admission()
    made.publish(0, replace(queue, num_free_seats=1000))
    relaxed = Service(tier="a", targets=Targets(ttft_s=80.0))
    found = made.forecast(relaxed, 10)
    assert found is not None and found.predicted_s == pytest.approx(20.0, rel=0.25)
    urgent = Service(tier="a", targets=Targets(ttft_s=-200.0))
    found = made.forecast(urgent, 10)
    assert found is not None and found.predicted_s == pytest.approx(10.0, rel=0.25)


def test_a_strict_request_is_refused_with_an_honest_time_to_come_back() -> None:
    made = admission(1.5)
    made.publish(0, replace(IDLE, **reading(2000)))
    refusal = made.check(STRICT, 100)
    assert refusal is not None and made.num_refused("a") == 1
    assert refusal.predicted_ttft_s == pytest.approx(2.1 * 1.5) and refusal.target_ttft_s == 1.0
    later = replace(IDLE, **reading(2000 - math.ceil(refusal.retry_after_s / 0.001)))
    made.publish(0, later)
    assert made.check(STRICT, 100) is None, "the work of that time is done"


def test_a_refusal_never_says_to_come_back_at_once() -> None:
    made = admission()
    made.publish(0, replace(IDLE, **reading(901)))
    refusal = made.check(STRICT, 100)
    assert refusal is not None and refusal.retry_after_s == 0.1


def test_a_target_of_the_whole_answer_refuses_when_the_first_token_is_later() -> None:
    made = admission()
    flex = Service(tier="flex", targets=Targets(e2e_s=5.0), is_sheddable=True)
    made.publish(0, replace(IDLE, **reading(4000)))
    assert made.check(flex, 400) is None, "after 4.4 s"
    made.publish(0, replace(IDLE, **reading(8000)))
    refused = made.check(flex, 400)
    assert refused is not None and refused.target_ttft_s == 5.0


def test_requests_that_may_be_late_are_not_refused() -> None:
    made = admission()
    made.publish(0, replace(IDLE, **reading(10**6)))
    assert made.check(Service(tier="a", targets=Targets(ttft_s=1.0)), 100) is None
    assert made.check(Service(tier="a", is_sheddable=True), 100) is None, "it has no target"
    sheddable = Service(tier="a", targets=Targets(ttft_s=1.0), is_sheddable=True)
    assert made.check(sheddable, 100) is not None


def test_accepted_requests_count_until_they_are_in_a_snapshot() -> None:
    made = admission()
    made.publish(0, IDLE)
    accepted = [made.check(STRICT, 300) is None for _ in range(5)]
    assert accepted == [True, True, True, False, False], "the fourth would take 1.2 s"
    made.publish(0, replace(IDLE, turn=2))
    assert made.check(STRICT, 300) is not None, "they may still be in the inbox"
    made.publish(0, replace(IDLE, turn=3))
    assert made.check(STRICT, 300) is None


def test_accepted_requests_that_are_less_urgent_do_not_count() -> None:
    made = admission()
    made.publish(0, IDLE)
    relaxed = replace(STRICT, targets=Targets(ttft_s=50.0, is_strict=True))
    for _ in range(6):
        assert made.check(relaxed, 1000) is None
    found = made.forecast(STRICT, 400)
    assert found is not None and found.predicted_s == pytest.approx(0.4), "it passes them all"
    found = made.forecast(relaxed, 400)
    assert found is not None and found.predicted_s == pytest.approx(6.4)


def test_a_request_is_judged_by_the_forecast_with_which_it_was_accepted() -> None:
    """It reaches the engine after turn 1, so the snapshot of turn 2 includes it."""
    made = admission()
    made.publish(0, IDLE)
    assert made.check(STRICT, 300) is None and made.check(STRICT, 300) is None
    assert made.entered(1, 300) == pytest.approx(0.3), "not its own tokens on top of itself"
    assert made.entered(1, 300) == pytest.approx(0.6)
    assert made.entered(1, 300) is None and made.entered(1, 7) is None, "no more were accepted"
    assert made.raw_s(STRICT, 300) == pytest.approx(0.9)
    made.publish(0, replace(IDLE, turn=2))
    assert made.raw_s(STRICT, 300) == pytest.approx(0.3), "the queue has them now"


def test_prompts_are_taken_to_be_cached_as_the_recent_ones_were() -> None:
    made = admission()
    made.publish(0, replace(IDLE, uncached=0.25))
    assert made.raw_s(STRICT, 4000) == pytest.approx(1.0)
    assert made.check(STRICT, 2000) is None
    assert made.raw_s(STRICT, 4000) == pytest.approx(1.5), "also those just accepted"


def test_the_step_under_way_ends_first_and_a_short_prompt_takes_a_whole_step() -> None:
    made = admission()
    made.publish(0, replace(IDLE, step_s=0.1, more_s=0.0005, budget=1000.0))
    made.step_begun(0, 7.0, 0.05, is_ahead=False)
    assert made.raw_s(STRICT, 20, at_s=7.01) == pytest.approx(0.04 + 0.1 + 0.01)
    assert made.raw_s(STRICT, 1020, at_s=7.01) == pytest.approx(0.04 + 2 * 0.1 + 0.51), "two steps"
    assert made.raw_s(STRICT, 20, at_s=9.0) == pytest.approx(0.11), "no step is under way"
    made.step_begun(0, 7.03, 0.05, is_ahead=True)
    assert made.raw_s(STRICT, 20, at_s=7.05) == pytest.approx(0.05 + 0.11), "it begins at 7.05"


def test_a_newcomer_passes_those_that_cannot_become_more_urgent() -> None:
    """A request with 5 s of work keeps the key 0.5. The new request has 1.0, which falls."""
    made = admission()
    queue = replace(IDLE, keys=np.array([0.5]), num_left=np.array([5000.0]))
    made.publish(0, replace(queue, floors=np.array([-math.inf])))
    assert made.raw_s(STRICT, 400) == pytest.approx(5.4)
    made.publish(0, replace(queue, floors=np.array([0.5])))
    raw_s = made.raw_s(STRICT, 400)
    assert raw_s is not None and 0.4 < raw_s < 2.0


def test_the_rank_with_the_earliest_first_token_counts() -> None:
    made = admission()
    made.publish(0, replace(IDLE, **reading(5000)))
    made.publish(1, replace(IDLE, **reading(200)))
    found = made.forecast(STRICT, 100)
    assert found is not None and found.predicted_s == pytest.approx(0.3)
    made.withdraw(1)
    found = made.forecast(STRICT, 100)
    assert found is not None and found.predicted_s == pytest.approx(5.1)


def test_the_cautious_factor_covers_nine_of_ten_and_the_median_is_right() -> None:
    """The raw forecast is four times too long, with a wide scatter."""
    rng, calibration = np.random.default_rng(0), ForecastCalibration()
    assert calibration.factors(4.0) == Factors()
    for actual in rng.lognormal(0.0, 0.6, 600):
        calibration.compare(4.0, float(actual))
    fresh, factors = rng.lognormal(0.0, 0.6, 4000), calibration.factors(4.0)
    assert 0.8 < (fresh <= 4.0 * factors.p90).mean() < 0.98
    assert 0.35 < (fresh <= 4.0 * factors.median).mean() < 0.65
    error = error_of([calibration])
    assert error.num_compared == 600 and error.median_error < 0.5, "without correction it is 3"


def test_a_forecast_is_corrected_by_those_that_predicted_nearly_the_same() -> None:
    """Short waits are twice as long as predicted, long ones half as long."""
    calibration = ForecastCalibration()
    for _ in range(120):
        calibration.compare(0.1, 0.2)
        calibration.compare(10.0, 5.0)
    assert calibration.factors(0.12) == Factors(2.0, 2.0, 2.0)
    assert calibration.factors(8.0) == Factors(0.5, 0.5, 0.5)


def test_broken_promises_make_refusals_more_cautious() -> None:
    calibration = ForecastCalibration()
    for _ in range(20):
        calibration.promise(is_kept=False)
    assert calibration.caution == 0.9, "nine of ten accepted ones will be kept"
    for _ in range(1000):
        calibration.promise(is_kept=True)
    assert calibration.caution == 0.1, "only if nine of ten would miss is one refused"
    for number in range(4000):
        calibration.promise(is_kept=number % 20 != 0)
    assert calibration.caution > 0.8, "a twentieth of them is broken, which is too many"


def test_requests_that_waited_in_vain_are_not_forgotten() -> None:
    calibration = ForecastCalibration()
    for _ in range(32):
        calibration.compare_at_least(0.5, 2.0)
    assert calibration.factors(0.5).median >= 4.0 and not calibration.errors


def test_a_closed_cell_promises_nothing() -> None:
    made = admission()
    made.publish(0, replace(IDLE, cell=1, **reading(5000)))
    made.publish(1, replace(IDLE, cell=2, **reading(200)))
    assert made.raw_s(STRICT, 100) == pytest.approx(0.3)
    made.set_open(2, is_open=False)
    assert made.raw_s(STRICT, 100) == pytest.approx(5.1)
    made.set_open(1, is_open=False)
    assert made.raw_s(STRICT, 100) == pytest.approx(0.3), "none is open, and they are used"
    made.remove_cell(2)
    assert made.raw_s(STRICT, 100) == pytest.approx(5.1)


def test_an_engine_that_drains_promises_nothing() -> None:
    """Two attention ranks of one cell, of which one drains, and is lost then."""
    made = admission()
    made.publish(0, replace(IDLE, cell=1, **reading(5000)))
    made.publish(1, replace(IDLE, cell=1, **reading(200)))
    made.set_engine_open(1, is_open=False)
    assert made.raw_s(STRICT, 100) == pytest.approx(5.1)
    made.withdraw(1)
    made.publish(1, replace(IDLE, cell=1, **reading(200)))
    assert made.raw_s(STRICT, 100) == pytest.approx(0.3)


def test_an_accepted_request_counts_in_the_cell_that_it_has_entered() -> None:
    """Cell 1 ends many steps while cell 2, which has the request, ends none."""
    made = admission()
    busy = replace(IDLE, cell=1, **reading(5000))
    made.publish(0, busy)
    made.publish(1, replace(IDLE, cell=2))
    assert made.check(STRICT, 400) is None
    assert made.raw_s(STRICT, 300) == pytest.approx(0.5), "it may come to either"
    made.entered(1, 400, cell=2)
    for turn in range(2, 9):
        made.publish(0, replace(busy, turn=turn))
        assert made.raw_s(STRICT, 300) == pytest.approx(0.7)
    made.publish(1, replace(IDLE, cell=2, turn=9, **reading(400)))
    assert made.raw_s(STRICT, 300) == pytest.approx(0.7), "once, and not twice"
