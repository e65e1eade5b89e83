"""Holds back a turn of a session until the answer to the turn before has ended.

A client sends its next turn when it has read the last answer. A recording has the times of turns.
If the simulated server is slower than the recorded one, a turn comes when the earlier answer ends;
otherwise it comes at its recorded time.
"""

from __future__ import annotations

from collections import deque

from moe_serve.simulate.steps_ahead import SimulatedRequest


class Sessions:
    """The sessions with a turn in progress, and the due turns that wait for it."""

    def __init__(self) -> None:
        self._held: dict[str, deque[SimulatedRequest]] = {}  # by session in progress

    def may_come(self, job: SimulatedRequest) -> bool:
        """Notes a turn that is due. Returns False if it must wait for an earlier one."""
        if not job.session:
            return True
        if job.session in self._held:
            self._held[job.session].append(job)
            return False
        self._held[job.session] = deque()
        return True

    def turn_after(self, session: str) -> SimulatedRequest | None:
        """Notes the end of a turn. Returns the next due turn, which begins now."""
        held = self._held.get(session)
        if held:
            return held.popleft()
        self._held.pop(session, None)
        return None
