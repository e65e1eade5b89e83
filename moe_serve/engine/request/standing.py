"""The state of a request that decides when it is served: its deadline, its age and its past.

It stays with the sequence when a rank is lost. Times named `_s` are on the steady clock
(`moe_serve/engine/service/steady_clock.py`) of the sequence's cell, those named `_at` on the
engine's clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_serve.clock import Clock

MAX_URGENT_PREEMPTIONS = 2  # for a seat; of a runaway, for whatever reason


@dataclass(slots=True)
class Standing:
    """The standing of one request. It is made when the request is queued on a server with service
    tiers.
    """

    queued_s: float
    deadline_s: float  # virtual: of the first token, or the latest start of the answer
    clock: Clock  # the steady clock of the cell that the sequence is in, or was in last
    first_due_s: float = math.inf  # when a strict request without a first token ends
    last_due_s: float = math.inf  # when a strict request ends in any case
    tier: int = 0  # its place in the configuration
    tenant: int = 0  # its place in `Shares`
    num_left: int = 0  # prompt tokens to compute that were not in the cache when it was queued
    raw_s: float | None = None  # forecast of its first token, uncorrected; None: not measured yet
    is_promised: bool = (
        False  # it was accepted although its target could have been a reason to refuse it
    )
    first_token_at: float | None = None
    num_urgent_preemptions: int = 0
    is_relegated: bool = False
    output_limit: float = math.inf  # tokens with which its answer is a runaway, set at its arrival
    is_runaway: bool = False  # its answer has so many tokens

    @property
    def may_yield(self) -> bool:
        """True for a runaway that gives its seat to a request that waits."""
        return self.is_runaway and self.num_urgent_preemptions < MAX_URGENT_PREEMPTIONS

    @property
    def is_demoted(self) -> bool:
        """True for a runaway that waits behind its tier. A runaway that was preempted more often
        waits like every other preempted request, so that it comes to an end.
        """
        return self.is_runaway and self.num_urgent_preemptions <= MAX_URGENT_PREEMPTIONS

    def put_back(self, now_s: float) -> None:
        """Notes a preemption of a runaway, whose age counts anew if it is demoted."""
        self.num_urgent_preemptions += 1
        if self.is_demoted:
            self.queued_s = now_s

    @property
    def due_s(self) -> float:
        """Returns when a strict request ends in its present state; infinite for other requests."""
        first_due_s = self.first_due_s if self.first_token_at is None else math.inf
        return min(first_due_s, self.last_due_s)
