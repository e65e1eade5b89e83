"""The policies that know nothing of experts: `fifo` and `balanced`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from moe_serve.engine.request.policy_stats import PolicyName, PolicyStats
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.longest_first import split, split_evenly
from moe_serve.model.step_plan import MicroBatch, SequenceSlice


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """Requests start as they come. Implements BatchPolicy."""

    name: PolicyName
    splitter: Callable[[list[SequenceSlice], int], tuple[MicroBatch, ...]]

    def prepare(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Nothing to do."""

    def candidates(
        self, waiting: Iterable[Sequence], running: Items[Sequence]
    ) -> Iterable[Sequence]:
        """In order of arrival."""
        return waiting

    def is_next(self, sequence: Sequence) -> bool:
        """Nobody starts before one that came earlier."""
        return True

    def started(self, sequence: Sequence) -> None:
        """Nothing to do."""

    def split(self, slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
        return self.splitter(slices, max_micro_batches)

    def needed(self, slices: list[SequenceSlice]) -> None:
        """Nothing is known of experts."""

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Nothing is kept."""

    def stats(self) -> PolicyStats:
        return PolicyStats(policy=self.name)


FIFO = ArrivalOrder("fifo", split)
BALANCED = ArrivalOrder("balanced", split_evenly)
