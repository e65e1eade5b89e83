"""A step under way: who computes it, what came of it, and what broke it."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_serve.cluster.messages import StepDone


@dataclass(slots=True)
class Flight:
    """One attempt at a step."""

    step: int
    waiting: set[str]
    results: dict[str, StepDone | Exception] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)  # why it must be repeated, as ranks tell

    @property
    def is_broken(self) -> bool:
        return bool(self.troubles)

    @property
    def is_sound(self) -> bool:
        """Whether all who were in it came to its end."""
        return not self.troubles and all(isinstance(r, StepDone) for r in self.results.values())

    def break_up(self, why: str) -> None:
        """Each trouble once: a rank that is lost is told of by all of its peers."""
        if why not in self.troubles:
            self.troubles.append(why)

    @property
    def why(self) -> str:
        return "; ".join(self.troubles)
