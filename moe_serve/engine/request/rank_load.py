"""What one attention rank has to do, for those who route requests or watch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """A snapshot of one rank's own scheduler; the coordinator fills it."""

    name: str
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
