"""Executes the engine's steps: takes a plan and returns sampled tokens.

In one process `LocalExecutor` does it with a pipeline and a sampler. With separate attention ranks
each rank has such an executor, and the engine holds one that sends the plan there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.memory.memory_stats import MemoryStats
from moe_serve.engine.drafting.draft import NO_PROPOSALS, Proposals
from moe_serve.engine.execute.step_drafter import StepDrafter
from moe_serve.engine.execute.step_outcome import NAN, RowFailure, StepOutcome
from moe_serve.engine.execute.step_timeline import StepWatch
from moe_serve.engine.execute.verify import Verified, plain_points, verify
from moe_serve.engine.request.request import TokenLogprob
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.answer_masks import AnswerMasks, MaskCost
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.engine.sampling.sampling_backend import SamplingBackend
from moe_serve.engine.sampling.sampling_point import SamplingPoint
from moe_serve.errors import MoeServeError
from moe_serve.model.step_plan import SequenceSlice, StepPlan
from moe_serve.pipeline.groups.parked_states import ParkedStates
from moe_serve.pipeline.route_tap import RouteTap

_log = logging.getLogger(__name__)


class ExecutorLostError(MoeServeError):
    """The executor and all its pages are lost. Its requests restart on another one."""


class StepRunner(Protocol):
    """The pipeline interface that an executor needs. Tests and the simulator have their own."""

    def run(self, plan: StepPlan) -> Tensor:
        """Returns the wanted logits [R, V] in fp32, slice after slice."""
        ...

    def clear_pages(self, pages: list[int]) -> None:
        """Zeroes pages in which a failed request may have left NaNs."""
        ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages, given as (from, to). All are read before any is written."""
        ...

    def finite_pages(self, pages: list[int]) -> list[bool]:
        """Returns for each page whether all its values are finite."""
        ...


class StepExecutor(Protocol):
    """Computes steps on one attention rank's pages. Pages change in the order of the calls."""

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        """Computes a step; raises if it failed as a whole. `sequences` are those of its slices.

        Any method may raise ExecutorLostError.
        """
        ...

    def forget(self, sequence_ids: list[int]) -> None:
        """Drops the state of sequences that have ended or moved away."""
        ...

    def clear_pages(self, pages: list[int]) -> None: ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None: ...

    def finite_pages(self, pages: list[int]) -> list[bool]: ...

    @property
    def has_page_work(self) -> bool:
        """Returns whether pages will be cleared or copied with the next step only."""
        ...

    def finish_page_work(self) -> None:
        """Does that work now. Call it while no step is in progress."""
        ...

    @property
    def expert_memory(self) -> MemoryStats | None:
        """Statistics of the expert memory in this process; None if all experts are loaded."""
        ...


