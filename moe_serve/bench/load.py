"""Sends the requests of a run: the warm-up, and the measured load as a closed or an open loop.

An open loop never waits for answers. A request that the client could not send in time keeps the
time at which it was due, and its latency counts from there: a slow server cannot slow its own load
down (coordinated omission), and a slow client shows as lateness.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Protocol

from moe_serve.bench.client.endpoint import Endpoint, RunPlan
from moe_serve.bench.client.load_client import ClientHealth, HealthMeter, LoadClient, RunProgress
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.workload.prompt_maker import PromptMaker, Ready, Slot, TextScale
from moe_serve.bench.workload.tier_mix import TierMix
from moe_serve.bench.workload.workload import Workload
from moe_serve.errors import BenchServerError

_MADE_AHEAD_TOKENS = 20_000_000  # largest number of prompts that are all made before the run starts
_WARM_UP_SEED = 0x5EED  # its prompts differ from those of the run
_WARM_UP_TOKENS = 8

OnStart = Callable[[RunProgress, "int | None"], None]


class Sender(Protocol):
    """The interface of `LoadClient` that the loops use."""

    async def send(self, request: Ready, scheduled_s: float | None = None) -> RequestRecord: ...


class Timer(Protocol):
    """A clock that counts seconds since the run began."""

    def now(self) -> float: ...

    async def sleep_until(self, at_s: float) -> None: ...


class Collected:
    """The records of a run as they arrive; an interrupted run keeps those that had ended."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    async def send(self, sender: Sender, request: Ready, scheduled_s: float | None) -> None:
        self.records.append(await sender.send(request, scheduled_s))


async def closed_loop(
    sender: Sender,
    requests: Iterator[Ready],
    collected: Collected,
    timer: Timer,
    *,
    concurrency: int,
    duration_s: float | None = None,
) -> None:
    """Runs `concurrency` clients, each of which sends its next request when its last one is
    answered."""

    async def one_client() -> None:
        for request in requests:  # shared: each takes the next
            if duration_s is not None and timer.now() >= duration_s:
                return
            await collected.send(sender, request, None)

    await _all([asyncio.ensure_future(one_client()) for _ in range(concurrency)])


