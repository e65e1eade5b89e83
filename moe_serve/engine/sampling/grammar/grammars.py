"""Keeps the grammars that were compiled last, ready for new sequences."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from functools import cached_property

import llguidance

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.compiler import compile_constraint
from moe_serve.engine.sampling.grammar.limits import (
    COMPILE_TIMEOUT_S,
    LEAST_PATIENCE_S,
    MAX_COMPILING,
    MAX_KEPT,
    PATIENCE_SHARE,
)
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.errors import InvalidGrammarError


def digest(constraint: Constraint) -> bytes:
    """Returns the key under which a constraint of any size is remembered."""
    kind, lead = constraint.kind, constraint.lead
    return hashlib.sha256(f"{kind} {len(lead)}\n{lead}{constraint.source}".encode()).digest()


class _Patience:
    """The seconds that steps may still wait for grammars: a share of the time, saved up to a
    limit."""

    def __init__(self, now: float) -> None:
        self._left_s, self._told_at = COMPILE_TIMEOUT_S, now

    def left(self, now: float) -> float:
        earned_s, self._told_at = PATIENCE_SHARE * (now - self._told_at), now
        self._left_s = min(COMPILE_TIMEOUT_S, self._left_s + earned_s)
        return self._left_s

    def spend(self, seconds: float) -> None:
        self._left_s = max(0.0, self._left_s - seconds)


class Grammars:
    """The compiled grammars of one model. Thread-safe: the server compiles, the engine follows."""

    def __init__(
        self,
        read: Callable[[], Vocabulary],
        max_kept: int = MAX_KEPT,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`read` reads the vocabulary; it is called at the first constraint."""
        self._read, self._max_kept, self._clock = read, max_kept, clock
        self._kept: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(MAX_COMPILING, "moe-serve-grammar-step")
        self._compiling: dict[bytes, Future[llguidance.LLMatcher]] = {}
        self._patience = _Patience(clock())

    def __len__(self) -> int:
        return len(self._kept)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return self._read()

    def has(self, constraint: Constraint) -> bool:
        """Returns whether `matcher` would find it compiled. A GBNF grammar is kept as Lark."""
        with self._lock:
            return digest(constraint) in self._kept

    def matcher_within(self, constraint: Constraint) -> llguidance.LLMatcher:
        """Returns a matcher within a step, which waits for a slow compilation only if steps waited
        little lately.

        Raises InvalidGrammarError if it waits no longer; the compilation then continues in the
        background.
        """
        if self.has(constraint):
            return self.matcher(constraint)
        assert self.vocabulary.tokenizer is not None  # compiled once, however long it takes
        key, since = digest(constraint), self._clock()
        patience_s = self._patience.left(since)
        with self._lock:
            work = self._compiling.get(key)
            if work is None:
                work = self._compiling[key] = self._threads.submit(self.matcher, constraint)
                work.add_done_callback(lambda _: self._compiling.pop(key, None))
        try:
            return work.result(max(LEAST_PATIENCE_S, patience_s)).deep_copy()
        except TimeoutError:
            raise InvalidGrammarError(
                "its grammar is not compiled yet, because this and other grammars take "
                "long: send the request again later"
            ) from None
        finally:
            self._patience.spend(self._clock() - since)

    def matcher(self, constraint: Constraint) -> llguidance.LLMatcher:
        """Returns a new matcher at the grammar's beginning. Raises InvalidGrammarError."""
        key = digest(constraint)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept.deep_copy()
        made = compile_constraint(constraint, self.vocabulary)  # others need not wait for it
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
            return made.deep_copy()
