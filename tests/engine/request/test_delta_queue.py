"""The queue between the engine and the reader of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.request import FinishReason, TokenDelta, TokenLogprob


def delta(number: int, **fields: Any) -> TokenDelta:
    return TokenDelta(request_id="r", token_ids=(number,), **fields)


async def read(queue: DeltaQueue) -> list[TokenDelta]:
    await queue.wait()
    return queue.take()


async def waiting(queue: DeltaQueue) -> asyncio.Task[list[TokenDelta]]:
    reading = asyncio.create_task(read(queue))
    await asyncio.sleep(0)
    assert not reading.done()
    return reading


def test_a_reader_waits_for_the_first_and_takes_all_in_order() -> None:
    async def scenario() -> None:
        queue = DeltaQueue()
        reading = await waiting(queue)
        assert queue.is_empty
        for number in range(3):
            queue.put(delta(number))
        assert await reading == [delta(0), delta(1), delta(2)]
        assert queue.is_empty
        queue.put(delta(3))
        assert await read(queue) == [delta(3)]

    asyncio.run(scenario())


@pytest.mark.parametrize("has_come", [False, True])
def test_a_reader_that_is_cancelled_loses_nothing(has_come: bool) -> None:
    async def scenario() -> None:
        queue = DeltaQueue()
        reading = await waiting(queue)
        if has_come:
            queue.put(delta(1))
        reading.cancel()  # before it came to run
        with pytest.raises(asyncio.CancelledError):
            await reading
        if not has_come:
            queue.put(delta(1))
        assert await read(queue) == [delta(1)]

    asyncio.run(scenario())


class Listener:
    """Takes deltas in the reader's place."""

    def __init__(self, queue: DeltaQueue) -> None:
        self._queue = queue
        self.taken: list[list[TokenDelta]] = []
        self.is_willing = True
        queue.listen(self)

    def __call__(self) -> bool:
        if self.is_willing:
            self.taken.append(self._queue.take())
        return self.is_willing


def with_listener(
    scenario: Callable[[DeltaQueue, Listener], Coroutine[Any, Any, None]],
) -> None:
    async def whole() -> None:
        queue = DeltaQueue()
        await scenario(queue, Listener(queue))

    asyncio.run(whole())


def test_a_listener_spares_the_reader_that_waits() -> None:
    async def scenario(queue: DeltaQueue, listener: Listener) -> None:
        reading = await waiting(queue)
        queue.put(delta(1))
        assert queue.add(delta(2)) and not queue.add(delta(3))
        queue.tell()
        assert listener.taken == [[delta(1)], [delta(2), delta(3)]]
        await asyncio.sleep(0)
        assert not reading.done()
        listener.is_willing = False
        queue.put(delta(4))
        assert await reading == [delta(4)]

    with_listener(scenario)


def test_a_listener_does_not_overtake_a_reader_that_is_busy() -> None:
    async def scenario(queue: DeltaQueue, listener: Listener) -> None:
        queue.put(delta(1))  # nobody waits yet
        reading = asyncio.create_task(read(queue))
        queue.put(delta(2))
        assert await reading == [delta(1), delta(2)]
        queue.put(delta(3))  # the reader does something else
        assert await read(queue) == [delta(3)]
        assert listener.taken == []

    with_listener(scenario)


def test_a_reader_that_was_woken_is_not_overtaken() -> None:
    async def scenario(queue: DeltaQueue, listener: Listener) -> None:
        reading = await waiting(queue)
        listener.is_willing = False
        queue.put(delta(1))
        listener.is_willing = True
        queue.put(delta(2))
        assert await reading == [delta(1), delta(2)]
        assert listener.taken == []

    with_listener(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"finish_reason": FinishReason.LENGTH},
        {"finish_reason": FinishReason.ERROR},
        {"logprobs": (TokenLogprob(1, -0.1, 1, ()),)},
        {"prompt_logprobs": (None,)},
    ],
)
def test_ends_and_log_probabilities_are_the_readers(fields: dict[str, Any]) -> None:
    """The end is told in the request's own task; long log probabilities are written in a thread."""

    async def scenario(queue: DeltaQueue, listener: Listener) -> None:
        reading = await waiting(queue)
        queue.add(delta(1))
        queue.add(delta(2, **fields))
        queue.tell()
        assert await reading == [delta(1), delta(2, **fields)]
        assert listener.taken == []

    with_listener(scenario)


def test_what_a_listener_raises_is_raised_for_the_reader_alone() -> None:
    async def scenario() -> None:
        queue = DeltaQueue()

        def fail() -> bool:
            raise ValueError("a format went wrong")

        queue.listen(fail)
        reading = await waiting(queue)
        queue.put(delta(1))
        with pytest.raises(ValueError, match="a format"):
            await reading

    asyncio.run(scenario())
