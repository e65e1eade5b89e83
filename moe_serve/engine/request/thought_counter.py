"""Counts an answer's reasoning tokens against its budget and forces the tokens that end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from operator import attrgetter
from typing import Any

from moe_serve.engine.request.thinking_markers import ThinkingMarkers

_NUM_KEPT = 64  # reads that can be undone without reading the whole answer again
_FIELDS = (
    "_num_read",
    "_num_spent",
    "_is_inside",
    "_has_closed",
    "_may_open",
    "_first",
    "_since",
    "_rest",
    "forced",
    "barred",
)
_state_of = attrgetter(*_FIELDS)  # what `go_back` restores


class ThoughtCounter:
    """The reasoning state of one sequence, kept by its sampler.

    It reads the answer's new tokens on each call and depends on nothing else, so it continues after
    a preemption and catches up on another rank. It can go back, too.

    With a budget of 2, the closing marker [7, 8], and an answer that begins inside:

        answer   4  4  7  8  5        4  7  8  5
        forced   .  .  7  8  .        .  .  8  .      (the model began, and must finish)
    """

    __slots__ = (*_FIELDS, "_begin", "_budget", "_markers", "_past")

    def __init__(self, markers: ThinkingMarkers, budget: int, start: int) -> None:
        """`start` is the index of the answer in the sequence's tokens."""
        self._markers, self._budget = markers, budget
        self._is_inside, self._has_closed = markers.is_open, False
        self._may_open = not markers.is_open  # True while the answer has only blanks
        self._first = start  # index of the answer's first token after blanks
        self._since = start  # start of this section of reasoning or of other text
        self._num_read, self._num_spent = start, 0
        self._rest: tuple[int, ...] = ()  # the end marker's tokens after the closing
        self.forced = self._due((), start)  # the only token that may follow
        self.barred: int | None = None  # the token that would reopen the reasoning
        self._begin: tuple[Any, ...] = _state_of(self)
        self._past: deque[tuple[Any, ...]] = deque(maxlen=_NUM_KEPT)  # before the last reads

    @property
    def is_free(self) -> bool:
        return self.forced is None and self.barred is None

    @property
    def num_spent(self) -> int:
        """Number of reasoning tokens so far, without the closing markers."""
        return self._num_spent

    @property
    def is_over(self) -> bool:
        """True if no further token can be reasoning."""
        return not (self._is_inside or self._may_open or self._markers.can_reopen)

    def read(self, tokens: Tokens[int], stop: int | None = None) -> None:
        """Reads the new ones of the sequence's first `stop` tokens (all if None), which include the
        prompt. Goes back if it has read more."""
        stop = len(tokens) if stop is None else stop
        self.go_back(stop)
        if self._num_read < stop:
            self._past.append(_state_of(self))
        while self._num_read < stop:
            token, due = tokens[self._num_read], self.forced
            self._num_read += 1
            if self._is_inside:
                self._go_on(tokens, is_due=token == due)
            else:
                self._rest = self._rest[1:] if token == due else ()
                self._wait(tokens)
            self.forced = self._due(tokens, self._num_read)
            self.barred = self._barred(tokens, self._num_read)

    def go_back(self, stop: int) -> None:
        """Forgets the tokens from index `stop` on, and perhaps some before it, which the next
        `read` reads again."""
        if self._num_read <= stop:
            return
        while self._past and self._past[-1][0] > stop:
            self._past.pop()
        state = self._past.pop() if self._past else self._begin
        for name, value in zip(_FIELDS, state, strict=True):
            setattr(self, name, value)

    def _go_on(self, tokens: Tokens[int], *, is_due: bool) -> None:
        """Handles a token inside the reasoning, or the last token of its closing marker."""
        self._num_spent += 1
        stop, markers = self._num_read, self._markers
        closing = _found(markers.closings, tokens, self._since, stop)
        if closing is None:
            return
        self._num_spent -= len(closing)
        self._is_inside, self._has_closed, self._since = False, True, stop
        if is_due and markers.end[: len(closing)] == closing:
            self._rest = markers.end[len(closing) :]

    def _wait(self, tokens: Tokens[int]) -> None:
        """Handles a token outside the reasoning, or the last token of its opening marker."""
        stop, markers = self._num_read, self._markers
        if markers.can_reopen:
            is_open = _found(markers.openings, tokens, self._since, stop) is not None
        elif not self._may_open:
            return
        elif self._first == stop - 1 and tokens[self._first] in markers.blanks:
            self._first = stop
            return
        else:
            begun = tuple(tokens[self._first : stop])
            is_open = begun in markers.openings
            self._may_open = any(word[: len(begun)] == begun for word in markers.openings)
        if is_open:
            self._is_inside, self._may_open, self._since = True, False, stop

    def _due(self, tokens: Tokens[int], stop: int) -> int | None:
        """Returns the token that continues or begins the end marker, if one is due."""
        if self._rest:
            return self._rest[0]
        if not self._is_inside or self._num_spent < self._budget:
            return None
        end = self._markers.end
        begun = (end[:count] for count in range(len(end) - 1, 0, -1))
        return end[len(_found(begun, tokens, self._since, stop) or ())]

    def _barred(self, tokens: Tokens[int], stop: int) -> int | None:
        if not self._has_closed or self._is_inside or self._num_spent < self._budget:
            return None
        if self._markers.can_reopen:
            for opening in self._markers.openings:
                if _found((opening[:1],), tokens, self._since, stop) and len(opening) > 1:
                    return opening[1]
        return None


def _found(
    words: Iterable[tuple[int, ...]], tokens: Tokens[int], since: int, stop: int
) -> tuple[int, ...] | None:
    """Returns the first word that `tokens[since:stop]` ends with."""
    for word in words:
        if stop - len(word) >= since and tuple(tokens[stop - len(word) : stop]) == word:
            return word
    return None
