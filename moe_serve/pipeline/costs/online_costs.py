"""Stage times measured in the running steps: a cost model that needs no calibration.

Each stage keeps an exponential average by the number of rows in a micro-batch. Nothing is assumed
about a machine; the first step runs with one micro-batch and is the first measurement.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepTiming
from moe_serve.pipeline.costs.step_seconds import LayerTimes

_WEIGHT = 0.2  # weight of a new measurement
_MOST_SLOWER = 1.25  # a new measurement counts as at most this times the average
_DRIFT = 0.05  # a change of an average that makes a new version
_GROWING = 0.5  # the share of an average that grows with the rows, outside the measured range
_LEAST_S = 1e-9


class RowAverages:
    """Seconds by number of rows: averages of measurements, interpolated linearly.

    Outside the measured range, half of the nearest average is taken as growing with the rows and
    the rest as fixed; the first measurement there replaces the estimate.
    """

    def __init__(self) -> None:
        self._rows: list[float] = []
        self._seconds: list[float] = []
        self._published: list[float] = []
        self.version = 0  # grows when an average is new or has moved by more than 5%

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def observe(self, rows: float, seconds: float) -> None:
        seconds = max(seconds, _LEAST_S)
        index = self._nearest(rows)
        if index is None:
            index = bisect.bisect(self._rows, rows)
            self._rows.insert(index, rows)
            self._seconds.insert(index, seconds)
            self._published.insert(index, seconds)
            self.version += 1
            return
        # a pause of the machine does not belong to the stage
        seconds = min(seconds, self._seconds[index] * _MOST_SLOWER)
        self._seconds[index] += _WEIGHT * (seconds - self._seconds[index])
        if abs(self._seconds[index] / self._published[index] - 1) > _DRIFT:
            self._published[index] = self._seconds[index]
            self.version += 1

    def seconds(self, rows: float) -> float:
        """Returns the seconds for a number of rows; 0 without rows."""
        assert self._rows, "no step has been measured yet"
        if rows <= 0:
            return 0.0
        right = bisect.bisect_left(self._rows, rows)
        if right == 0 or right == len(self._rows):
            edge = min(right, len(self._rows) - 1)
            return self._seconds[edge] * (1 + _GROWING * (rows / self._rows[edge] - 1))
        low, high = self._rows[right - 1], self._rows[right]
        share = (rows - low) / (high - low)
        return self._seconds[right - 1] * (1 - share) + self._seconds[right] * share

    def _nearest(self, rows: float) -> int | None:
        """Returns the index of the average for this number of rows (within a fifth), or None."""
        right = bisect.bisect_left(self._rows, rows)
        near = [i for i in (right - 1, right) if 0 <= i < len(self._rows)]
        distances = [(abs(math.log(self._rows[i] / rows)), i) for i in near]
        distance, index = min(distances, default=(math.inf, -1))
        return index if distance < 0.2 else None


class OnlineCosts:
    """T_a, T_e and T_c of one layout, as the mean over its layers. Implements StepCosts."""

    def __init__(self, num_layers: int) -> None:
        assert num_layers > 0, f"a pipeline of {num_layers} layers has nothing to measure"
        self._num_layers = num_layers
        self._attention, self._experts = RowAverages(), RowAverages()
        self._transfer, self._fixed = RowAverages(), RowAverages()

    @property
    def is_ready(self) -> bool:
        return not self._transfer.is_empty

    @property
    def version(self) -> int:
        """See `StepCosts.version`."""
        return self._attention.version + self._experts.version + self._transfer.version

    def observe(self, loads: Sequence[BatchLoad], num_parts: int, timing: StepTiming) -> None:
        """Adds a measured step.

        Transfers can be measured with one micro-batch only: the waiting time beyond the experts'
        time.
        """
        total = sum(load.num_rows for load in loads) / num_parts
        most = max(load.num_rows for load in loads) / num_parts
        num_stages = self._num_layers * num_parts
        self._attention.observe(most, timing.attention_s / num_stages)
        self._experts.observe(total, timing.experts_s / num_stages)
        rest_s = timing.seconds - timing.attention_s - timing.wait_s
        self._fixed.observe(total * num_parts, rest_s)
        if num_parts == 1:
            on_the_way_s = timing.wait_s - timing.experts_s
            self._transfer.observe(total, on_the_way_s / (2 * self._num_layers))

    def layer_times(
        self, micro_batches: Sequence[Sequence[BatchLoad]], ranks: Ranks
    ) -> tuple[LayerTimes, ...]:
        """See `StepCosts.layer_times`; `ranks` are those that were measured."""
        totals = [sum(load.num_rows for load in loads) for loads in micro_batches]
        most = [max(load.num_rows for load in loads) for loads in micro_batches]
        return (
            LayerTimes(
                num_layers=self._num_layers,
                attention_s=tuple(self._attention.seconds(rows) for rows in most),
                experts_s=tuple(self._experts.seconds(rows) for rows in totals),
                transfer_s=tuple(self._transfer.seconds(rows) for rows in totals),
            ),
        )

    def colocated_time(self, load: BatchLoad) -> float:
        """See `StepCosts.colocated_time`."""
        rows = load.num_rows
        layer_s = self._attention.seconds(rows) + self._experts.seconds(rows)
        return self._num_layers * layer_s + self.fixed_seconds([load])

    def fixed_seconds(self, loads: Sequence[BatchLoad]) -> float:
        return self._fixed.seconds(sum(load.num_rows for load in loads))
