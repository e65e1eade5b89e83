"""Autoscaling: what each policy wants, and how limits calm it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moe_serve.cluster.autoscale.autoscaler import Autoscaler, ScaleLimits
from moe_serve.cluster.autoscale.plan_table import CellRates, PlanTable, cells_ratio
from moe_serve.cluster.autoscale.policies import (
    OraclePolicy,
    PlannedPolicy,
    StaticPolicy,
    TargetPolicy,
    TokenMeans,
)
from moe_serve.cluster.autoscale.rate_forecast import RateForecast, SeenRates
from moe_serve.cluster.autoscale.scale_view import CellCounts, RoleLoad, ScaleView

TABLE = PlanTable(
    rates={"both": CellRates(prompt_tok_s=1000.0, output_tok_s=100.0)},
    most_load={"both": (0.5, 0.6, 0.7)},
)


def view(at_s: float = 60.0, *, arrived: int = 0, cells: int = 2, busy: float = 0.7,
         starting: int = 0) -> ScaleView:  # fmt: skip
    load = RoleLoad(num_serving=cells, num_starting=starting, num_draining=0, num_requests=0,
                    utilisation=busy)  # fmt: skip
    return ScaleView(at_s=at_s, interval_s=60.0, num_arrived=arrived, prompt_tokens=500 * arrived,
                     num_ended=arrived, output_tokens=50 * arrived, start_s=120.0,
                     roles={"both": load})  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "output", "ratio"),
    [(1155, 211, 1.62), (2048, 28, 21.7), (12035, 343, 10.4), (0.63 * 12035, 343, 6.6),
     (512, 256, 0.59)],
)  # fmt: skip
def test_the_ratio_of_published_loads(prompt: float, output: float, ratio: float) -> None:
    """DeepSeek's rates of a node, on Azure's conversations and code, Mooncake without and with its
    cache hits, and short prompts."""
    prefill = CellRates(prompt_tok_s=62_700, output_tok_s=None)
    decode = CellRates(prompt_tok_s=None, output_tok_s=18_600)
    assert cells_ratio(prompt, output, prefill, decode) == pytest.approx(ratio, rel=0.01)


def test_the_published_day_of_deepseek() -> None:
    """608 billion tokens in and 168 billion out at 73.7k and 14.8k tokens/s of a node take 226.9
    nodes; 226.75 were published."""
    prefill = CellRates(prompt_tok_s=73_700, output_tok_s=None)
    decode = CellRates(prompt_tok_s=None, output_tok_s=14_800)
    nodes = (prefill.seconds(608e9, 0) + decode.seconds(0, 168e9)) / 86_400
    assert nodes == pytest.approx(226.75, rel=0.05)


def test_a_table_fills_few_cells_less_than_many() -> None:
    """A request of 500 and 50 tokens takes a second of a cell."""
    counts = [
        TABLE.cells_for("both", rate, 500, 50) for rate in (0.0, 0.5, 0.6, 1.1, 2.0, 2.2, 6.9)
    ]
    assert counts == [1, 1, 2, 2, 3, 4, 10]


def test_target_scales_by_utilisation_and_not_near_the_target() -> None:
    policy = TargetPolicy(0.7)
    wanted = [policy.decide(view(cells=4, busy=busy))["both"] for busy in (0.0, 0.35, 0.68, 0.9)]
    assert wanted == [0, 2, 4, 6]
    assert policy.decide(view(cells=2, busy=1.4, starting=3))["both"] == 5, "they are on their way"


def test_a_forecast_follows_a_ramp_and_knows_its_error() -> None:
    forecast, far, near = RateForecast(), [], []
    for minute in range(1, 360):
        forecast.observe(0.01 * minute, 60.0 * minute, 60.0)
        far.append(forecast.predict(60.0 * minute + 600)[0] - 0.01 * (minute + 9.5))
        near.append(forecast.predict(60.0 * minute + 600)[1])
    assert abs(far[-1]) < 0.05, "ten minutes ahead, of a rate of 2.5"
    assert near[-1] < near[60] < 0.3
    flat = RateForecast()
    assert flat.predict(60.0) == (0.0, 0.0)


def test_planned_starts_cells_before_a_ramp_needs_them() -> None:
    """At 2.08 requests per second and rising the table says 3; in three minutes it says 4."""
    policy = PlannedPolicy(TABLE, TokenMeans(500, 50), caution=0.0)
    for minute in range(1, 251):
        wanted = policy.decide(view(60.0 * minute, arrived=minute // 2))["both"]
    assert TABLE.cells_for("both", 2.08, 500, 50) == 3 < wanted


def test_planned_sees_a_sudden_load_as_soon_as_target_does() -> None:
    """After an idle hour 2 requests come in a second, for which the table has 3 cells. They are
    wanted after the first interval, and for an hour after the load has gone."""
    planned, target = PlannedPolicy(TABLE, TokenMeans(500, 50)), TargetPolicy(0.7)
    for minute in range(1, 61):
        assert planned.decide(view(60.0 * minute, cells=1, busy=0.0))["both"] <= 1
    loaded = view(61 * 60.0, arrived=120, cells=1, busy=1.6)
    assert planned.decide(loaded)["both"] == 3 == target.decide(loaded)["both"]
    later = [planned.decide(view(60.0 * m, cells=3, busy=0.0))["both"] for m in range(62, 240)]
    assert later[:59] == [3] * 59 and later[-1] == 1


def test_planned_counts_requests_that_wait() -> None:
    """300 requests of a second each that wait must end within the 180 s until new cells serve."""
    load = RoleLoad(
        num_serving=1, num_starting=0, num_draining=0, num_requests=300, utilisation=9.0
    )
    waiting = replace(view(arrived=1), roles={"both": load})
    assert PlannedPolicy(TABLE, TokenMeans(500, 50)).decide(waiting)["both"] == 3


def test_chance_adds_no_cells_and_rare_bursts_are_not_kept() -> None:
    """At 0.5 requests/s a third of the minutes have 6 requests more or fewer, which is chance. A
    minute with 1 of 25 requests is a burst that is not kept for an hour."""
    seen = SeenRates()
    for minute in range(1, 61):
        seen.observe((24, 30, 36)[minute % 3], 60.0 * minute, 60.0, 180.0)
        assert seen.now < 0.5 and seen.bursts < 0.5
    seen.observe(72, 61 * 60.0, 60.0, 180.0)
    assert seen.now == pytest.approx((72 - 2 * math.sqrt(72)) / 60) and seen.bursts < 0.5


def test_the_oracle_starts_cells_for_what_comes_while_they_start() -> None:
    """From 300 s on 2 requests come in a second. A cell that starts at 120 s serves one interval
    later than 240 s."""

    def coming(begin_s: float, end_s: float) -> tuple[int, int, int]:
        count = round(2 * max(0.0, end_s - max(300.0, begin_s)))
        return count, 500 * count, 50 * count

    policy = OraclePolicy(TABLE, coming, span_s=60.0)
    assert [policy.decide(view(at))["both"] for at in (60.0, 90.0, 120.0)] == [0, 2, 3]


class Wishes:
    """Implements AutoscalePolicy from a list."""

    name = "wishes"

    def __init__(self, counts: list[int]) -> None:
        self._counts = iter(counts)

    def decide(self, view: ScaleView) -> CellCounts:
        return {"both": next(self._counts)}


def test_cells_are_added_at_once_and_removed_calmly_within_limits() -> None:
    limits = ScaleLimits(min_cells=2, max_cells={"both": 6}, calm_s=180.0)
    scaler = Autoscaler(Wishes([9, 1, 1, 1, 1, 1, 6]), limits)
    now, seen = 3, []
    for minute in range(1, 8):
        now = scaler.wanted(view(60.0 * minute, cells=now))["both"]
        seen.append(now)
    assert seen == [6, 6, 6, 2, 2, 2, 6], "the third change of an hour only adds"


def test_no_hour_has_more_changes_than_allowed() -> None:
    limits = ScaleLimits(min_cells=1, max_cells={"both": 100}, calm_s=0.0)
    scaler, now, at = Autoscaler(Wishes([1 + n % 50 for n in range(1000)]), limits), 1, []
    for minute in range(1, 1000):
        wanted = scaler.wanted(view(60.0 * minute, cells=now))["both"]
        if wanted != now:
            at.append(minute)
        now = wanted
    assert max(sum(t - 60 < other <= t for other in at) for t in at) == 4
    assert len(at) > 40 and math.isclose(Autoscaler(StaticPolicy({"both": 3}), limits).first(
        view())["both"], 3)  # fmt: skip
