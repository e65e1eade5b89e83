"""One sequence of an HTTP request: its text so far, its tokens, its times.

A server that records spans opens one trace for each request. Code that serves the request finds it
by `current_trace`, so that the two parts do not depend on each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from moe_serve.engine.request.request import (
    FinishReason,
    GenerationRequest,
    TokenDelta,
    TokenLogprob,
)
from moe_serve.http.generation.logprob_format import num_logprobs
from moe_serve.http.metrics.finished_sequence import DraftTally, FinishedSequence
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.text.stop_strings import StopStrings
from moe_serve.text.text_stream import TextDelta, TextStream
from moe_serve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class RequestTrace:
    """Data about one request, filled while it is served."""

    sequences: list[FinishedSequence] = field(default_factory=list)


_CURRENT: ContextVar[RequestTrace | None] = ContextVar("moe_serve_request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """Returns the trace of the current request, or None if none is open."""
    return _CURRENT.get()


@contextlib.contextmanager
def open_trace() -> Iterator[RequestTrace]:
    trace = RequestTrace()
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)


class Piece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The new part of choice `index` of the answer."""

    index: int
    delta: TextDelta
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def num_logprobs(self) -> int:
        """The count of numbers to write."""
        if self.delta.logprobs is None and self.prompt_logprobs is None:
            return 0
        return num_logprobs(self.delta.logprobs, self.prompt_logprobs)


class SequenceProgress:
    """Turns the engine's deltas of one sequence into pieces, and counts its tokens."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        metrics: ServerMetrics,
        stops: StopStrings,
        *,
        is_prompt_only: bool,
        kept_ids: frozenset[int] = frozenset(),
        continues: bool = False,
        drafts: DraftTally | None = None,
    ) -> None:
        """With `continues`, the sequence continues the text of the prompt. `drafts` counts its
        drafts; it is None on a server that does not draft.
        """
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = self.num_tier_tokens = self.num_dropped_tokens = 0
        self.drafts = drafts
        self._num_preemptions = 0
        self.finished: FinishedSequence | None = None  # set when it has ended by itself
        follows = request.prompt_token_ids[-1] if continues else None
        self._text = TextStream(tokenizer, request.params, stops, kept_ids, follows, request.rules)
        self._metrics = metrics
        self._is_prompt_only = is_prompt_only
        self._trace = current_trace()
        self._started: float | None = None  # see FinishedSequence
        self._first_time: float | None = None
        self._last_time: float | None = None

    @property
    def is_finished(self) -> bool:
        return self._text.is_finished

    def push(self, deltas: Sequence[TokenDelta], *, is_split: bool = False) -> list[Piece]:
        """Converts all deltas that arrived together to one piece, or with `is_split` to one for
        each token."""
        joined = join_deltas(deltas)
        self.num_cached_tokens = max(self.num_cached_tokens, joined.num_cached_tokens)
        self.num_tier_tokens = max(self.num_tier_tokens, joined.num_tier_tokens)
        self.num_dropped_tokens = max(self.num_dropped_tokens, joined.num_dropped_tokens)
        if joined.num_preemptions:
            self._num_preemptions = joined.num_preemptions
        self._started = self._started or joined.started_at
        pieces = []
        before = self.num_tokens
        for part in single_tokens(joined) if is_split else (joined,):
            pieces.append(self._piece(part))
            if self._text.is_finished:
                break
        if self.drafts is not None:
            self.drafts.read(deltas, self.num_tokens - before)
        reason = pieces[-1].delta.finish_reason
        is_late = joined.error_code is not None  # a limit that the client set ended it, not a fault
        self._observe(len(joined.token_ids), FinishReason.ABORT if is_late else reason)
        return pieces

    def _piece(self, part: TokenDelta) -> Piece:
        delta = self._text.push(part)
        if self._is_prompt_only and delta.finish_reason is not FinishReason.ERROR:
            delta = TextDelta(finish_reason=delta.finish_reason and FinishReason.LENGTH)
        self.num_tokens += len(delta.token_ids)
        return Piece(index=self.index, delta=delta, prompt_logprobs=part.prompt_logprobs)

    def _observe(self, num_tokens: int, reason: FinishReason | None) -> None:
        now = time.monotonic()
        since_arrival = now - self.request.arrival_time
        if num_tokens:
            if self._last_time is None:
                self._first_time = now
                self._metrics.observe_first_token(since_arrival)
            else:
                self._metrics.observe_next_tokens(now - self._last_time, num_tokens, now)
            self._last_time = now
        if reason is not None:
            self.finished = self._finished(reason, now)
            self._metrics.observe_finished(self.finished)
            self._count_window()
            self._tell_trace(self.finished)

    def abandon(self) -> None:
        """Reports a sequence that was aborted before its end. Call it once."""
        self._metrics.count_abandoned()
        self._count_window()
        self._tell_trace(self._finished(FinishReason.ABORT, time.monotonic()))

    def _finished(self, reason: FinishReason, now: float) -> FinishedSequence:
        return FinishedSequence(
            request=self.request,
            reason=reason,
            num_tokens=self.num_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self._num_preemptions,
            started=self._started,
            first_token=self._first_time,
            ended=now,
            drafts=self.drafts,
        )

    def _count_window(self) -> None:
        if self.request.params.kv_window is not None:
            self._metrics.count_window(self.num_dropped_tokens)

    def _tell_trace(self, finished: FinishedSequence) -> None:
        if self._trace is not None:
            self._trace.sequences.append(finished)


def join_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Joins consecutive deltas of one request. Deltas after the first end are dropped."""
    if len(deltas) == 1:
        return deltas[0]
    ends = [i for i, delta in enumerate(deltas) if delta.finish_reason is not None]
    deltas = deltas[: ends[0] + 1] if ends else deltas
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    experts = [delta.routed_experts for delta in deltas if delta.routed_experts is not None]
    return TokenDelta(
        request_id=first.request_id,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for part in logprobs for entry in part) if logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        num_tier_tokens=max(delta.num_tier_tokens for delta in deltas),
        num_dropped_tokens=max(delta.num_dropped_tokens for delta in deltas),
        num_preemptions=max(delta.num_preemptions for delta in deltas),
        started_at=next((d.started_at for d in deltas if d.started_at is not None), None),
        error=last.error,
        routed_experts=tuple(entry for part in experts for entry in part) if experts else None,
        is_of_request=last.is_of_request,
        error_code=last.error_code,
    )


def single_tokens(delta: TokenDelta) -> list[TokenDelta]:
    """Splits a delta into deltas of one token. The end belongs to the last one."""
    count, replace = len(delta.token_ids), msgspec.structs.replace
    if count <= 1:
        return [delta]
    logprobs, experts = delta.logprobs, delta.routed_experts
    singles = [
        replace(
            delta,
            token_ids=(token,),
            logprobs=None if logprobs is None else logprobs[i : i + 1],
            routed_experts=None if experts is None else experts[i : i + 1],
            prompt_logprobs=None if i else delta.prompt_logprobs,
            finish_reason=None,
            stop_token_id=None,
            error=None,
            error_code=None,
        )
        for i, token in enumerate(delta.token_ids)
    ]
    singles[-1] = replace(
        singles[-1],
        finish_reason=delta.finish_reason,
        stop_token_id=delta.stop_token_id,
        error=delta.error,
        error_code=delta.error_code,
    )
    return singles
