"""Simulates a server with a queue, and counts the experts of every step.

Requests arrive, wait, run and end. The number of waiting requests is kept at a multiple of the
seats, so that a policy has a choice. Every request gets a seat in the end: a request that was
passed over too often is next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from batching.policies import expert_aware
from batching.requests import LONGEST, PREFIX, Request, Routed, num_activated
from batching.tier_groups import TierGroups
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.arrival_order import FIFO
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from moe_serve.model.step_plan import SequenceSlice
from routing_predictor.requests.history import ChoiceHistory

SHORTEST = 32
REFRESH = 32
_WARM_UP, _STEPS = 150, 300
_TOKEN = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class QueueCount:
    """The results of a run: activated experts per step, and how many steps requests waited."""

    size: int
    pool: int
    policy: str
    activated: float
    ratio: float
    mean_wait: float
    longest_wait: int


@dataclass(slots=True)
class _Job:
    request: Request
    sequence: Sequence
    length: int
    arrived: int
    done: int = 0


class _Queue:
    """One run of one policy; the same seed gives the same requests in the same order."""

    def __init__(
        self, routed: Routed, size: int, pool: int, policy: BatchPolicy,
        table: SignatureTable | None, has_predictor: bool, seed: int, tiers: TierGroups | None,
    ) -> None:  # fmt: skip
        """`tiers`: waiting requests are in groups of equal urgency; None: in one group."""
        self._routed, self._size, self._pool, self._policy = routed, size, pool, policy
        self._table, self._has_predictor = table, has_predictor
        self._rng, self._history = np.random.default_rng(seed), ChoiceHistory(routed.num_experts)
        self._tiers = tiers
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._next = 0
        self.waits: list[int] = []

    def run(self, num_groups: int) -> list[int]:
        """Returns the number of activated experts of each step after the warm-up."""
        counts = []
        for step in range(_WARM_UP + _STEPS):
            self._arrive(step)
            self._admit(step)
            self._refresh()
            slices = [SequenceSlice(s.id, 1, _TOKEN, (0,), 1) for s in self._running]
            batches = self._policy.split(slices, num_groups)
            if step >= _WARM_UP:
                jobs = [[self._jobs[s.sequence_id] for s in b.slices] for b in batches]
                choices = [[job.request.choices(job.done) for job in group] for group in jobs]
                counts.append(num_activated(choices))
            self._advance()
        return counts

    def _arrive(self, step: int) -> None:
        while len(self._waiting) + len(self._running) < self._size + self._pool:
            new = self._routed.draw(8, self._rng)
            for request in new:
                length = int(self._rng.integers(SHORTEST, LONGEST + 1))
                made = GenerationRequest(
                    request_id=str(self._next),
                    prompt_token_ids=(0,) * PREFIX,
                    params=SamplingParams(),
                )
                sequence = Sequence(self._next, made)
                self._jobs[self._next] = _Job(request, sequence, length, step)
                self._waiting.append(sequence)
                if self._tiers is not None:
                    self._tiers.add(sequence, step)
                self._next += 1
            if self._has_predictor and self._table is not None:
                keys = [s.id for s in list(self._waiting)[-len(new) :]]
                self._table.put(keys, self._routed.predicted(new, 0))

    def _admit(self, step: int) -> None:
        free = self._size - len(self._running)
        started: list[Sequence] = []
        self._policy.prepare(self._waiting, self._running)
        groups = [self._waiting] if self._tiers is None else self._tiers.groups(step)
        for group in groups if free else ():
            for sequence in self._policy.candidates(group, self._running):
                sequence.is_running = True
                self._policy.started(sequence)
                started.append(sequence)
                self._running.append(sequence)
                self.waits.append(step - self._jobs[sequence.id].arrived)
                if len(started) == free:
                    break
            if len(started) == free:
                break
        for sequence in started:
            self._waiting.remove(sequence)
            if self._tiers is not None:
                self._tiers.remove(sequence)

    def _refresh(self) -> None:
        """Refreshes signatures as LiveSignatures does: after the prompt, and then every few
        tokens.
        """
        jobs = [self._jobs[s.id] for s in self._running if not self._jobs[s.id].done % REFRESH]
        if self._table is None or not jobs:
            return
        keys = [job.sequence.id for job in jobs]
        self._history.observe(
            keys, [j.request.past(j.done)[-REFRESH if j.done else 0 :] for j in jobs]
        )
        prior = None
        if self._has_predictor:
            prior = np.concatenate([self._routed.predicted([j.request], j.done) for j in jobs])
        made = self._history.signatures(keys, prior)
        assert made is not None, "choices were observed"
        self._table.put(keys, made)

    def _advance(self) -> None:
        for sequence in list(self._running):
            job = self._jobs[sequence.id]
            job.done += 1
            if job.done == job.length:
                self._running.remove(sequence)
                self._policy.forget([sequence.id])
                self._history.forget([sequence.id])
                del self._jobs[sequence.id]


def count_queue(
    routed: Routed,
    size: int,
    times: int,
    num_groups: int,
    tolerance: float,
    seed: int,
    max_passed_over: int,
    *,
    has_tiers: bool = False,
) -> list[QueueCount]:
    """Runs fifo and expert-aware on the same arrivals, with `times` as many requests as seats.
    `has_tiers`: a policy chooses only among equally urgent requests."""
    found, pool, base = [], size * times, 0.0
    names = ["fifo", "history", *(["predictor and history"] if routed.predictor else [])]
    for name in names:
        policy: BatchPolicy = FIFO
        table = None
        if name != "fifo":
            policy, table = expert_aware(64, tolerance, max_passed_over)
        tiers = TierGroups(seed) if has_tiers else None
        queue = _Queue(routed, size, pool, policy, table, name.startswith("predictor"), seed, tiers)
        activated = float(np.mean(queue.run(num_groups)))
        base = base or activated
        longest, mean = max(queue.waits), float(np.mean(queue.waits))
        if tiers is not None:
            name += f", tiers ({np.mean(tiers.group_sizes):.1f} in a group)"
        found.append(QueueCount(size, pool, name, activated, activated / base, mean, longest))
    return found
