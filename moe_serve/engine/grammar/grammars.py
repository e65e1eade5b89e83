"""The grammars that were compiled last, ready to be followed by new sequences."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

import llguidance

from moe_serve.engine.constraint import Constraint
from moe_serve.engine.grammar.compiler import compile_constraint
from moe_serve.engine.grammar.limits import MAX_KEPT
from moe_serve.engine.grammar.vocabulary import Vocabulary


def digest(constraint: Constraint) -> bytes:
    """By which a constraint is remembered, however large it is."""
    kind, lead = constraint.kind, constraint.lead
    return hashlib.sha256(f"{kind} {len(lead)}\n{lead}{constraint.source}".encode()).digest()


class Grammars:
    """Of one model. Safe to use from several threads: the server's compile, the engine's follow."""

    def __init__(self, read: Callable[[], Vocabulary], max_kept: int = MAX_KEPT) -> None:
        """`read` is called when the first constraint comes."""
        self._read, self._max_kept = read, max_kept
        self._kept: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return self._read()

    def has(self, constraint: Constraint) -> bool:
        """Whether `matcher` need not compile it. A GBNF grammar is kept as the Lark that it is."""
        with self._lock:
            return digest(constraint) in self._kept

    def matcher(self, constraint: Constraint) -> llguidance.LLMatcher:
        """A new one, at the beginning. Raises InvalidGrammarError."""
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
