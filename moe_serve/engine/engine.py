"""The engine: requests in, one step at a time, token deltas out. Synchronous and single-threaded.

Knows nothing of text, HTTP, devices or ranks: `pipeline` turns a step plan into logits.
"""

from __future__ import annotations

import itertools
import logging
from typing import Protocol

from torch import Tensor

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.config import PAGE_SIZE, SchedulerConfig
from moe_serve.engine.batcher import make_step_plan
from moe_serve.engine.client import EngineStats
from moe_serve.engine.prefix_sharing import PrefixSharing
from moe_serve.engine.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.sampler import Sampled, Sampler
from moe_serve.engine.sampling_backend import SamplingBackend
from moe_serve.engine.scheduler import Schedule, Scheduler
from moe_serve.engine.sequence import Sequence
from moe_serve.model.step_plan import StepPlan

_log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What the engine needs of a pipeline (the simulator brings its own)."""

    def run(self, plan: StepPlan) -> Tensor:
        """-> the wanted logits [R, V] in fp32, slice after slice."""
        ...

    def clear_pages(self, pages: list[int]) -> None:
        """Zero pages that a failed request may have left NaNs in."""
        ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages, (from, to) each; all are read before any is written."""
        ...

    def finite_pages(self, pages: list[int]) -> list[bool]:
        """For each page, whether all that it holds is finite."""
        ...


