"""Hundreds of simultaneous requests leave the event loop time for other work."""

from __future__ import annotations

import asyncio
import contextlib

from moe_serve.http.edge import PER_TURN, Pace


async def turns_of(pace: Pace, count: int) -> list[int]:
    """Returns the turn of the loop in which each request began, in order of arrival."""
    turn, began = 0, [0] * count

    async def request(i: int) -> None:
        await pace.turn()
        began[i] = turn

    tasks = [asyncio.create_task(request(i)) for i in range(count)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
    return began


def test_some_begin_in_each_turn_in_their_order() -> None:
    began = asyncio.run(turns_of(Pace(), 50))
    assert began == sorted(began), "nobody overtakes"
    assert max(began.count(turn) for turn in set(began)) <= PER_TURN
    assert max(began) <= 50 // PER_TURN + 4, "nor waits for longer than those before it take"


def test_whoever_is_alone_does_not_wait() -> None:
    async def main() -> list[list[int]]:
        pace = Pace()
        return [await turns_of(pace, 1) for _ in range(3)]

    assert asyncio.run(main()) == [[0], [0], [0]]


def test_clients_that_leave_while_they_wait() -> None:
    async def main() -> int:
        pace, num_begun = Pace(), 0

        async def request() -> None:
            nonlocal num_begun
            await pace.turn()
            num_begun += 1

        tasks = [asyncio.create_task(request()) for _ in range(40)]
        await asyncio.sleep(0)
        for task in tasks[10:30]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not pace._waiting
        return num_begun

    assert 20 <= asyncio.run(main()) <= 40


def test_a_loop_that_ended_in_mid_turn_holds_nobody_of_the_next_up() -> None:
    pace, loop = Pace(), asyncio.new_event_loop()

    def begin() -> None:
        with contextlib.suppress(StopIteration):
            pace.turn().send(None)
        loop.stop()  # before it comes round

    loop.call_soon(begin)
    loop.run_forever()
    began = asyncio.run(asyncio.wait_for(turns_of(pace, 50), 10))
    assert max(began) <= 50 // PER_TURN + 4
    loop.close()