async def open_loop(
    sender: Sender,
    requests: Iterator[Ready],
    collected: Collected,
    timer: Timer,
    *,
    max_in_flight: int,
) -> None:
    """Sends each request when it is due. Requests beyond `max_in_flight` wait here and count as
    late. A turn of a session is not due before the previous turn is answered."""
    places = asyncio.Semaphore(max_in_flight)
    running: set[asyncio.Future[None]] = set()
    turns: dict[str, asyncio.Future[None]] = {}  # by session: its last turn
    bugs: list[BaseException] = []  # a request that fails is a record; an exception is a bug

    async def one_request(request: Ready) -> None:
        try:
            await collected.send(sender, request, request.at_s)
        finally:
            places.release()

    async def one_turn(request: Ready, before: asyncio.Future[None]) -> None:
        await asyncio.wait([before])
        await places.acquire()
        await one_request(replace(request, at_s=max(request.at_s, timer.now())))

    def ended(task: asyncio.Future[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            bugs.append(error)

    try:
        for request in requests:  # the body is made here, before the request is due
            await timer.sleep_until(request.at_s)
            before = turns.get(request.session)
            if before is None or before.done():
                await places.acquire()
                task = asyncio.ensure_future(one_request(request))
            else:
                task = asyncio.ensure_future(one_turn(request, before))
            if request.session:
                turns[request.session] = task
            running.add(task)
            task.add_done_callback(ended)
            if bugs:
                raise bugs[0]
    except BaseException:
        for unfinished in running:
            unfinished.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
    await _all(list(running))


async def _all(tasks: list[asyncio.Future[None]]) -> None:
    """Waits for all tasks; a task that raises, which only a bug does, ends the others."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class WallTimer:
    """Counts seconds since it was created, or since `restart`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def restart(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def sleep_until(self, at_s: float) -> None:
        """Sleeps, and never less than asked: uvloop's timers have whole milliseconds and fire up to
        one too early, and a request sent before it is due would have a latency that is too
        short."""
        await asyncio.sleep(max(0.0, at_s - self.now()))
        while (delay := at_s - self.now()) > 0:
            await asyncio.sleep(delay)


class Load:
    """The measured part of a run and its results."""

    def __init__(
        self, plan: RunPlan, requests: Iterator[Ready], timer: WallTimer, max_in_flight: int
    ) -> None:
        self.collected = Collected()
        self.is_interrupted = False
        self.num_unfinished = 0
        self.progress = RunProgress()
        self.health: ClientHealth | None = None
        self._plan, self._requests = plan, requests
        self._timer, self._max_in_flight = timer, max_in_flight

    @property
    def records(self) -> list[RequestRecord]:
        return self.collected.records

    async def run(self, client: LoadClient, on_start: OnStart | None) -> None:
        self.progress = client.progress = RunProgress()
        workload = self._plan.workload
        if on_start is not None:
            on_start(self.progress, workload.planned)
        meter = HealthMeter()
        watch = asyncio.ensure_future(meter.watch())
        self._timer.restart()
        main = asyncio.ensure_future(self._loop(client))
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(signal.SIGINT, main.cancel)
        try:
            await main
        except asyncio.CancelledError:
            if not main.cancelled():
                raise
            self.is_interrupted = True
        finally:
            watch.cancel()
            with suppress(NotImplementedError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)
        self.num_unfinished = self.progress.num_sent - len(self.records)
        self.health = meter.result(self.records, is_open=workload.is_open)

    async def _loop(self, client: LoadClient) -> None:
        workload = self._plan.workload
        if workload.concurrency is None:
            await open_loop(
                client,
                self._requests,
                self.collected,
                self._timer,
                max_in_flight=self._max_in_flight,
            )
        else:
            await closed_loop(
                client,
                self._requests,
                self.collected,
                self._timer,
                concurrency=workload.concurrency,
                duration_s=workload.duration_s,
            )


def own_fields(slot: Slot, tiers: TierMix | None) -> dict[str, object]:
    """Returns the fields that name a request's tier and tenant, and its priority if its tier has
    one."""
    if tiers is None:
        return {}
    fields: dict[str, object] = {"service_tier": slot.tier}
    if slot.tenant:
        fields["user"] = slot.tenant
    if priority := tiers.priority_of(slot.tier):
        fields["priority"] = priority
    return fields


def make_requests(workload: Workload, endpoint: Endpoint, maker: PromptMaker) -> Iterator[Ready]:
    """Builds requests before the run if they fit into memory, else each when it is needed."""

    tiers = workload.tiers

    def made() -> Iterator[Ready]:
        for slot in workload.slots():
            yield Ready(
                index=slot.index,
                at_s=slot.at_s,
                output_tokens=slot.output_tokens,
                body=endpoint.body(maker.prompt(slot), slot.output_tokens, own_fields(slot, tiers)),
                tier=slot.tier,
                tenant=slot.tenant,
                session=slot.session,
            )

    if workload.planned is None and not workload.is_open:
        return made()  # as many as the time allows
    num_tokens = 0
    for slot in workload.slots():
        num_tokens += slot.prompt_tokens
        if num_tokens > _MADE_AHEAD_TOKENS:
            return made()
    return iter(list(made()))


async def warm_up(
    plan: RunPlan, endpoint: Endpoint, client: LoadClient, timer: WallTimer, scale: TextScale | None
) -> None:
    """Sends the first requests of the workload with other words and short answers, all at once.

    With the run's own words the server's prefix cache would already know the prompts.
    """
    workload = plan.workload
    num = plan.num_warm_up
    if num is None:
        num = min(workload.concurrency or 8, workload.planned or 8, 32)
    if num == 0:
        return
    seed = workload.seed ^ _WARM_UP_SEED
    maker = PromptMaker(kind=plan.data, seed=seed, vocab_size=plan.vocab_size, scale=scale)
    slots = [
        replace(slot, blocks=(), prompt=None, prompt_tokens=slot.prompt_tokens or 64)
        for slot in islice(workload.slots(), num)
    ]
    requests = [
        Ready(
            index=i,
            at_s=0.0,
            output_tokens=_WARM_UP_TOKENS,
            body=endpoint.body(maker.prompt(slot), _WARM_UP_TOKENS),
        )
        for i, slot in enumerate(slots)
    ]
    collected = Collected()
    await closed_loop(client, iter(requests), collected, timer, concurrency=max(1, len(requests)))
    failed = [record for record in collected.records if not record.is_ok]
    if failed and len(failed) == len(requests):
        detail = f"{failed[0].error}: {failed[0].detail}"
        hint = " (for a server that does not know ignore_eos, give --no-ignore-eos)"
        is_refused = "ignore_eos" in detail or "nrecognized" in detail
        raise BenchServerError(f"the warm-up failed: {detail}{hint if is_refused else ''}")
