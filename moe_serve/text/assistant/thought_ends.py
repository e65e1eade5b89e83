"""The markers of an answer's reasoning, for whoever has to end it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtEnds:
    """`closings`: what a model ends it with. The first ends it when it has lasted too long, and
    `following` then opens what comes next. `can_reopen`: it may begin anywhere, and more than once;
    else at the answer's beginning only."""

    opening: str
    closings: tuple[str, ...]
    following: str = ""
    can_reopen: bool = False
