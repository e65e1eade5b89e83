"""Judges each new constraint once in a worker process, and remembers the verdict by its digest."""

from __future__ import annotations

import threading
from collections import OrderedDict

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.compile_lane import CompileLane, looks_quick
from moe_serve.engine.sampling.grammar.frames import Verdict
from moe_serve.engine.sampling.grammar.grammars import Grammars, digest
from moe_serve.engine.sampling.grammar.guard import Guard
from moe_serve.engine.sampling.grammar.limits import (
    MAX_VERDICTS,
    MAX_WAITING,
    MAX_WAITING_OF_CLIENT,
    NUM_SLOW_WORKERS,
    QUICK_TIMEOUT_S,
)
from moe_serve.engine.sampling.grammar.source_check import check_source
from moe_serve.errors import InvalidGrammarError, ServerOverloadedError


class GrammarGate:
    """The constraint check of one model. `check` blocks; `admit` is for an event loop."""

    def __init__(self, grammars: Grammars, guard: Guard | None = None) -> None:
        """`guard` is the only guard to use. By default quick constraints have a guard of their
        own, and slow ones have several."""
        self.grammars, self._guard = grammars, guard or Guard()
        self._slow = self._quick = CompileLane([self._guard])
        if guard is None:
            self._quick = CompileLane([Guard(QUICK_TIMEOUT_S)])
            self._slow = CompileLane([self._guard, *(Guard() for _ in range(1, NUM_SLOW_WORKERS))])
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # without converted sources
        self._lock = threading.Lock()  # of the verdicts

    def __len__(self) -> int:
        return len(self._verdicts)

    def check(self, constraint: Constraint) -> Constraint:
        """Returns the constraint as engines take it, with GBNF converted to Lark. Raises
        InvalidGrammarError."""
        return _outcome(self._judge(constraint, self._guard), constraint)

    async def admit(self, constraint: Constraint, client: str = "") -> Constraint:
        """Checks a constraint like `check` without blocking; clients take turns. Raises
        ServerOverloadedError if too many constraints are waiting."""
        verdict = self._verdicts.get(digest(constraint))
        if verdict is not None and (verdict.why is not None or self.grammars.has(constraint)):
            return _outcome(verdict, constraint)
        lanes = [self._quick, self._slow] if looks_quick(constraint) else [self._slow]
        for lane in lanes:
            self._check_line(lane, client)
            made = await lane.run(client, lambda guard: self._check_and_keep(constraint, guard))
            if made is not None:
                return made
        raise AssertionError("the last lane always decides")

    def _check_line(self, lane: CompileLane, client: str) -> None:
        num_own = lane.num_waiting_of(client)
        if lane.num_waiting >= MAX_WAITING or num_own >= MAX_WAITING_OF_CLIENT:
            raise ServerOverloadedError(
                f"{lane.num_waiting} grammars wait to be compiled, {num_own} of them from this "
                f"client; the limits are {MAX_WAITING} and {MAX_WAITING_OF_CLIENT} per client. "
                "Try again later.",
                retry_after_s=1.0,
            )

    def close(self) -> None:
        """Ends the worker processes. The gate may be used again."""
        self._quick.close()
        self._slow.close()

    def _check_and_keep(self, constraint: Constraint, guard: Guard) -> Constraint | None:
        """Judges a constraint and compiles it here too, so that the engine in this process finds it
        ready. Returns None if its worker was ended and one with more time may judge it."""
        verdict = self._judge(constraint, guard)
        if verdict.is_ended and guard.timeout_s < self._guard.timeout_s:
            return None
        checked = _outcome(verdict, constraint)
        self.grammars.matcher(checked)
        return checked

    def _judge(self, constraint: Constraint, guard: Guard) -> Verdict:
        """Judges a constraint. The verdict is remembered unless a worker with more time may decide
        differently."""
        check_source(constraint)
        key = digest(constraint)
        with self._lock:
            known = self._verdicts.get(key)
        if known is not None and (known.why is not None or constraint.kind != "gbnf"):
            return known
        if not self.grammars.vocabulary.eos_ids:
            raise InvalidGrammarError(
                "This model has no end-of-text token, so constrained answers cannot end."
            )
        verdict = guard.judge(constraint, self.grammars.vocabulary)
        if verdict.is_ended and guard.timeout_s < self._guard.timeout_s:
            return verdict
        with self._lock:
            self._verdicts[key] = Verdict(why=verdict.why, place=verdict.place)
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict


def _outcome(verdict: Verdict, constraint: Constraint) -> Constraint:
    if verdict.why is not None:
        raise InvalidGrammarError(verdict.why, place=verdict.place)
    return verdict.constraint or constraint
