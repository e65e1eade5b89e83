"""A step under way: who computes it, what came of it, and what broke it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from moe_serve.cluster.control.messages import StepDone
from moe_serve.cluster.steps.rank_work import RankWork


@dataclass(slots=True)
class Flight:
    """One attempt at a step."""

    step: int
    epoch: int
    works: dict[str, RankWork]
    start: float  # time.perf_counter()
    waiting: set[str]
    results: dict[str, StepDone | Exception] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)  # why it must be repeated, as ranks tell

    @property
    def is_broken(self) -> bool:
        return bool(self.troubles)

    @property
    def is_sound(self) -> bool:
        """Whether all who were in it came to its end, as far as they have told."""
        return not self.troubles and all(isinstance(r, StepDone) for r in self.results.values())

    @property
    def left(self) -> dict[str, RankWork]:
        """What must be repeated, once nobody is waited for."""
        return {n: work.again for n, work in self.works.items() if n not in self.results}

    def void(self, name: str) -> None:
        """Nobody wants what this rank makes of it."""
        del self.works[name]

    def break_up(self, why: str) -> None:
        """Each trouble once: a rank that is lost is told of by all of its peers."""
        if why not in self.troubles:
            self.troubles.append(why)

    @property
    def why(self) -> str:
        return "; ".join(self.troubles)

    def describe(self) -> str:
        """For the report of a hang, on any thread."""
        seconds = time.perf_counter() - self.start
        num_tokens = sum(sum(work.rows) for work in list(self.works.values()))
        return (
            f"step {self.step} was sent out {seconds:.1f} s ago with {num_tokens} tokens; it waits "
            f"for {', '.join(sorted(self.waiting)) or 'nobody'}"
        )
