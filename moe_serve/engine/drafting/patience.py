"""Decides in which steps a sequence asks for drafts, so that hopeless ones cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_FIRST_RETRY, _LAST_RETRY = 16, 256  # steps without a draft before one is tried again
_NUM_VAIN = 4  # proposals in turn without a gain, before asking pauses
_HOPELESS = 0.1  # expected tokens below which a proposal was not worth its time
_MAX_PAUSE, _SHORT_PAUSE = 31, 3  # steps: after hopeless proposals, and after others


@dataclass(slots=True)
class _Wait:
    """The steps of one sequence since a draft promised a gain."""

    num_silent: int = 0  # steps without a draft
    retry: int = _FIRST_RETRY  # silent steps before a draft is tried without an expected gain
    num_vain: int = 0  # proposals in turn that promised no gain
    pause: int = 0  # length of the last pause, in steps
    num_left: int = 0  # steps of the pause to come


class Patience:
    """Counts the steps in which sequences had no draft that promised a gain.

    After such steps a sequence pauses for 1, then 3 steps, and for up to 31 if its drafts were
    hopeless. It tries a draft of one token after 16, 32, ... 256 steps, to find out whether its
    luck or the cost of rows has changed.
    """

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}

    def rests(self, sequence_id: int) -> bool:
        """Count a step, and return whether the sequence pauses in it."""
        wait = self._waits.get(sequence_id)
        if wait is None:
            self._waits[sequence_id] = _Wait()
            return False
        wait.num_silent += 1
        if wait.num_left:
            wait.num_left -= 1
            return True
        return False

    def in_vain(self, sequence_id: int, expected: float | None) -> None:
        """Note a step in which a draft promised no gain, with the number of tokens to expect of it;
        None: there was no draft."""
        wait = self._waits[sequence_id]
        wait.num_vain += 1
        if wait.num_vain < _NUM_VAIN:
            return
        is_hopeless = expected is not None and expected < _HOPELESS
        most = _MAX_PAUSE if is_hopeless else _SHORT_PAUSE
        wait.pause = wait.num_left = min(1 + 2 * wait.pause, most)

    def gains(self, sequence_ids: Iterable[int]) -> None:
        """Note that drafts of these sequences are verified because a gain is expected."""
        for sequence_id in sequence_ids:
            wait = self._waits[sequence_id]
            wait.num_silent = wait.num_vain = wait.pause = wait.num_left = 0
            wait.retry = _FIRST_RETRY

    def retries(self, sequence_ids: Iterable[int], most: int) -> list[int]:
        """Return the sequences, at most `most`, that try a draft without an expected gain."""
        due = [key for key in sequence_ids if self._is_due(key)][:most]
        for sequence_id in due:
            wait = self._waits[sequence_id]
            wait.num_silent, wait.retry = 0, min(2 * wait.retry, _LAST_RETRY)
        return due

    def is_any_due(self, sequence_ids: Iterable[int]) -> bool:
        """Return whether one of the sequences would retry."""
        return any(self._is_due(key) for key in sequence_ids)

    def accepted(self, sequence_id: int) -> None:
        """Note that a token of the sequence's draft was accepted."""
        wait = self._waits.get(sequence_id)
        if wait is not None:
            wait.pause = wait.num_left = 0

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended or moved away."""
        for sequence_id in sequence_ids:
            self._waits.pop(sequence_id, None)

    def _is_due(self, sequence_id: int) -> bool:
        wait = self._waits[sequence_id]
        return wait.num_silent >= wait.retry