class Engine:
    """`add` and `abort` requests, `step` while `has_work`. Without a `sampler`: torch's."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        scheduler: SchedulerConfig,
        num_pages: int,
        micro_batches: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        model_identity: bytes = b"",
        has_prefix_cache: bool = True,
        sampler: SamplingBackend | None = None,
    ) -> None:
        assert max_model_len <= num_pages * PAGE_SIZE, "one full sequence must fit the cache"
        self._runner = runner
        cache = PrefixCache(num_pages)
        identity = model_identity if has_prefix_cache else None
        sharing = PrefixSharing(cache, identity, runner.finite_pages)
        self._scheduler = Scheduler(scheduler, cache, sharing)
        self._sampler = sampler or Sampler(eos_token_ids)
        self._eos, self._micro_batches = eos_token_ids, micro_batches
        self.max_model_len = max_model_len
        self._ids = itertools.count()
        self._sequences: dict[str, Sequence] = {}
        self._pending: list[TokenDelta] = []  # ends that no step produced
        self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._pending)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Its prompt must be shorter than `max_model_len` (checked before)."""
        length = len(request.prompt_token_ids)
        assert 0 < length < self.max_model_len, f"prompt of {length} tokens reached the engine"
        assert request.request_id not in self._sequences, f"{request.request_id} is running"
        sequence = Sequence(next(self._ids), request)
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or finished ids are ignored."""
        if request_id in self._sequences:
            self._end([self._sequences[request_id]])
            self._pending.append(
                TokenDelta(request_id=request_id, finish_reason=FinishReason.ABORT)
            )

    def step(self) -> list[TokenDelta]:
        """Schedule, run, publish."""
        schedule = self._scheduler.schedule()
        self._prepare_pages()
        deltas, self._pending = self._pending, []
        if schedule:
            deltas += self._run(schedule)
            self._num_steps += 1
        return deltas

    def _prepare_pages(self) -> None:
        """What pages must hold before the step writes to them."""
        self._runner.clear_pages(self._scheduler.take_unproven_pages())
        self._runner.copy_pages(self._scheduler.sharing.copies)
        self._scheduler.sharing.end_copies()

    def _run(self, schedule: Schedule) -> list[TokenDelta]:
        """One step's deltas. If it raises, every sequence runs alone: the boundary of a fault."""
        plan = make_step_plan(schedule, self._micro_batches)
        try:
            logits = self._runner.run(plan)
        except Exception as error:
            _log.exception("step %d failed with %d sequences", self._num_steps, len(schedule))
            if len(schedule) == 1:
                return [self._fail(s, f"its step failed: {error}") for s, _ in schedule.values()]
            return [d for key, item in schedule.items() for d in self._run({key: item})]
        return self._publish(plan, schedule, logits)

    def stats(self) -> EngineStats:
        cache, sharing = self._scheduler.cache, self._scheduler.sharing
        return EngineStats(
            num_steps=self._num_steps,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_pages=cache.num_pages,
            num_free_pages=cache.num_available,
            num_cached_pages=cache.num_cached,
            num_evicted_pages=cache.num_evicted,
            num_queried_tokens=sharing.num_queried_tokens,
            num_hit_tokens=sharing.num_hit_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            is_alive=True,
        )

    def check_integrity(self) -> None:
        """Pages, reference counts, tables and requests agree; raises with what does not."""
        self._scheduler.check_integrity()
        known = {s.id for s in self._sequences.values()}
        scheduled = {s.id for s in (*self._scheduler.running, *self._scheduler.waiting)}
        assert known == scheduled, f"requests {known ^ scheduled} are lost"

    def _publish(self, plan: StepPlan, schedule: Schedule, logits: Tensor) -> list[TokenDelta]:
        """Advance the sequences, sample where a sequence has caught up, and tell."""
        rows, sampling, start = [], [], 0
        for piece in plan.slices:
            sequence, count = schedule[piece.sequence_id]
            end = start + piece.num_logits
            unread = sequence.num_prompt_tokens - sequence.num_computed_tokens
            self._num_prompt_tokens += max(0, min(count, unread))
            if sequence.wants_prompt_logprobs:
                self._collect_prompt_logprobs(sequence, count, logits[start:end])
            sequence.num_computed_tokens += count
            sequence.is_proven = False
            if sequence.num_pending_tokens == 0:
                rows.append(end - 1)
                sampling.append(sequence)
            start = end
        if not sampling:
            return []
        chosen = logits if len(rows) == len(logits) else logits[rows]
        return self._sample(chosen, sampling)

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> list[TokenDelta]:
        """One token for each; if sampling raises, row by row, and only the culprit fails."""
        try:
            sampled = self._sampler.sample(logits, sequences)
        except Exception as error:
            _log.exception("sampling failed with %d sequences", len(sequences))
            if len(sequences) == 1:
                return [self._fail(sequences[0], f"sampling failed: {error}")]
            alone = zip(logits.split(1), sequences, strict=True)
            return [delta for row, sequence in alone for delta in self._sample(row, [sequence])]
        deltas = [self._advance(s, token) for s, token in zip(sequences, sampled, strict=True)]
        is_open = (None, FinishReason.ERROR)  # a failed one has ended already
        pairs = zip(sequences, deltas, strict=True)
        self._end([s for s, delta in pairs if delta.finish_reason not in is_open])
        return deltas

    def _collect_prompt_logprobs(self, sequence: Sequence, count: int, logits: Tensor) -> None:
        start = sequence.num_computed_tokens
        following = sequence.token_ids[start + 1 : start + 1 + count]
        num_top = sequence.request.params.prompt_logprobs or 0
        chosen = logits[: len(following)]
        sequence.prompt_logprobs += self._sampler.describe(chosen, following, num_top)

    def _advance(self, sequence: Sequence, sampled: Sampled) -> TokenDelta:
        """Append a sampled token. The caller ends the request if it is the last."""
        if not sampled.is_valid:
            return self._fail(sequence, "the model produced NaN for this request")
        prompt_logprobs = None
        if sequence.wants_prompt_logprobs:
            prompt_logprobs = (None, *sequence.prompt_logprobs)
            sequence.prompt_logprobs = []
        sequence.is_proven = True
        sequence.append(sampled.token_id)
        self._num_generated_tokens += 1
        reason = self._finish_reason(sequence, sampled.token_id)
        return TokenDelta(
            request_id=sequence.request.request_id,
            token_ids=(sampled.token_id,),
            logprobs=None if sampled.logprob is None else (sampled.logprob,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=sampled.token_id if reason is FinishReason.STOP else None,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.params
        is_eos = token_id in self._eos and not params.ignore_eos
        if (is_eos or token_id in params.stop_token_ids) and (
            sequence.num_output_tokens >= params.min_tokens
        ):
            return FinishReason.STOP
        is_full = sequence.num_tokens >= self.max_model_len
        is_done = params.max_tokens is not None and sequence.num_output_tokens >= params.max_tokens
        return FinishReason.LENGTH if is_full or is_done else None

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            del self._sequences[sequence.request.request_id]
        self._scheduler.remove(sequences)

    def _fail(self, sequence: Sequence, why: str) -> TokenDelta:
        """End one request with an error; its pages are zeroed before anyone else gets them."""
        request_id = sequence.request.request_id
        del self._sequences[request_id]
        self._scheduler.discard(sequence)
        self._runner.clear_pages(self._scheduler.take_unproven_pages())
        return TokenDelta(request_id=request_id, finish_reason=FinishReason.ERROR, error=why)
