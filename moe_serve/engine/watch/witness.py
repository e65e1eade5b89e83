"""Who knows what an engine is at, for the report of a hang. Asked on any thread, at any time."""

from __future__ import annotations

from typing import Protocol

from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.pipeline.timeline.stage_log import StageLog


class Witness(Protocol):
    def testify(self) -> list[str]:
        """Lines for people: the step at hand, and what each rank is at. May take a second."""
        ...


class LocalWitness:
    """Of an engine in one process."""

    def __init__(self, executor: LocalExecutor, log: StageLog) -> None:
        self._executor, self._log = executor, log

    def testify(self) -> list[str]:
        plan, operation = self._executor.plan, self._log.operation
        if plan is None:
            return ["no step was begun yet"]
        num_tokens = sum(batch.num_tokens for batch in plan.micro_batches)
        lines = [
            f"the last step plan: {len(plan.slices)} sequences, {num_tokens} tokens, "
            f"{len(plan.micro_batches)} micro-batches"
        ]
        if operation is not None:
            lines.append(f"the last stage: {operation}, begun {operation.seconds:.1f} s ago")
        return lines
