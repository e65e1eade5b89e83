"""Draws from a seed the ranks to kill or freeze, and the times."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from typing import Literal

import psutil

from soak.served import Served

_WAKE_S = 4.0  # after it was frozen; by then it is fenced


@dataclass(frozen=True, slots=True)
class Blow:
    """`at`: seconds from the start."""

    at: float
    kind: Literal["SIGKILL", "SIGSTOP"]
    victim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A blow as it was dealt; `moment` of time.monotonic."""

    blow: Blow
    moment: float
    pid: int


def draw_blows(names: list[str], num_blows: int, seconds: float, seed: int) -> list[Blow]:
    """One in every equal part of the time, at any moment of it; two of three kill at once."""
    rng = random.Random(seed)
    part = seconds / max(1, num_blows)
    return [
        Blow(
            (index + rng.random()) * part,
            "SIGSTOP" if rng.random() < 1 / 3 else "SIGKILL",
            rng.choice(names),
        )
        for index in range(num_blows)
    ]


class Striker:
    """Kills and freezes ranks; resumes frozen ones, which should have been declared dead."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.struck: list[Struck] = []
        self._frozen: list[tuple[float, psutil.Process]] = []
        self.num_woken = 0  # frozen processes that were still there

    def strike(self, blow: Blow) -> bool:
        """False if the rank has no process now, or is frozen already."""
        process = self._served.ranks().get(blow.victim)
        if process is None or self._is_frozen(process):
            return False
        try:
            if blow.kind == "SIGKILL":
                process.kill()
            else:
                process.suspend()
                self._frozen.append((time.monotonic() + _WAKE_S, process))
        except psutil.NoSuchProcess:
            return False
        self.struck.append(Struck(blow=blow, moment=time.monotonic(), pid=process.pid))
        return True

    def _is_frozen(self, process: psutil.Process) -> bool:
        return any(frozen.pid == process.pid for _, frozen in self._frozen)

    def wake_due(self) -> None:
        """SIGCONT to those whose time has come."""
        now = time.monotonic()
        due = [process for moment, process in self._frozen if moment <= now]
        self._frozen = [item for item in self._frozen if item[0] > now]
        for process in due:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
                self.num_woken += 1
