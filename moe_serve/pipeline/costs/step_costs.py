"""The interface of cost models, which predict the time of a step from the loads of its ranks.

The choice of micro-batches, the planner of layouts and simulations read costs through `StepCosts`.
`StageCosts` implements it from a calibration, `OnlineCosts` from the running steps, and
`RooflineCosts` (`simulate/costs/`) from published figures of hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_serve.model.step_plan import SequenceSlice
from moe_serve.pipeline.costs.step_seconds import LayerTimes, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Rows of one attention rank, in a step or in one of its micro-batches.

    Keys are read once per sequence (bytes) and multiplied once per row (work). In decode both are
    the sum of the contexts; in prefill the second is far larger.
    """

    num_rows: int
    num_sequences: int
    num_kv_tokens: int  # sum of the sequences' contexts after the step
    num_pairs: int  # (row, key) pairs: sum of every row's own context
    num_largest: int  # rows of the sequence with the most rows

    @staticmethod
    def of(slices: Sequence[SequenceSlice]) -> BatchLoad:
        """Returns the load of slices. One that takes part in some layers counts as fewer rows that
        pass all layers."""
        return BatchLoad.of_parts(
            [s.key_start for s in slices],
            [
                len(s.token_ids) if s.layers is None else s.layers.rows(len(s.token_ids))
                for s in slices
            ],
        )

    @staticmethod
    def of_parts(starts: Sequence[int], counts: Sequence[int]) -> BatchLoad:
        """Returns the load of sequences by their first positions and numbers of rows."""
        num_rows, num_largest = sum(counts), max(counts, default=0)
        num_kv_tokens = num_pairs = sum(starts) + num_rows
        if num_largest > 1 or num_rows < len(counts):  # else each has one row
            parts = zip(starts, counts, strict=True)
            num_pairs = sum([count * start + count * (count + 1) // 2 for start, count in parts])
        return BatchLoad(
            num_rows=num_rows,
            num_sequences=len(counts),
            num_kv_tokens=num_kv_tokens,
            num_pairs=num_pairs,
            num_largest=num_largest,
        )

    @staticmethod
    def together(loads: Sequence[BatchLoad]) -> BatchLoad:
        """Returns the load of a step from those of its micro-batches."""
        return BatchLoad(
            num_rows=sum(load.num_rows for load in loads),
            num_sequences=sum(load.num_sequences for load in loads),
            num_kv_tokens=sum(load.num_kv_tokens for load in loads),
            num_pairs=sum(load.num_pairs for load in loads),
            num_largest=max((load.num_largest for load in loads), default=0),
        )

    @staticmethod
    def decode(num_sequences: int, context: int) -> BatchLoad:
        """Returns the load of a decode step: one row of each sequence."""
        num_kv_tokens = num_sequences * context
        return BatchLoad(
            num_rows=num_sequences,
            num_sequences=num_sequences,
            num_kv_tokens=num_kv_tokens,
            num_pairs=num_kv_tokens,
            num_largest=min(1, num_sequences),
        )

    def split(self, num_parts: int) -> tuple[BatchLoad, ...]:
        """Estimates the batcher's split: longest sequence first, into the smallest group.

        A sequence is never cut: one that is longer than its share gets a micro-batch of its own.
        """
        if num_parts == 1:
            return (self,)
        first = max(self.num_largest, -(-self.num_rows // num_parts))
        parts, rows, sequences = [], self.num_rows, self.num_sequences
        for left in range(num_parts, 0, -1):
            share = first if left == num_parts else -(-rows // left)
            is_alone = share == self.num_largest
            part_sequences = min(sequences, 1 if is_alone else -(-sequences // left))
            parts.append(self._part(min(share, rows), part_sequences))
            rows -= min(share, rows)
            sequences -= part_sequences
        return tuple(parts)

    def _part(self, rows: int, sequences: int) -> BatchLoad:
        return BatchLoad(
            num_rows=rows,
            num_sequences=sequences,
            num_kv_tokens=self.num_kv_tokens * sequences // max(1, self.num_sequences),
            num_pairs=self.num_pairs * rows // max(1, self.num_rows),
            num_largest=min(rows, self.num_largest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The numbers of attention ranks and expert ranks in a layout.

    `imbalance`: the busiest expert rank's share divided by the mean share; `is_router_on_experts`:
    the expert ranks choose experts, so rows go to all of them.
    """

    num_attention: int
    num_experts: int
    imbalance: float = 1.0
    is_router_on_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Durations of a step, as its ranks and the coordinator measured them; each a difference of one
    clock.

    With several ranks, the values of the one that computed longest.
    """

    seconds: float  # the whole step
    attention_s: float  # in the attention stages of all layers and micro-batches
    experts_s: float  # in the expert stages of all layers and micro-batches
    wait_s: float  # time an attention rank waited for the experts' sums


class StepCosts(Protocol):
    """Predicts the seconds of steps of one model on one kind of machine."""

    @property
    def is_ready(self) -> bool:
        """True if predictions can be made already."""
        ...

    @property
    def version(self) -> int:
        """A number that grows when predictions may have changed by more than a few percent."""
        ...

    def layer_times(
        self, micro_batches: Sequence[Sequence[BatchLoad]], ranks: Ranks
    ) -> tuple[LayerTimes, ...]:
        """Predicts the times of all layers. `micro_batches[j]` holds every attention rank's load in
        micro-batch j."""
        ...

    def fixed_seconds(self, loads: Sequence[BatchLoad]) -> float:
        """Predicts the seconds of a step outside its layers. `loads[a]` is the load of attention
        rank a."""
        ...

    def colocated_time(self, load: BatchLoad) -> float:
        """Predicts the seconds of a step on one device that has everything: no transfers and no
        overlap."""
        ...

    def observe(self, loads: Sequence[BatchLoad], num_parts: int, timing: StepTiming) -> None:
        """Learns from a step that ran with `num_parts` micro-batches."""
        ...


def step_time(
    costs: StepCosts, loads: Sequence[BatchLoad], num_micro_batches: int, ranks: Ranks
) -> float:
    """Predicts the seconds of a step; `loads[a]` is the load of attention rank a."""
    parts = list(zip(*(load.split(num_micro_batches) for load in loads), strict=True))
    return step_seconds(costs.layer_times(parts, ranks)) + costs.fixed_seconds(loads)
