"""The policies that a deployment can use (static, target and planned), and the oracle, a bound for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.cluster.autoscale.plan_table import PlanTable
from moe_serve.cluster.autoscale.rate_forecast import RateForecast, SeenRates
from moe_serve.cluster.autoscale.scale_view import CellCounts, ScaleView
from moe_serve.config.cells import CellRole

_PLANNED_REQUESTS = 100


class StaticPolicy:
    """Implements AutoscalePolicy: the same numbers of cells at all times."""

    name = "static"

    def __init__(self, counts: CellCounts) -> None:
        self._counts = counts

    def decide(self, view: ScaleView) -> CellCounts:
        return {role: self._counts[role] for role in view.roles}


class TargetPolicy:
    """Implements AutoscalePolicy: as many cells as bring the utilisation to a target, as the
    horizontal autoscaler of Kubernetes does. Within a tolerance of the target nothing changes."""

    name = "target"

    def __init__(self, target: float, tolerance: float = 0.1) -> None:
        self._target, self._tolerance = target, tolerance

    def decide(self, view: ScaleView) -> CellCounts:
        wanted: dict[CellRole, int] = {}
        for role, load in view.roles.items():
            ratio = load.utilisation / self._target
            is_near = abs(ratio - 1) <= self._tolerance
            count = load.num_serving if is_near else math.ceil(load.num_serving * ratio - 1e-9)
            wanted[role] = max(load.num_cells, count) if ratio > 1 else count
        return wanted


@dataclass(frozen=True, slots=True)
class TokenMeans:
    """The mean tokens of a request: those of its prompt that no cache had, and those of its
    answer.
    """

    prompt: float
    output: float


class PlannedPolicy:
    """Implements AutoscalePolicy: looks up in a plan table the cells for the largest of three
    rates: the forecast for the time when new cells serve, the rates seen lately, and the rate at
    which the requests in the cells must end before new cells serve."""

    name = "planned"

    def __init__(self, table: PlanTable, means: TokenMeans, caution: float = 2.0) -> None:
        """`means` are those of the plan. They count as much as 100 requests, because many of the
        first requests have arrived before their tokens are counted. `caution` is the number of
        standard deviations of the forecast's error that are added to it.
        """
        self._table, self._caution = table, caution
        self._forecast, self._seen = RateForecast(), SeenRates()
        per_request = (1.0, means.prompt, 1.0, means.output)
        self._sums = [_PLANNED_REQUESTS * each for each in per_request]  # as in `decide`

    def decide(self, view: ScaleView) -> CellCounts:
        self._forecast.observe(view.num_arrived / view.interval_s, view.at_s, view.interval_s)
        self._seen.observe(view.num_arrived, view.at_s, view.interval_s, view.horizon_s)
        seen = (view.num_arrived, view.prompt_tokens, view.num_ended, view.output_tokens)
        self._sums = [old + new for old, new in zip(self._sums, seen, strict=True)]
        arrived, prompt, ended, output = self._sums
        ahead, spread = self._forecast.predict(view.at_s + view.horizon_s)
        forecast = max(ahead, self._forecast.level) + self._caution * spread
        rate = max(forecast, self._seen.now, self._seen.bursts)
        means = prompt / arrived, output / ended
        return {
            role: self._table.cells_for(role, max(rate, load.num_requests / view.horizon_s), *means)
            for role, load in view.roles.items()
        }


Coming = Callable[[float, float], tuple[int, int, int]]


class OraclePolicy:
    """Implements AutoscalePolicy with the true future requests, which makes it a bound for the
    others. It uses the rate of the next minutes, and that of as many minutes after a cell that is
    started now would serve.
    """

    name = "oracle"

    def __init__(self, table: PlanTable, coming: Coming, span_s: float = 900.0) -> None:
        """`coming(a, b)` returns the requests that arrive from a to b, and the tokens of their
        prompts and answers. Rates are taken over `span_s`; over shorter times they are mostly
        chance.
        """
        self._table, self._coming, self._span_s = table, coming, span_s

    def decide(self, view: ScaleView) -> CellCounts:
        wanted: dict[CellRole, int] = dict.fromkeys(view.roles, 0)
        for begin_s in (view.at_s, view.at_s + view.horizon_s):
            num, prompt, output = self._coming(begin_s, begin_s + self._span_s)
            rate = num / self._span_s
            for role in wanted if num else ():
                count = self._table.cells_for(role, rate, prompt / num, output / num)
                wanted[role] = max(wanted[role], count)
        return wanted
