"""Rests of a thread that reads an adapter beside steps.

Python runs one thread at a time, so the engine's thread waits while the other one makes small
tensors. A read that rests after every few of them leaves the lock to the engine: a wait is short,
and few steps have one.
"""

from __future__ import annotations

import time

_PIECE_S = 0.0002  # processor time between two rests
_REST = 4.0  # length of a rest, of the work before it
_LONGEST_S = 0.002  # of a rest: a machine that is short of cores makes the work look long


class LoadRests:
    """Call it after each small part of a load. It sleeps if enough was done since the last rest.
    One load runs at a time."""

    def __init__(self) -> None:
        self._is_on = False
        self._rested_at = 0.0  # on the clock of this thread's processor time

    def begin(self) -> None:
        """From now on, loads run beside steps."""
        self._is_on = True

    def start_load(self) -> None:
        """Begins to count the work of the thread that calls it."""
        self._rested_at = time.thread_time()

    def __call__(self) -> None:
        if not self._is_on:
            return
        worked_s = time.thread_time() - self._rested_at
        if worked_s >= _PIECE_S:
            time.sleep(min(_REST * worked_s, _LONGEST_S))
            self._rested_at = time.thread_time()
