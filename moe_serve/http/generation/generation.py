"""The sequences of one HTTP request, from submission to the last piece of text."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

import msgspec

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.request import (
    FinishReason,
    GenerationRequest,
    TokenDelta,
    TokenLogprob,
)
from moe_serve.http.gate.key_limits import KeyAccount, current_account
from moe_serve.http.generation.answer_sequence import Piece, SequenceProgress
from moe_serve.http.generation.request_admission import (
    DEADLINE_EXCEEDED,
    RequestAdmission,
    exceeded,
)
from moe_serve.http.generation.usage import PredictionUsage, Usage, llama_timings, timing_of
from moe_serve.http.metrics.finished_sequence import DraftTally, FinishedSequence
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.schema.api_error import ApiError, engine_dead_error
from moe_serve.text.stop_strings import StopStrings
from moe_serve.text.tokenizer import Tokenizer

_LOGGER = logging.getLogger(__name__)
_NO_HEADERS: Mapping[str, str] = {}


class Generation:
    """Yields the new pieces of all sequences as they arrive; `close` aborts what still runs."""

    def __init__(
        self,
        engine: EngineClient,
        sequences: Sequence[SequenceProgress],
        queue: DeltaQueue,
        on_close: Callable[[Generation], None],
        metrics: ServerMetrics,
        *,
        has_timing: bool = False,
        splits_runs: bool = False,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        self._metrics, self._has_timing, self._splits_runs = metrics, has_timing, splits_runs
        self._engine = engine
        self._sequences = {sequence.request.request_id: sequence for sequence in sequences}
        self._num_running = len(sequences)
        self._queue = queue
        self._prompt_logprobs = SharedPromptLogprobs([sequence.request for sequence in sequences])
        self._on_close = on_close
        self._cut_error: ApiError | None = None
        self._is_closed = False
        self.headers = headers  # of the answer

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        while not self.is_ended:
            await self._queue.wait()
            yield self.take()

    @property
    def is_ended(self) -> bool:
        """True if no more pieces will come."""
        return self._num_running == 0

    def take(self) -> list[Piece]:
        """Returns the pieces that are ready, possibly none."""
        pieces: list[Piece] = []
        for request_id, deltas in _by_request(self._queue.take()):
            pieces += self._push(request_id, deltas)
        return self._prompt_logprobs.share(pieces)

    def listen(self, on_step: Callable[[], bool]) -> None:
        """Registers a callback for each step, which should call `take`. See `DeltaQueue.listen`."""
        self._queue.listen(on_step)

    def adapters(self, *, has_begun: bool) -> list[str]:
        """Returns the adapters of unfinished sequences that have begun to answer, or that have
        not."""
        open_ones = [each for each in self._sequences.values() if not each.is_finished]
        named = [(each.request.adapter, each.num_tokens > 0) for each in open_ones]
        return [adapter.name for adapter, begun in named if adapter and begun == has_begun]

    def usage(self) -> Usage:
        sequences = self._sequences.values()
        firsts = [sequence for sequence in sequences if sequence.request.choice == 0]
        dropped = [s.num_dropped_tokens for s in sequences if s.request.params.kv_window]
        timed = self._timed()
        return Usage(
            prompt_tokens=sum(len(first.request.prompt_token_ids) for first in firsts),
            completion_tokens=sum(sequence.num_tokens for sequence in sequences),
            cached_tokens=sum(first.num_cached_tokens for first in firsts),
            tier_tokens=sum(first.num_tier_tokens for first in firsts),
            kv_dropped_tokens=sum(dropped) if dropped else None,
            timing=None if timed is None else timing_of(timed),
            llama_timings=None if timed is None else llama_timings(timed),
        )

    def prediction_usage(self) -> PredictionUsage:
        """Adds up how much of the client's prediction came true in all choices."""
        tallies = [sequence.drafts or DraftTally() for sequence in self._sequences.values()]
        accepted = sum(tally.num_predicted_accepted for tally in tallies)
        num_predicted = sum(tally.num_predicted for tally in tallies)
        return PredictionUsage(num_accepted=accepted, num_rejected=num_predicted - accepted)

    def _timed(self) -> FinishedSequence | None:
        """Returns the single sequence of the request, once it has ended. Its times are those of the
        request."""
        if not self._has_timing or len(self._sequences) != 1:
            return None
        (sequence,) = self._sequences.values()
        return sequence.finished

    def cut(self, error: ApiError) -> None:
        """Ends the generation with this error, as if each sequence had failed in the engine."""
        self._cut_error = error
        for request_id, sequence in self._sequences.items():
            if not sequence.is_finished:
                end = TokenDelta(request_id=request_id, finish_reason=FinishReason.ERROR)
                self._queue.put(end)

    def close(self) -> None:
        """Aborts unfinished sequences. It is safe to call after the end, or twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id, sequence in self._sequences.items():
            if not sequence.is_finished:
                self._engine.abort(request_id)
                sequence.abandon()
        self._on_close(self)

    def _push(self, request_id: str, deltas: list[TokenDelta]) -> list[Piece]:
        sequence = self._sequences[request_id]
        if sequence.is_finished:  # the engine's last deltas after a stop string or a cut
            return []
        pieces = sequence.push(deltas, is_split=self._splits_runs)
        if sequence.is_finished:
            self._num_running -= 1
            self._observe_prompt(sequence)
        last = pieces[-1].delta
        if last.is_stopped_by_text:
            self._engine.abort(request_id)
        elif last.finish_reason is FinishReason.ERROR:
            self._engine.abort(request_id)
            raise self._cut_error or self._engine_error(deltas[-1])
        return pieces

    def _observe_prompt(self, ended: SequenceProgress) -> None:
        """Reports a prompt to the metrics when its last choice has ended."""
        num_choices = ended.request.params.n
        first = ended.index - ended.index % num_choices
        choices = list(self._sequences.values())[first : first + num_choices]
        if all(choice.is_finished for choice in choices):
            self._metrics.observe_longest(max(choice.num_tokens for choice in choices))

    def _engine_error(self, delta: TokenDelta) -> ApiError:
        """Returns the client's error for a failed sequence.

        Internal causes go to the log only. The client is told if its own request caused the
        failure.
        """
        if delta.error_code == DEADLINE_EXCEEDED:
            return exceeded(delta)
        if delta.is_of_request:
            message = f"The answer cannot be continued: {delta.error}."
            return ApiError(400, message, code="constraint_failed")
        if not self._engine.is_alive:
            return engine_dead_error()
        _LOGGER.error("request %s failed in the engine: %s", delta.request_id, delta.error)
        message = (
            f"The engine failed to process this request ({delta.request_id}). The server log has "
            "the cause."
        )
        return ApiError(500, message, code="generation_failed")


class SharedPromptLogprobs:
    """Adds the prompt logprobs, which the engine reports for choice 0 only, to every choice of a
    prompt.

        2 prompts, n = 3:  index 0 1 2 | 3 4 5,  computed for 0 and 3, shared with 1 2 and 4 5

    A choice that is ahead of its choice 0 is held back, because its first piece must have them.
    """

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        firsts = [index - request.choice for index, request in enumerate(requests)]
        self._first_of = dict(enumerate(firsts))
        self._is_needed = any(request.rules.prompt_logprobs is not None for request in requests)
        self._known: dict[int, tuple[TokenLogprob | None, ...] | None] = {}
        self._held: dict[int, list[Piece]] = {first: [] for first in firsts}
        self._has_begun: set[int] = set()

    def share(self, pieces: list[Piece]) -> list[Piece]:
        """Returns the pieces that can be shown now. The pieces of one choice keep their order."""
        if not self._is_needed:
            return pieces
        ready: list[Piece] = []
        for piece in pieces:
            first = self._first_of[piece.index]
            if piece.index == first and first not in self._known:
                self._known[first] = piece.prompt_logprobs
                ready.append(piece)
                ready += [self._completed(held) for held in self._held.pop(first)]
            elif first in self._known:
                ready.append(self._completed(piece))
            else:
                self._held[first].append(piece)
        return ready

    def _completed(self, piece: Piece) -> Piece:
        first = self._first_of[piece.index]
        if piece.index == first or piece.index in self._has_begun:
            return piece
        self._has_begun.add(piece.index)
        return msgspec.structs.replace(piece, prompt_logprobs=self._known[first])


class GenerationService:
    """Starts generations and keeps track of the open ones, so that a shutdown can wait for them or
    end them."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        *,
        has_timing: bool = False,
        speculates: bool = False,
    ) -> None:
        """`has_timing`: answers report the times of their own request. `speculates`: the engine
        verifies drafts, which are counted."""
        self.engine = engine
        self._has_timing, self._speculates = has_timing, speculates
        self.is_draining = False
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._admission = RequestAdmission(engine, metrics)
        self._open: set[Generation] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(
        self,
        requests: Sequence[GenerationRequest],
        *,
        is_prompt_only: bool = False,
        kept_ids: frozenset[int] = frozenset(),
        continues: bool = False,
        splits_runs: bool = False,
    ) -> Generation:
        """Submits all requests or none. The caller must `close` the generation in every case.

        All requests belong to one HTTP request, so they share their stop strings. `continues`: the
        answers continue the text of the prompts. `splits_runs`: tokens that came together are
        given one by one.
        """
        account = current_account()
        self._claim(account, len(requests))
        try:
            admitted = self._admission.submit(requests, is_draining=self.is_draining)
        except Exception:
            if account is not None:
                account.release(len(requests))
            raise
        stops = StopStrings(requests[0].params.stop)
        sequences = [
            SequenceProgress(
                index,
                request,
                self._tokenizer,
                self._metrics,
                stops,
                is_prompt_only=is_prompt_only,
                kept_ids=kept_ids,
                continues=continues,
                drafts=DraftTally() if self._speculates else None,
            )
            for index, request in enumerate(requests)
        ]

        def on_close(generation: Generation) -> None:
            self._open.discard(generation)
            if account is not None:
                account.release(len(requests))
                _charge(account, generation.usage())

        generation = Generation(
            self.engine,
            sequences,
            admitted.queue,
            on_close,
            self._metrics,
            has_timing=self._has_timing,
            splits_runs=splits_runs,
            headers=admitted.headers,
        )
        self._open.add(generation)
        return generation

    def adapters(self, *, has_begun: bool) -> Counter[str]:
        """Counts the sequences of each adapter; see `Generation.adapters`."""
        found = (each.adapters(has_begun=has_begun) for each in tuple(self._open))
        return Counter(name for names in found for name in names)

    def begin_drain(self) -> None:
        """Refuses new requests. Open ones continue."""
        self.is_draining = True
        self.engine.begin_drain()

    def cut_all(self, error: ApiError) -> None:
        """Ends every open generation with an error event or an error response."""
        for generation in tuple(self._open):
            generation.cut(error)

    def _claim(self, account: KeyAccount | None, count: int) -> None:
        """Counts the sequences for the API key of the request."""
        refused = None if account is None else account.claim(count)
        if refused is not None:
            self._metrics.count_rejection(refused.reason)
            raise refused.error()


def _by_request(deltas: list[TokenDelta]) -> Iterable[tuple[str, list[TokenDelta]]]:
    if len(deltas) == 1:  # nearly always
        return [(deltas[0].request_id, deltas)]
    found: dict[str, list[TokenDelta]] = {}
    for delta in deltas:
        found.setdefault(delta.request_id, []).append(delta)
    return found.items()


def _charge(account: KeyAccount, usage: Usage) -> None:
    account.charge(usage.prompt_tokens + usage.completion_tokens, time.monotonic())
