"""Measures how well any forecast could do that knows the queue and every length, but not the
requests that are still to come.

At some arrivals the simulation is copied several times (`os.fork`). Each copy goes on with other
requests in place of the real ones: stretches of the recent arrivals, drawn anew. The times of the
first token in the copies are the best distribution that a forecast could state. Their median is
compared with the real time, and the share of the copies in which the target is missed with what
really happened.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deadlines.policies import Policy
from deadlines.setting import Setting
from moe_serve.bench.simulated_requests import jobs_of
from moe_serve.simulate.simulated_cell import SimulatedCell
from moe_serve.simulate.simulation import make_cells
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest, StepsDone
from moe_serve.simulate.world import World

_NUM_RECENT, _LEAST_RECENT = 256, 32
_STRETCH = 64  # arrivals that stay together when they are drawn
_FIRST_FUTURE_INDEX = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """One arrival: the forecast that the server gave, the times of the first token in the copies,
    and in the real run (None: it was refused or ended before)."""

    tier: str
    at_s: float
    target_s: float
    predicted_s: float | None
    is_refused: bool
    copies: tuple[float, ...]
    actual_s: float | None

    @property
    def miss_share(self) -> float:
        """The share of the copies in which the target is missed."""
        return float(np.mean(np.array(self.copies) > self.target_s))


class CopyingWorld(World):
    """A world of one cell that looks into the futures of every `every`-th arrival."""

    def __init__(
        self, cells: Sequence[SimulatedCell], every: int, num_copies: int, seed: int
    ) -> None:
        super().__init__(cells)
        self._every, self._num_copies = every, num_copies
        self._draw = random.Random(seed)
        self._recent: deque[SimulatedRequest] = deque(maxlen=_NUM_RECENT)
        self._wanted: int | None = None  # in a copy: the request whose first token is awaited
        self._pipe = -1
        self.futures: dict[int, tuple[float, ...]] = {}

    def _arrive(self, at_s: float, job: SimulatedRequest) -> None:
        if self._wanted is None:
            if job.index % self._every == 0 and len(self._recent) >= _LEAST_RECENT:
                times = [self._copy(at_s, job, seed) for seed in range(self._num_copies)]
                self.futures[job.index] = tuple(times)
            self._recent.append(job)
        super()._arrive(at_s, job)

    def _is_refused(self, job: SimulatedRequest, times: RequestTimes) -> bool:
        is_refused = super()._is_refused(job, times)
        if job.index == self._wanted:
            times.is_refused, times.error = False, None
            return False
        return is_refused

    def _copy(self, at_s: float, job: SimulatedRequest, seed: int) -> float:
        """Returns the time to the first token in a copy."""
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            self._wanted, self._pipe = job.index, write_end
            draw = random.Random(1000 * job.index + seed)
            self._jobs = self._drawn(at_s, draw)
            super()._arrive(at_s, job)
            self._send_next(at_s)
            self._handle_events()
            os._exit(1)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return float(text) if text else float("inf")

    def _drawn(self, at_s: float, draw: random.Random) -> Iterator[SimulatedRequest]:
        """Yields requests to come: stretches of the recent ones, with their times."""
        recent, index = list(self._recent), _FIRST_FUTURE_INDEX
        span = recent[-1].at_s - recent[0].at_s
        gap = span / max(1, len(recent) - 1)
        while True:
            first = draw.randrange(max(1, len(recent) - _STRETCH))
            for before, each in zip(
                recent[first:], recent[first + 1 : first + _STRETCH], strict=False
            ):
                at_s += each.at_s - before.at_s
                index += 1
                yield replace(each, at_s=at_s, index=index)
            at_s += gap

    def _end(self, index: int, done: StepsDone) -> None:
        super()._end(index, done)
        if self._wanted is None:
            return
        running = self._running[0].get(str(self._wanted))
        found = running or next((t for t in self._done if t.index == self._wanted), None)
        if found is None:
            return
        if found.token_times or found.error:
            late = float("inf")
            taken = found.token_times[0] - found.due_s if found.token_times else late
            os.write(self._pipe, repr(taken).encode())
            os._exit(0)


def foresee(
    setting: Setting, policy: Policy, load: float, *, every: int, num_copies: int
) -> list[Foreseen]:
    """Simulates a run and looks into the futures of some of its arrivals."""
    mix = setting.tiers(has_tpot=policy.has_tpot, has_priorities=policy.has_priorities)
    run = setting.at(load, mix, policy.scheduler(setting), is_strict=policy.is_strict)
    cells = make_cells(run.model, run.settings)
    world = CopyingWorld(cells, every, num_copies, run.workload.seed)
    slots = list(run.workload.slots())
    jobs = jobs_of(slots, run.workload.seed, run.workload.tiers, is_strict=run.is_strict)
    found = []
    for times in world.run(jobs):
        copies = world.futures.get(times.index)
        if copies is None:
            continue
        target_s = times.service.targets.ttft_s
        assert target_s is not None, "all tiers have a target"
        first_s = times.token_times[0] - times.due_s if times.token_times else None
        found.append(
            Foreseen(
                tier=times.service.tier, at_s=times.due_s, target_s=target_s,
                predicted_s=times.predicted_ttft_s, is_refused=times.is_refused, copies=copies,
                actual_s=first_s,
            )
        )  # fmt: skip
    return found
