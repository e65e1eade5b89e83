"""The policies that ignore experts: `fifo` and `balanced`. A predictor may run beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.stats import PolicyName, PolicyStats
from moe_serve.engine.schedule.policy.concave_cost import Floats
from moe_serve.engine.schedule.policy.expected_experts import ExpectedExperts
from moe_serve.engine.schedule.policy.longest_first import split, split_evenly
from moe_serve.engine.schedule.policy.policy import SignatureSource
from moe_serve.model.step_plan import MicroBatch, SequenceSlice


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """Starts requests in order of arrival. Implements BatchPolicy."""

    name: PolicyName
    splitter: Callable[[list[SequenceSlice], int], tuple[MicroBatch, ...]]

    def prepare(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Does nothing."""

    def candidates(
        self, waiting: Iterable[Sequence], running: Items[Sequence]
    ) -> Iterable[Sequence]:
        """Returns the waiting sequences in order of arrival."""
        return waiting

    def is_next(self, sequence: Sequence) -> bool:
        """Returns True, because no sequence starts before an earlier one."""
        return True

    def started(self, sequence: Sequence) -> None:
        """Does nothing."""

    def split(self, slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
        return self.splitter(slices, max_micro_batches)

    def needed(self, slices: list[SequenceSlice]) -> None:
        """Returns None, because the policy knows no experts."""

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Does nothing, because the policy keeps no state."""

    def stats(self) -> PolicyStats:
        return PolicyStats(policy=self.name)


class Observed:
    """Implements BatchPolicy like `plain`. Meanwhile a predictor is measured, and tells an expert
    memory which experts it expects.
    """

    def __init__(
        self,
        plain: ArrivalOrder,
        source: SignatureSource,
        window: int,
        expected: ExpectedExperts | None = None,
    ) -> None:
        self._plain, self._source, self._window = plain, source, window
        self._expected = expected

    def prepare(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """See `BatchPolicy.prepare`."""
        self._source.refresh(list(itertools.islice(waiting, self._window)), running)

    def candidates(self, waiting: Items[Sequence], running: Items[Sequence]) -> Iterable[Sequence]:
        return self._plain.candidates(waiting, running)

    def is_next(self, sequence: Sequence) -> bool:
        return self._plain.is_next(sequence)

    def started(self, sequence: Sequence) -> None:
        """Does nothing."""

    def split(self, slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
        return self._plain.split(slices, max_micro_batches)

    def needed(self, slices: list[SequenceSlice]) -> Floats | None:
        """See `BatchPolicy.needed`."""
        return None if self._expected is None else self._expected.of(slices)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._source.forget(sequence_ids)

    def stats(self) -> PolicyStats:
        source = self._source
        return replace(
            self._plain.stats(),
            recall=source.recall,
            is_predictor_on=source.is_on,
            num_learnt=source.num_learnt,
        )


FIFO = ArrivalOrder("fifo", split)
BALANCED = ArrivalOrder("balanced", split_evenly)
