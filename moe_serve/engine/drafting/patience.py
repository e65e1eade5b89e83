"""Decides in which steps a sequence asks for drafts, so that hopeless sequences cost next to
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_NUM_VAIN = 5  # proposals in turn without a gain, before a sequence pauses
_HOPELESS = 0.1  # expected tokens below which a proposal was not worth its time
_MAX_PAUSE, _SHORT_PAUSE = 31, 3  # steps: after hopeless proposals, and after others


@dataclass(slots=True)
class _Wait:
    """Counts what one sequence did since a draft promised it a gain."""

    num_vain: int = 0  # proposals in turn that promised no gain
    pause: int = 0  # length of the last pause, in steps


class Patience:
    """Counts the steps in which sequences had no draft that promised a gain.

    After such steps a sequence pauses for 1, then 3 steps, and for up to 31 if its drafts were
    hopeless. Pauses of one length end together, so that most steps ask for nothing. A step of a
    pause costs one lookup in a table.
    """

    def __init__(self) -> None:
        self._step = 0
        self._wakes: dict[int, int] = {}  # the step in which a sequence asks next; 0: at once
        self._waits: dict[int, _Wait] = {}

    def awake(self, sequence_ids: Iterable[int], *, has_time: bool = True) -> list[int]:
        """Counts a step, and returns the sequences that ask for a draft in it. Without `has_time`
        only those that gain or have not paused yet; the others wait, and then ask together.
        """
        self._step += 1
        last, wake_of = self._step if has_time else 0, self._wakes.get
        return [key for key in sequence_ids if wake_of(key, 0) <= last]

    def pause(self, sequence_ids: Iterable[int], least: int = 0) -> int:
        """Returns the number of steps after this one in which no sequence asks: at least `least`,
        unless one is new or gains."""
        wake_of = self._wakes.get
        first = min([wake_of(key, 0) for key in sequence_ids], default=0)
        return max(least, first - self._step - 1) if first else 0

    def skip(self, num_steps: int) -> None:
        """Counts steps in which no sequence asked."""
        self._step += num_steps

    def in_vain(self, sequence_id: int, expected: float | None) -> None:
        """Notes a step in which a draft promised no gain, with the number of tokens to expect of
        it; None: there was no draft."""
        wait = self._wait(sequence_id)
        wait.num_vain += 1
        if wait.num_vain >= _NUM_VAIN:
            is_hopeless = expected is not None and expected < _HOPELESS
            most = _MAX_PAUSE if is_hopeless else _SHORT_PAUSE
            wait.pause = min(1 + 2 * wait.pause, most)
        if wait.pause:
            self._wakes[sequence_id] = (self._step // (1 + wait.pause) + 1) * (1 + wait.pause)

    def gains(self, sequence_ids: Iterable[int]) -> None:
        """Notes that drafts of these sequences are verified because a gain is expected."""
        for sequence_id in sequence_ids:
            wait = self._wait(sequence_id)
            wait.num_vain = wait.pause = self._wakes[sequence_id] = 0

    def accepted(self, sequence_id: int) -> None:
        """Notes that a token of the sequence's draft was accepted."""
        self._wait(sequence_id).pause = self._wakes[sequence_id] = 0

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops the state of sequences that have ended or moved away."""
        for sequence_id in sequence_ids:
            self._waits.pop(sequence_id, None)
            self._wakes.pop(sequence_id, None)

    def _wait(self, sequence_id: int) -> _Wait:
        wait = self._waits.get(sequence_id)
        if wait is None:
            wait = self._waits[sequence_id] = _Wait()
        return wait
