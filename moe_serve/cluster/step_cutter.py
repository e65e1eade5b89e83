"""Chooses each step's micro-batches for a cluster, and learns from what its ranks report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moe_serve.cluster.messages import StageSeconds
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.batch_load import BatchLoad
from moe_serve.pipeline.cost_model import Ranks, StageCosts
from moe_serve.pipeline.micro_batch_choice import Choice, MicroBatchChooser
from moe_serve.pipeline.online_costs import OnlineCosts, StepTiming


class StepCutter:
    """`choose` before a step, `observe` after it. Make a new one when the ranks change.

    `fixed`: this many micro-batches in every step that has so many sequences; None: as predicted.
    """

    def __init__(
        self,
        ranks: Ranks,
        num_sparse_layers: int,
        *,
        fixed: int | None = None,
        costs: StageCosts | None = None,
    ) -> None:
        self._fixed = fixed
        self._chooser = MicroBatchChooser(costs or OnlineCosts(num_sparse_layers), ranks)
        self._loads: list[BatchLoad] = []
        self.last = Choice(1, (), "one sequence")
        self.counts: Counter[tuple[int, str]] = Counter()  # steps by (m, reason), for metrics

    def choose(self, plans: Sequence[StepPlan]) -> int:
        """`plans`: of the attention ranks that have work, not cut yet."""
        if self._fixed is not None:
            most = max(len(plan.slices) for plan in plans)
            self.last = Choice(min(self._fixed, most), (), "configured")
        else:
            self._loads = [BatchLoad.of(plan.slices) for plan in plans]
            self.last = self._chooser.choose(self._loads)
        self.counts[self.last.num_micro_batches, self.last.reason] += 1
        return self.last.num_micro_batches

    def observe(
        self, seconds: float, attention: Sequence[StageSeconds], experts: Sequence[StageSeconds]
    ) -> None:
        """The step that was chosen for last went well, in its first attempt.

        `busy` of an attention rank: in its layers alone, without embedding, head and sampling;
        `waiting`: for the experts' sums. Ranks that report no times are passed over.
        """
        measured = [s for s in attention if s.busy > 0]
        served = [s.busy for s in experts if s.busy > 0]
        if self._fixed is not None or not measured or not served:
            return
        slowest = max(measured, key=lambda s: s.busy)
        timing = StepTiming(
            seconds=seconds,
            attention_s=slowest.busy,
            experts_s=max(served),
            wait_s=slowest.waiting,
        )
        self._chooser.observe(self._loads, self.last, timing)
