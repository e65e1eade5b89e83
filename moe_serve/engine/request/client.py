"""The engine as an async server sees it: submit, stream, abort. The engine runs on its own thread.

One hand-over per step crosses the threads (not one per token): the engine thread publishes the list
of a step's deltas, and the event loop sorts them into the queues of who asked.
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
    """A snapshot that is cheap to take from any thread."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int  # that no sequence holds; those that only the prefix cache has count
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    is_alive: bool
    num_cached_pages: int = 0  # in the prefix cache, used or not
    num_evicted_pages: int = 0
    num_queried_tokens: int = 0  # of prompts that were looked up
    num_hit_tokens: int = 0  # of these, found
    num_missed_tokens: int = 0  # of prompts that started, looked up or not; once for each
    num_left_aside: int = 0  # of those who wait: not for want of a seat or of pages
    num_corrupted: int = 0  # sequences that ended because the model gave NaN or infinity
    page_times: PageTimes = PageTimes()
    step_tokens: StepTokens = StepTokens()
    death: str | None = None  # why it is not alive
    last_turn_age_s: float | None = None  # since the engine thread's loop last came round
    last_error_age_s: float | None = None  # since a request failed in the engine; None: none has
    outage_s: float = 0.0  # for how long ranks have been away that no step can do without
    oldest_arrival: float | None = None  # of who waits, on the engine's clock; None: nobody does
    expert_memory: MemoryStats | None = None  # None: all experts are in memory
    batching: PolicyStats | None = None  # None: nobody batches yet
    pools: PoolStats | None = None  # None when attention and experts share a process
    ranks: tuple[RankLoad, ...] = ()  # attention ranks; empty where there are none
    members: tuple[RankStatus, ...] = ()  # ranks of both pools, also those that are away
    num_lost_ranks: int = 0  # since the start; one that is lost twice counts twice
    last_loss: str = ""  # which rank, and why


class EngineClient(Protocol):
    """What `http/` needs of an engine. `AsyncEngine` is the real one; tests use fakes."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def is_alive(self) -> bool:
        """As `stats` says, for who asks at every request."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> DeltaQueue:
        """Queue all or none: raises ServerOverloadedError when the queue is full or closed.

        Called on the event loop's thread. Each request's last delta has its `finish_reason` set.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request within one step; unknown or finished ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def begin_drain(self) -> None:
        """Refuse new requests from now on (ServerOverloadedError with `is_draining`)."""
        ...


async def stream(
    engine: EngineClient, request: GenerationRequest
) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of one request; leaving the loop early aborts it."""
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
