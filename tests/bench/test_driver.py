"""Closed and open loops, with a clock that moves only when all tasks sleep."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from moe_serve.bench import load
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.load import Collected, WallTimer, closed_loop, open_loop
from moe_serve.bench.workload.prompt_maker import Ready


class FakeTimer:
    """A clock: `advance` moves it to the next time at which a task wakes."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = count()

    def now(self) -> float:
        return self._now

    async def sleep_until(self, at_s: float) -> None:
        if at_s > self._now:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._sleepers, (at_s, next(self._count), future))
            await future

    async def run(self, work: asyncio.Future[None]) -> None:
        while not work.done():
            for _ in range(20):  # let everybody come to their next wait
                await asyncio.sleep(0)
            if self._sleepers:
                self._now, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    future.set_result(None)
        await work


class SlowSender:
    """Answers after `seconds` and notes how many requests it had at once."""

    def __init__(self, timer: FakeTimer, seconds: float) -> None:
        self._timer, self._seconds = timer, seconds
        self.num_now = self.most = 0

    async def send(self, request: Ready, scheduled_s: float | None = None) -> RequestRecord:
        started = self._timer.now()
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        try:
            if request.body == b"bug":
                raise ZeroDivisionError
            await self._timer.sleep_until(started + self._seconds)
        finally:
            self.num_now -= 1
        return RequestRecord(
            index=request.index,
            scheduled_s=started if scheduled_s is None else scheduled_s,
            started_s=started,
            end_s=self._timer.now(),
        )


def requests(times: list[float], body: bytes = b"") -> Iterator[Ready]:
    for index, at_s in enumerate(times):
        yield Ready(index=index, at_s=at_s, output_tokens=1, body=body)


def drive_closed(
    num: int, seconds: float, concurrency: int, duration_s: float | None = None
) -> tuple[SlowSender, list[RequestRecord]]:
    async def run() -> tuple[SlowSender, list[RequestRecord]]:
        timer, collected = FakeTimer(), Collected()
        sender = SlowSender(timer, seconds)
        loop = closed_loop(
            sender, requests([0.0] * num), collected, timer,
            concurrency=concurrency, duration_s=duration_s,
        )  # fmt: skip
        await timer.run(asyncio.ensure_future(loop))
        return sender, collected.records

    return asyncio.run(run())


def drive_open(
    times: list[float], seconds: float, max_in_flight: int = 100, body: bytes = b""
) -> tuple[SlowSender, list[RequestRecord]]:
    async def run() -> tuple[SlowSender, list[RequestRecord]]:
        timer, collected = FakeTimer(), Collected()
        sender = SlowSender(timer, seconds)
        loop = open_loop(
            sender, requests(times, body), collected, timer, max_in_flight=max_in_flight
        )
        await timer.run(asyncio.ensure_future(loop))
        return sender, sorted(collected.records, key=lambda record: record.index)

    return asyncio.run(run())


def test_a_timer_that_fires_early_sends_nothing_before_it_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop's timers have whole milliseconds and may fire up to one millisecond early."""
    now, slept = 0.0, []

    async def sleep(delay: float) -> None:
        nonlocal now
        now += max(delay - 0.0007, delay / 2)
        slept.append(delay)

    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(load, "asyncio", SimpleNamespace(sleep=sleep))
    timer = WallTimer()
    for at_s in (0.25, 0.2501, 0.25):  # the last is due already: others get their turn all the same
        num_slept = len(slept)
        asyncio.run(timer.sleep_until(at_s))
        assert timer.now() >= at_s and len(slept) > num_slept


def test_closed_loop_keeps_its_number_in_flight() -> None:
    sender, records = drive_closed(num=7, seconds=2.0, concurrency=3)
    assert sender.most == 3
    assert [r.started_s for r in records] == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 4.0]
    assert {r.lateness_s for r in records} == {0.0}


def test_closed_loop_takes_no_more_when_the_time_is_over() -> None:
    _, records = drive_closed(num=100, seconds=2.0, concurrency=1, duration_s=5.0)
    assert [r.started_s for r in records] == [0.0, 2.0, 4.0], "what has begun is awaited"


def test_open_loop_does_not_wait_for_a_slow_server() -> None:
    sender, records = drive_open([0.0, 1.0, 2.0, 3.0], seconds=50.0)
    assert sender.most == 4
    assert [r.started_s for r in records] == [0.0, 1.0, 2.0, 3.0]
    assert [r.e2e_s for r in records] == [50.0] * 4


def test_a_full_client_is_late_and_latency_counts_from_when_it_was_due() -> None:
    sender, records = drive_open([0.0, 1.0, 2.0], seconds=10.0, max_in_flight=1)
    assert sender.most == 1
    assert [r.lateness_s for r in records] == [0.0, 9.0, 18.0]
    assert [r.e2e_s for r in records] == [10.0, 19.0, 28.0], "no coordinated omission"


def test_a_turn_waits_for_the_answer_to_the_turn_before() -> None:
    """Turns of session a are due at 0, 1, 2 and 40 s, and answers take 10 s. The last one is not
    held, as the answer before it has long ended. A held turn takes no place of the client."""

    async def run() -> list[RequestRecord]:
        timer, collected = FakeTimer(), Collected()
        turns = [(0.0, "a"), (1.0, "a"), (2.0, "a"), (3.0, "b"), (4.0, ""), (40.0, "a")]
        ready = [
            Ready(index=i, at_s=at_s, output_tokens=1, body=b"", session=session)
            for i, (at_s, session) in enumerate(turns)
        ]
        loop = open_loop(SlowSender(timer, 10.0), iter(ready), collected, timer, max_in_flight=3)
        await timer.run(asyncio.ensure_future(loop))
        return sorted(collected.records, key=lambda record: record.index)

    records = asyncio.run(run())
    assert [r.started_s for r in records] == [0.0, 10.0, 20.0, 3.0, 4.0, 40.0]
    assert {r.lateness_s for r in records} == {0.0}, "a held turn is due when it may come"


def test_a_bug_ends_the_loops() -> None:
    with pytest.raises(ZeroDivisionError):
        drive_open([0.0, 1.0, 2.0], seconds=1.0, body=b"bug")


def test_what_had_ended_is_kept_when_it_is_cancelled() -> None:
    async def run() -> tuple[int, int]:
        timer, collected = FakeTimer(), Collected()
        sender = SlowSender(timer, 3.0)
        loop = asyncio.ensure_future(
            open_loop(sender, requests([0.0, 1.0, 9.0]), collected, timer, max_in_flight=9)
        )
        driving = asyncio.ensure_future(timer.run(loop))
        while not collected.records:
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving
        return len(collected.records), sender.num_now

    num_records, num_running = asyncio.run(run())
    assert (num_records, num_running) == (1, 0), "one had ended, none goes on"
