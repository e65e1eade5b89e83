"""Finds stop strings in text that arrives in pieces, however it is cut.

One Knuth-Morris-Pratt automaton per stop string: its state is the length of the longest prefix of
the stop string that the text ends with. Exactly that much must be held back, so

    text so far = shown + held,   len(held) = the largest state

The cost is constant per character, also for hostile stop strings ("aaaa..."). The tables of the
automata do not change, so all sequences of a request share them.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request and their tables; built once for all its sequences."""

    def __init__(self, stops: Sequence[str]) -> None:
        unique = sorted(set(stops), key=len, reverse=True)
        self.tables = [(stop, _fallback_table(stop)) for stop in unique]  # longest first
        self.first_chars = frozenset(stop[0] for stop in unique)


def _fallback_table(stop: str) -> list[int]:
    """Builds the table: [k] is the length of the longest proper prefix of `stop[:k]` that also ends
    it.

        "abab" -> [0, 0, 0, 1, 2]
    """
    table = [0] * (len(stop) + 1)
    border = 0
    for k in range(1, len(stop)):
        while border and stop[k] != stop[border]:
            border = table[border]
        border += stop[k] == stop[border]
        table[k + 1] = border
    return table


class _Automaton:
    """Follows one stop string through the text, one character at a time."""

    __slots__ = ("_fallback", "state", "stop")

    def __init__(self, stop: str, fallback: Sequence[int]) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = fallback

    def step(self, char: str) -> bool:
        """Returns whether the stop string ends with this character; if so, shorter borders stay
        active.
        """
        state = self.state
        while state and self.stop[state] != char:
            state = self._fallback[state]
        state += self.stop[state] == char
        is_match = state == len(self.stop)
        self.state = self._fallback[state] if is_match else state
        return is_match


class StopStringMatcher:
    """Passes text through until a stop string is complete; `matched` then names it.

    The first one to be completed wins; of two that end together, the longer one.
    """

    def __init__(self, stops: StopStrings, *, includes_stop: bool = False) -> None:
        self._automata = [_Automaton(stop, fallback) for stop, fallback in stops.tables]
        self._first_chars = stops.first_chars
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, is_armed: bool = True) -> str:
        """Returns the text that can be shown now.

        A stop string that completes while not armed is text.
        """
        assert self.matched is None, "no text may follow a stop string"
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        self._held += text
        start = len(self._held) - len(text)
        for i in range(start, len(self._held)):
            stop = self._step(self._held[i])
            if stop is not None and is_armed:
                end = i + 1 if self._includes_stop else i + 1 - len(stop)
                shown, self._held, self.matched = self._held[:end], "", stop
                return shown
        num_held = max(automaton.state for automaton in self._automata)
        cut = len(self._held) - num_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Returns the held text when no text follows."""
        shown, self._held = self._held, ""
        return shown

    def _step(self, char: str) -> str | None:
        found = None
        for automaton in self._automata:  # longest first
            if automaton.step(char) and found is None:
                found = automaton.stop
        return found
