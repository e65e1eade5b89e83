"""The load of one attention rank, for routers and dashboards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """A snapshot of one rank's scheduler, filled by the coordinator."""

    name: str
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
