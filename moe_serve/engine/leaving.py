"""Ends the sequences of an engine: at once, or when the step that computes them has ended."""

from __future__ import annotations

from collections.abc import Sequence as Items
from collections.abc import Set

from moe_serve.engine.execute.step_executor import StepExecutor
from moe_serve.engine.execute.step_outcome import RowFailure, StepOutcome
from moe_serve.engine.request.request import TokenDelta
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.scheduler import Scheduler
from moe_serve.engine.schedule.step_drafts import StepDrafts


class LeavingSequences:
    """Ends sequences, and keeps those that ended while a step still computes them.

    Callers have forgotten the requests before: their ids may be used again.
    """

    def __init__(self, scheduler: Scheduler, drafts: StepDrafts, executor: StepExecutor) -> None:
        self._scheduler, self._drafts, self._executor = scheduler, drafts, executor
        self._has_failed: dict[int, bool] = {}  # by sequence id

    def __bool__(self) -> bool:
        return bool(self._has_failed)

    @property
    def ids(self) -> Set[int]:
        return self._has_failed.keys()

    def staying(self, schedule: Schedule) -> Schedule:
        """Returns the part of a step whose sequences have not ended."""
        return {key: item for key, item in schedule.items() if key not in self._has_failed}

    def forget(self, sequences: Items[Sequence]) -> None:
        """Drops all of an engine's sequences, as their pages are lost."""
        self._has_failed = {}
        self._drafts.forget(sequences)
        self._scheduler.cache.listener.cleared()

    def end(self, sequences: Items[Sequence], schedule: Schedule) -> None:
        """Ends sequences that are complete or aborted. Those in the running step, `schedule`, are
        removed when it ends."""
        if not sequences:
            return
        self._drafts.finish(sequences)
        self._has_failed |= {s.id: False for s in sequences if s.id in schedule}
        self._remove([s for s in sequences if s.id not in self._has_failed])

    def fail(self, sequence: Sequence, failure: RowFailure, schedule: Schedule) -> TokenDelta:
        """Ends one request with an error. Its pages are zeroed before they are used again."""
        if sequence.id in schedule:
            self._has_failed[sequence.id] = True
        else:
            self._discard(sequence)
        return failure.delta_of(sequence)

    def release(self, schedule: Schedule, left: Schedule, outcome: StepOutcome | Exception) -> None:
        """Removes the sequences of an ended step, except those in `left`. If the last token of one
        was not valid, its last pages may hold NaNs."""
        done = {key: item for key, item in schedule.items() if key not in left}
        self._drafts.give_back(done, done.keys())
        ended = [sequence for sequence, _ in done.values()]
        for sequence in ended:
            if not (isinstance(outcome, StepOutcome) and outcome.is_sound(sequence.id)):
                sequence.is_proven = False
        has_failed = [s for s in ended if self._has_failed.pop(s.id)]
        for sequence in has_failed:
            self._discard(sequence)
        self._remove([s for s in ended if s not in has_failed])

    def _remove(self, sequences: list[Sequence]) -> None:
        self._scheduler.remove(sequences)
        self._drafts.forget(sequences)
        self._executor.forget([s.id for s in sequences])

    def _discard(self, sequence: Sequence) -> None:
        self._scheduler.discard(sequence)
        self._drafts.forget([sequence])
        self._executor.clear_pages(self._scheduler.take_unproven_pages())
        self._executor.forget([sequence.id])
