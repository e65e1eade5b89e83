"""The ranks of a cluster and the phase of each. Only the engine thread changes it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from moe_serve.cluster.control.messages import Loaded, Order
from moe_serve.cluster.control.rank_link import RankLink
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.expert_cover import Held
from moe_serve.engine.request.stats import PoolStats, RankStatus
from moe_serve.errors import ChannelClosedError


class Phase(enum.Enum):
    """The phases of a rank, in order. A lost rank goes back to the first."""

    STARTING = "starting"  # the process was started, or will be
    LOADING = "loading"  # it has connected and loads its weights
    READY = "ready"  # it waits for the next epoch
    SERVING = "serving"  # it is in the epoch


@dataclass(slots=True)
class RankState:
    """The state of one rank."""

    name: RankName
    phase: Phase = Phase.STARTING
    link: RankLink | None = None
    loaded: Loaded | None = None
    num_starts: int = 0  # number of the present process, counted from 1
    started_at: float = 0.0
    ready_at: float = 0.0
    lost_start: int = 0  # the last process that was given up
    num_failures: int = 0  # successive processes that did not last
    extra: Held = field(default_factory=dict)  # experts beside its own

    @property
    def is_present(self) -> bool:
        """Returns True if the rank is in the epoch, or can be in the next one."""
        return self.phase in (Phase.READY, Phase.SERVING)

    def send(self, order: Order) -> None:
        """Sends an order to a rank that may be gone; the link's reader reports a loss."""
        if self.link is not None:
            with contextlib.suppress(ChannelClosedError):
                self.link.send(order)

    def lose(self) -> None:
        """Returns to the first phase and closes the link."""
        link, self.link = self.link, None
        self.lost_start = self.num_starts
        self.phase, self.loaded, self.extra = Phase.STARTING, None, {}
        if link is not None:
            link.close()


class Roster:
    """All ranks by name."""

    def __init__(self, names: Iterable[RankName]) -> None:
        self.states = {str(name): RankState(name) for name in names}

    def __getitem__(self, name: str) -> RankState:
        return self.states[name]

    def __contains__(self, name: str) -> bool:
        return name in self.states

    def all(self, role: str | None = None) -> list[RankState]:
        return [s for s in self.states.values() if role is None or s.name.role == role]

    def present(self, role: str | None = None) -> list[RankState]:
        """Returns the ranks that are in the epoch, or can be in the next one."""
        return [s for s in self.all(role) if s.is_present]

    @property
    def has_both_pools(self) -> bool:
        return bool(self.present("attention") and self.present("expert"))

    def serving(self, role: str | None = None) -> list[RankState]:
        return [s for s in self.all(role) if s.phase is Phase.SERVING]


def statuses(roster: Roster, pools: PoolStats) -> tuple[RankStatus, ...]:
    """Returns the state of all ranks, attention ranks first. On any thread."""
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