class LocalExecutor:
    """Runs a pipeline and a sampler in this process. `tap` is the pipeline's route tap, if any."""

    def __init__(
        self,
        runner: StepRunner,
        sampler: SamplingBackend,
        tap: RouteTap | None = None,
        memory: ExpertMemory | None = None,
        masks: AnswerMasks | None = None,
        watch: StepWatch | None = None,
        drafter: StepDrafter | None = None,
        parked: ParkedStates | None = None,
    ) -> None:
        """`memory` holds the runner's experts if they need not all be loaded. `masks` restrict the
        tokens of some requests; None if no request has restrictions. `watch` records steps.
        `drafter` drafts for the next step. `parked` are the runner's parked states."""
        self.runner, self._sampler, self._tap, self._memory = runner, sampler, tap, memory
        self._masks, self._watch, self.drafter = masks, watch, drafter
        self._parked = ParkedStates() if parked is None else parked
        self._mask_costs: dict[int, MaskCost] = {}  # in the last step
        self.plan: StepPlan | None = None  # the last plan that was begun

    @property
    def expert_memory(self) -> MemoryStats | None:
        return None if self._memory is None else self._memory.stats

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        """See `StepExecutor.run`."""
        self.plan = plan
        if self._memory is not None:
            self._memory.hint(plan.needed_LE)
        if self._watch is not None:
            self._watch.begin()
        logits = self.runner.run(plan)
        if self._watch is not None:
            self._watch.finish(plan)
        choices = None if self._tap is None else self._tap.end(plan)
        slices, self._mask_costs = plan.slices, {}
        if (found := self._sample_plain(logits, slices, sequences)) is not None:
            proposals = self._proposals(plan, found, sequences)
            return StepOutcome(sampled=found.sampled, choices=choices, proposals=proposals)
        described, start = dict[int, tuple[TokenLogprob, ...]](), 0
        for piece in slices:
            sequence, end = sequences[piece.sequence_id], start + piece.num_logits
            if sequence.wants_prompt_logprobs:
                described[sequence.id] = self._describe(sequence, piece, logits[start:end])
            start = end
        found = verify(logits, slices, sequences, self._sample)
        for key in self._parked.not_finite:
            found.sampled.pop(key, None)
            found.failures[key] = NAN
        return StepOutcome(
            sampled=found.sampled,
            failures=found.failures,
            prompt_logprobs=described,
            choices=choices,
            mask_costs=self._mask_costs,
            spoiled=found.spoiled,
            proposals=self._proposals(plan, found, sequences),
        )

    def _proposals(
        self, plan: StepPlan, found: Verified, sequences: Mapping[int, Sequence]
    ) -> Proposals:
        """Returns drafts for the next step. A grammar without a mask forces no tokens."""
        if self.drafter is None or not (self.drafter.network or self._mask_costs):
            return NO_PROPOSALS
        return self.drafter.propose(plan, found, sequences)

    def forget(self, sequence_ids: list[int]) -> None:
        """See `StepExecutor.forget`."""
        self._parked.forget(sequence_ids)

    def clear_pages(self, pages: list[int]) -> None:
        self.runner.clear_pages(pages)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        self.runner.copy_pages(pairs)

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return self.runner.finite_pages(pages)

    @property
    def has_page_work(self) -> bool:
        return False  # it is done at once

    def finish_page_work(self) -> None:
        """See `StepExecutor.finish_page_work`."""

    def _sample_plain(
        self, logits: Tensor, slices: Rows[SequenceSlice], sequences: Mapping[int, Sequence]
    ) -> Verified | None:
        """Verifies a step whose tokens only the logits decide, faster than `verify`. None: the step
        is of another kind, or the sampler raised; then nothing was done."""
        points = plain_points(slices, sequences)
        if points is None:
            return None
        try:
            tokens = self._sampler.sample(logits, points)
        except Exception:
            return None  # `verify` finds the faulty row
        found = Verified()
        for row, (piece, token) in enumerate(zip(slices, tokens, strict=True)):
            found.sampled[piece.sequence_id], found.rows[piece.sequence_id] = (token,), row
        return found

    def _sample(self, logits: Tensor, points: list[SamplingPoint]) -> list[Sampled | RowFailure]:
        """Samples one token per point. If that raises, it samples row by row, so that only the
        faulty row fails."""
        try:
            return self._sample_together(logits, points)
        except Exception as error:
            _log.exception("sampling failed with %d sequences", len(points))
            if len(points) == 1:
                return [RowFailure(f"sampling failed: {error}")]
            alone = zip(logits.split(1), points, strict=True)
            return [token for row, point in alone for token in self._sample(row, [point])]

    def _sample_together(
        self, logits: Tensor, points: list[SamplingPoint]
    ) -> list[Sampled | RowFailure]:
        """Samples all rows. A row without any allowed token fails; the others are unaffected."""
        if self._masks is None:
            return list(self._sampler.sample(logits, points))
        masked = self._masks.of(points)
        for row, cost in masked.costs.items():
            key = points[row].sequence.id
            known = self._mask_costs.get(key)
            self._mask_costs[key] = cost if known is None else known + cost
        if not masked.failures:
            return list(self._sampler.sample(logits, points, masked.masks))
        left = [row for row in range(len(points)) if row not in masked.failures]
        fates: dict[int, Sampled | RowFailure] = {
            row: RowFailure(why, is_of_request=True) for row, why in masked.failures.items()
        }
        if left:
            tokens = self._sample(logits[left], [points[row] for row in left])
            fates |= zip(left, tokens, strict=True)
        return [fates[row] for row in range(len(points))]

    def _describe(
        self, sequence: Sequence, piece: SequenceSlice, logits: Tensor
    ) -> tuple[TokenLogprob, ...]:
        """Returns the log probabilities of the prompt tokens that follow those of a slice."""
        first, count = piece.start + 1, len(piece.token_ids)
        following = sequence.token_ids[first : first + count]
        num_top = sequence.rules.prompt_logprobs or 0
        return tuple(self._sampler.describe(logits[: len(following)], following, num_top))
