"""Shares worker processes that judge constraints between clients.

Clients take turns, and constraints that look cheap do not wait behind those that may be costly.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.guard import Guard
from moe_serve.engine.sampling.grammar.limits import MAX_QUICK_CHARS, MAX_QUICK_COUNTS

T = TypeVar("T")

_COUNTS = re.compile(
    r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}|"
    r'"(?:min|max)(?:Length|Items|Properties)"\s*:\s*(\d*)|~\s*(\d+)(?:\.\.(\d+))?'
)


def looks_quick(constraint: Constraint) -> bool:
    """Returns whether a constraint is short and its counts (`{3,20}`, `"maxItems": 8`) have a small
    product."""
    if len(constraint.source) + len(constraint.lead) > MAX_QUICK_CHARS:
        return False
    product = 1
    for found in _COUNTS.finditer(constraint.source):
        digits = max((len(part), part) for part in found.groups("0"))[1]
        if len(digits) > 6:
            return False
        product *= max(1, int(digits))
        if product > MAX_QUICK_COUNTS:
            return False
    return True


class CompileLane:
    """A set of workers, one per guard, for one event loop. `run` waits for a free one."""

    def __init__(self, guards: list[Guard]) -> None:
        self._guards, self._free = guards, list(guards)
        self._threads: ThreadPoolExecutor | None = None
        self._lines: OrderedDict[str, deque[asyncio.Future[Guard]]] = OrderedDict()
        self.num_waiting = 0  # waiting or running

    def num_waiting_of(self, client: str) -> int:
        return len(self._lines.get(client, ()))

    async def run(self, client: str, work: Callable[[Guard], T]) -> T:
        """Runs `work` with a worker on a thread. Once begun it runs to its end, even if
        cancelled."""
        self.num_waiting += 1
        try:
            return await asyncio.shield(self._begin(await self._turn(client), work))
        finally:
            self.num_waiting -= 1

    def close(self) -> None:
        """Ends the workers. The lane may be used again."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        for guard in self._guards:
            guard.close()

    def _begin(self, guard: Guard, work: Callable[[Guard], T]) -> asyncio.Future[T]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._guards), "moe-serve-grammar")
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, work, guard)
        running.add_done_callback(lambda done: self._end(guard, done))
        return running

    def _end(self, guard: Guard, done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # the request that asked may have gone
        self._pass_on(guard)

    async def _turn(self, client: str) -> Guard:
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[Guard] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on(turn.result())
            raise

    def _pass_on(self, guard: Guard) -> None:
        """Gives the worker to the next waiting client, which then goes behind all others."""
        while self._lines:
            client, line = self._lines.popitem(last=False)
            turn = line.popleft()
            if line:
                self._lines[client] = line
            if not turn.done():
                turn.set_result(guard)
                return
        self._free.append(guard)
