"""The engine as an async server sees it: submit, stream, abort. The engine runs on its own thread.

Deltas cross the threads once per step, not once per token: the engine thread publishes the list of
a step's deltas, and the event loop sorts them into the queues of the requests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.first_token import AdmissionCheck
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.stats import EngineStats


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

    @property
    def admission(self) -> AdmissionCheck | None:
        """Decides on new requests before `submit`; None: the server has no service tiers."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> DeltaQueue:
        """Queues all requests or none. Raises ServerOverloadedError if the queue is full or closed.

        Called on the event loop's thread. Each request's last delta has its `finish_reason` set.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request within one step. Unknown or finished ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def begin_drain(self) -> None:
        """Refuses new requests from now on (ServerOverloadedError with `is_draining`)."""
        ...


async def stream(
    engine: EngineClient, request: GenerationRequest
) -> AsyncGenerator[TokenDelta, None]:
    """Yields the deltas of one request. Leaving the loop early aborts it."""
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
