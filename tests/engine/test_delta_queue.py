"""The queue between the engine and the reader of an answer."""

from __future__ import annotations

import asyncio

import pytest

from moe_serve.engine.delta_queue import DeltaQueue
from moe_serve.engine.request import TokenDelta


def delta(number: int) -> TokenDelta:
    return TokenDelta(request_id="r", token_ids=(number,))


def test_a_reader_waits_for_the_first_and_takes_all_in_order() -> None:
    async def scenario() -> None:
        queue = DeltaQueue()
        reading = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        assert not reading.done() and queue.is_empty
        for number in range(3):
            queue.put(delta(number))
        assert await reading == [delta(0), delta(1), delta(2)]
        assert queue.is_empty
        queue.put(delta(3))
        assert await queue.take() == [delta(3)]

    asyncio.run(scenario())


def test_what_comes_after_a_reader_has_left_is_kept_for_the_next() -> None:
    async def scenario() -> None:
        queue = DeltaQueue()
        reading = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        queue.put(delta(1))
        assert await queue.take() == [delta(1)]

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_when_something_has_come_loses_nothing() -> None:
    async def scenario() -> None:
        queue = DeltaQueue()
        reading = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        queue.put(delta(1))
        reading.cancel()  # before it came to run
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await queue.take() == [delta(1)]

    asyncio.run(scenario())
