"""A policy that knows nothing of experts, with a predictor beside it that is measured, and tells an
expert memory what it expects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from moe_serve.engine.request.policy_stats import PolicyStats
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.arrival_order import ArrivalOrder
from moe_serve.engine.schedule.policy.concave_cost import Floats
from moe_serve.engine.schedule.policy.expected_experts import ExpectedExperts
from moe_serve.engine.schedule.policy.expert_aware import SignatureSource
from moe_serve.model.step_plan import MicroBatch, SequenceSlice


class Observed:
    """Implements BatchPolicy: does what `plain` does."""

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
        """Nothing to do."""

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
