"""How all ranks are, as the engine's statistics tell it."""

from __future__ import annotations

from moe_serve.cluster.members.roster import Roster
from moe_serve.engine.request.pool_stats import PoolStats
from moe_serve.engine.request.rank_status import RankStatus


def statuses(roster: Roster, pools: PoolStats) -> tuple[RankStatus, ...]:
    """A snapshot, attention ranks first. On any thread."""
    busy = {use.name: use.busy_ratio for use in pools.ranks}
    return tuple(
        RankStatus(
            name=name,
            pool=state.name.role,
            phase=state.phase.value,
            num_restarts=max(0, state.num_starts - 1),
            busy_ratio=busy.get(name),
        )
        for name, state in roster.states.items()
    )
