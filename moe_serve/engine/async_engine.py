"""Runs the engine on its own thread, behind the interface that an event loop uses.

event loop                         engine thread
submit, abort  -- inbox (deque) -->  take, step, step, ...
queues   <-- call_soon_threadsafe --  one list of deltas per step
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.engine_facts import EngineFacts
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.stats import EngineLoad, EngineStats
from moe_serve.engine.service.admission import Admission
from moe_serve.errors import EngineDeadError, InvalidRequestError, ServerOverloadedError

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0
_IDLE_CHECK_SHARE = 0.01  # share of idle time spent on the integrity check (slow with many pages)
_Command = GenerationRequest | str  # a request to add, or the id of one to abort


class AsyncEngine:
    """Implements `EngineClient`. All public methods but `close` run on the event loop's thread."""

    def __init__(
        self, built: BuiltEngine, limits: SchedulerConfig, clock: Clock = REAL_CLOCK
    ) -> None:
        self._engine: DrivenEngine = built.engine
        self._nudge = built.nudge
        self.layout: EngineFacts = built.layout
        self._limits, self._clock = limits, clock
        self._inbox: deque[_Command] = deque()
        self._num_submitted = 0  # written by the event loop's thread
        self._num_taken = 0  # written by the engine thread
        self._wake = threading.Event()
        self._engine.set_waker(self._wake.set)
        self._is_closing = self._is_draining = False
        self._death: str | None = None
        self._last_turn = clock()  # last pass of the engine thread's loop
        self._last_error: float | None = (
            None  # when a request last failed, other than by missing its deadline
        )
        self._next_check = 0.0
        self._queues: dict[str, DeltaQueue] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="moe-serve-engine", daemon=True)
        self._thread.start()

    @property
    def max_model_len(self) -> int:
        return self.layout.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.layout.vocab_size

    @property
    def admission(self) -> Admission | None:
        """See `EngineClient.admission`."""
        return self._engine.admission

    @property
    def num_open_requests(self) -> int:
        return len(self._queues)

    @property
    def is_alive(self) -> bool:
        """See `EngineClient.is_alive`."""
        return self._death is None and self._thread.is_alive()

    def submit(self, requests: Sequence[GenerationRequest]) -> DeltaQueue:
        """See `EngineClient.submit`."""
        self._loop = asyncio.get_running_loop()
        most = self._engine.num_seats + self._limits.max_queued_requests
        if len(requests) > most:
            raise InvalidRequestError(
                f"One request with {len(requests)} sequences can never be accepted: max_num_seqs "
                f"is {self._engine.num_seats} and max_queued_requests "
                f"{self._limits.max_queued_requests}. Send fewer prompts or choices.",
                param="n",
            )
        self._check_open(len(requests))
        queue = DeltaQueue()
        for request in requests:
            self._queues[request.request_id] = queue
        if not self._engine.has_work:
            self._last_turn = self._clock()  # the engine was idle until now, not stuck
        self._num_submitted += len(requests)
        self._inbox.extend(requests)
        self._rouse()
        return queue

    def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`. The request's queue receives only its last delta."""
        if request_id in self._queues:
            self._inbox.append(request_id)
            self._rouse()

    def begin_drain(self) -> None:
        self._is_draining = True

    def stats(self) -> EngineStats:
        stats, now = self._engine.stats(), self._clock()
        return dataclasses.replace(
            stats,
            load=stats.load + EngineLoad(num_waiting=self._num_in_inbox),
            is_alive=self.is_alive,
            death=self._death,
            last_turn_age_s=now - self._last_turn,
            last_error_age_s=None if self._last_error is None else now - self._last_error,
        )

    def close(self) -> None:
        """Stops the thread after its current step. Open requests end with an error.

        Raises EngineDeadError if the step does not end in time; the process must then exit.
        """
        self._is_closing = True
        self._engine.stop_waiting()
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._engine.close()
        if self._thread.is_alive():
            raise EngineDeadError(f"the engine's step did not end within {_CLOSE_TIMEOUT_S} s.")

    def _rouse(self) -> None:
        self._wake.set()
        self._nudge()

    @property
    def _num_in_inbox(self) -> int:
        return self._num_submitted - self._num_taken

    def _check_open(self, count: int) -> None:
        if self._death is not None or self._is_closing:
            why = self._death or "it was closed"
            raise ServerOverloadedError(f"The engine has stopped: {why}.", retry_after_s=5.0)
        if self._is_draining:
            raise ServerOverloadedError(
                "The server is shutting down and takes no new requests.",
                retry_after_s=5.0,
                is_draining=True,
            )
        waiting = self._engine.num_waiting + self._num_in_inbox
        seats = max(0, self._engine.num_seats - self._engine.num_running)
        if waiting + count > self._limits.max_queued_requests + seats:
            raise ServerOverloadedError(
                f"The queue is full: {waiting} sequences wait for {seats} free seats, this request "
                f"has {count}, and max_queued_requests is {self._limits.max_queued_requests}. "
                "Try again later.",
                retry_after_s=1.0,
            )

    def _run(self) -> None:
        """Runs the engine thread, the only thread that touches the engine."""
        try:
            while not self._is_closing:
                self._last_turn = self._clock()
                self._wake.clear()
                self._take_inbox()
                if self._engine.has_work:
                    self._publish(self._engine.step())
                elif not self._inbox:
                    self._check_idle_engine()
                    self._wake.wait()
        except BaseException as error:  # top of the thread: record the cause, then stop
            self._death = f"{type(error).__name__}: {error}"
            _log.critical("the engine thread died", exc_info=True)
        self._death = self._death or "it was closed"
        self._call_loop(self._end_all)

    def _check_idle_engine(self) -> None:
        start = self._clock()
        if start >= self._next_check:
            self._engine.check_integrity()
            end = self._clock()
            self._next_check = end + (end - start) / _IDLE_CHECK_SHARE

    def _take_inbox(self) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, GenerationRequest):
                self._engine.add(command)
                self._num_taken += 1
            else:
                self._engine.abort(command)

    def _publish(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self._call_loop(self._deliver, deltas)

    def _call_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(callback, *arguments)
            except RuntimeError:
                _log.debug("the event loop closed before the last deltas")

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        told: list[DeltaQueue] = []
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR and delta.error_code is None:
                self._last_error = self._clock()
            queue = self._queues.get(delta.request_id)
            if queue is not None:
                if queue.add(delta):
                    told.append(queue)
                if delta.finish_reason is not None:
                    del self._queues[delta.request_id]
        for queue in told:  # after the loop, so that a shared queue holds the whole step
            queue.tell()

    def _end_all(self) -> None:
        self._deliver(
            [
                TokenDelta(
                    request_id=request_id,
                    finish_reason=FinishReason.ERROR,
                    error=f"the engine has stopped: {self._death}",
                )
                for request_id in list(self._queues)
            ]
        )
