"""Where constraints enter: judged once in a worker process, and remembered by their digests."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from moe_serve.engine.constraint import Constraint
from moe_serve.engine.grammar.frames import Verdict
from moe_serve.engine.grammar.grammars import Grammars, digest
from moe_serve.engine.grammar.guard import Guard
from moe_serve.engine.grammar.limits import MAX_VERDICTS, MAX_WAITING
from moe_serve.engine.grammar.source_check import check_source
from moe_serve.errors import InvalidGrammarError, ServerOverloadedError


class GrammarGate:
    """Of one model. `check` blocks; `admit` is for an event loop, which goes on meanwhile."""

    def __init__(self, grammars: Grammars, guard: Guard | None = None) -> None:
        self.grammars, self._guard = grammars, guard or Guard()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # without converted sources
        self._lock = threading.Lock()  # one question at a time
        self._thread: ThreadPoolExecutor | None = None
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._verdicts)

    def check(self, constraint: Constraint) -> Constraint:
        """The constraint as engines take it: GBNF becomes Lark. Raises InvalidGrammarError."""
        check_source(constraint)
        with self._lock:
            verdict = self._verdicts.get(digest(constraint))
            if verdict is None or (verdict.why is None and constraint.kind == "gbnf"):
                verdict = self._judge(constraint)
        return _outcome(verdict, constraint)

    async def admit(self, constraint: Constraint) -> Constraint:
        """The same. Raises ServerOverloadedError too, if too many wait for theirs."""
        verdict = self._verdicts.get(digest(constraint))
        if verdict is not None and (verdict.why is not None or self.grammars.has(constraint)):
            return _outcome(verdict, constraint)
        if self._num_waiting >= MAX_WAITING:
            raise ServerOverloadedError(
                f"{self._num_waiting} grammars wait to be compiled, at most {MAX_WAITING} may. "
                "Try again later.",
                retry_after_s=1.0,
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moe-serve-grammar")
        self._num_waiting += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, self._check_and_keep, constraint
        )
        work.add_done_callback(self._count_down)
        return await asyncio.shield(work)

    def close(self) -> None:
        """End the worker process. The gate may be used again."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        with self._lock:
            self._guard.close()

    def _check_and_keep(self, constraint: Constraint) -> Constraint:
        """Compiled here too, so that the engine of this process finds it ready."""
        checked = self.check(constraint)
        self.grammars.matcher(checked)
        return checked

    def _count_down(self, work: asyncio.Future[Constraint]) -> None:
        self._num_waiting -= 1
        if not work.cancelled():
            work.exception()  # whoever asked may have gone: nobody else looks at it

    def _judge(self, constraint: Constraint) -> Verdict:
        if not self.grammars.vocabulary.eos_ids:
            raise InvalidGrammarError("This model has no end of text: its answers cannot end.")
        verdict = self._guard.judge(constraint, self.grammars.vocabulary)
        self._verdicts[digest(constraint)] = Verdict(why=verdict.why, place=verdict.place)
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


def _outcome(verdict: Verdict, constraint: Constraint) -> Constraint:
    if verdict.why is not None:
        raise InvalidGrammarError(verdict.why, place=verdict.place)
    return verdict.constraint or constraint
