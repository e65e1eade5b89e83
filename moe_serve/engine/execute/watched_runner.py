"""A pipeline in this process that is looked at: the stages of a step in sixteen."""

from __future__ import annotations

from torch import Tensor

from moe_serve.engine.execute.step_executor import StepRunner
from moe_serve.engine.execute.step_timeline import StepTimeline, step_timeline
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline import Stage, decode_records

WHY = "one process"


class WatchedRunner:
    """Implements StepRunner for another one, which writes its stages into `log`.

    In one process the experts work where rows would leave for them, so a dispatch is theirs.
    """

    def __init__(self, runner: StepRunner, log: StageLog) -> None:
        self._runner, self._log = runner, log
        self._num_steps = 0
        self._newest: tuple[int, bytes] | None = None  # replaced, never changed

    def run(self, plan: StepPlan) -> Tensor:
        self._log.begin(self._num_steps)
        logits = self._runner.run(plan)
        self._log.finish(sum(batch.num_tokens for batch in plan.micro_batches))
        if records := self._log.take():
            self._newest = (self._num_steps, records)
        self._num_steps += 1
        return logits

    def last_step(self) -> StepTimeline | None:
        """The newest that was recorded. On any thread."""
        if self._newest is None:
            return None
        number, packed = self._newest
        records = decode_records(packed).records.copy()
        records = records[records["step"] == number]  # not what a step left that failed
        records["stage"][records["stage"] == Stage.DISPATCH] = Stage.EXPERTS
        return step_timeline(number, {"process": records}, WHY)

    def clear_pages(self, pages: list[int]) -> None:
        self._runner.clear_pages(pages)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        self._runner.copy_pages(pairs)

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return self._runner.finite_pages(pages)
