"""The engine as an async server sees it: submit, stream, abort. The engine runs on its own thread.

Deltas cross the threads once per step, not once per token: the engine thread publishes the list of
a step's deltas, and the event loop sorts them into the queues of the requests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from experts.memory.memory_stats import MemoryStats
from moe_serve.cache.page_times import PageTimes
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.policy_stats import PolicyStats
from moe_serve.engine.request.pool_stats import PoolStats
from moe_serve.engine.request.rank_load import RankLoad
from moe_serve.engine.request.rank_status import RankStatus
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.step_tokens import StepTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine that is cheap to take from any thread."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int  # held by no sequence; pages only in the prefix cache count as free
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    is_alive: bool
    num_cached_pages: int = 0  # in the prefix cache, used or not
    num_evicted_pages: int = 0
    num_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # prompt tokens found there
    num_missed_tokens: int = 0  # prompt tokens not found there, counted once per request
    num_left_aside: int = 0  # waiting sequences that the policy skipped (see `Skipped`)
    num_corrupted: int = 0  # sequences that ended because the model gave NaN or infinity
    page_times: PageTimes = PageTimes()
    step_tokens: StepTokens = StepTokens()
    death: str | None = None  # why the engine is not alive
    last_turn_age_s: float | None = None  # since the engine thread's last pass of its loop
    last_error_age_s: float | None = None  # since a request failed; None: none has failed
    outage_s: float = 0.0  # how long ranks have been missing that every step needs
    oldest_arrival: float | None = None  # of waiting requests, engine's clock; None: none wait
    expert_memory: MemoryStats | None = None  # None: all experts are in memory
    batching: PolicyStats | None = None  # None: no policy has run yet
    pools: PoolStats | None = None  # None when attention and experts share a process
    ranks: tuple[RankLoad, ...] = ()  # attention ranks; empty in one process
    members: tuple[RankStatus, ...] = ()  # ranks of both pools, present or not
    num_lost_ranks: int = 0  # since the start; a rank lost twice counts twice
    last_loss: str = ""  # the last lost rank and the reason


class EngineClient(Protocol):
    """The engine interface that `http/` uses. `AsyncEngine` implements it; tests use fakes."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def is_alive(self) -> bool:
        """The same value as in `stats`, cheap enough to read at every request."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> DeltaQueue:
        """Queue all requests or none. Raises ServerOverloadedError if the queue is full or closed.

        Called on the event loop's thread. Each request's last delta has its `finish_reason` set.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request within one step. Unknown or finished ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def begin_drain(self) -> None:
        """Refuse new requests from now on (ServerOverloadedError with `is_draining`)."""
        ...


async def stream(
    engine: EngineClient, request: GenerationRequest
) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of one request. Leaving the loop early aborts it."""
    queue = engine.submit([request])
    is_finished = False
    try:
        while not is_finished:
            await queue.wait()
            for delta in queue.take():
                is_finished = delta.finish_reason is not None
                yield delta
    finally:
        if not is_finished:
            engine.abort(request.request_id)
