"""The phases of the ranks, which only the engine thread changes, and their heartbeats."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from moe_serve.cluster.control.messages import Loaded, Order
from moe_serve.cluster.control.rank_link import RankLink
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.current_placement import Held
from moe_serve.engine.request.stats import PoolStats, RankStatus
from moe_serve.errors import ChannelClosedError

DEFAULT_MISSES = 3

R = TypeVar("R")  # the type of a rank's name


class RankPhase(enum.Enum):
    """The phases of a rank, in order. A lost rank goes back to the first."""

    STARTING = "starting"  # the process was started, or will be
    LOADING = "loading"  # it has connected and loads its weights
    READY = "ready"  # it waits for the next epoch
    SERVING = "serving"  # it is in the epoch


@dataclass(slots=True)
class RankState:
    """The state of one rank."""

    name: RankName
    phase: RankPhase = RankPhase.STARTING
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
        return self.phase in (RankPhase.READY, RankPhase.SERVING)

    def send(self, order: Order) -> None:
        """Sends an order to a rank that may be gone; the link's reader reports a loss."""
        if self.link is not None:
            with contextlib.suppress(ChannelClosedError):
                self.link.send(order)

    def lose(self) -> None:
        """Returns to the first phase and closes the link."""
        link, self.link = self.link, None
        self.lost_start = self.num_starts
        self.phase, self.loaded, self.extra = RankPhase.STARTING, None, {}
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
        return [s for s in self.all(role) if s.phase is RankPhase.SERVING]


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


@dataclass(frozen=True, slots=True)
class Silence(Generic[R]):
    """`rank` has sent no heartbeat for `seconds`."""

    rank: R
    seconds: float


class Heartbeats(Generic[R]):
    """Keeps the last heartbeat of each rank. A rank is late after `misses` periods without one.

        period 1 s, misses 3, last beat at t = 10: late from t = 13

    Any message from a rank may count as a heartbeat. A rank is watched from its first one until
    `forget`, so call `beat` for it once when it is admitted.
    """

    def __init__(
        self,
        period_s: float,
        misses: int = DEFAULT_MISSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert period_s > 0 and misses > 0, f"{period_s} s, {misses} misses"
        self._limit_s = period_s * misses
        self._clock = clock
        self._last_s: dict[R, float] = {}

    def beat(self, rank: R) -> None:
        self._last_s[rank] = self._clock()

    def forget(self, rank: R) -> None:
        """Stops watching a rank, which has left or is fenced off."""
        self._last_s.pop(rank, None)

    def excuse(self) -> None:
        """Forgives all silences so far, because this process itself has not read the messages."""
        now_s = self._clock()
        self._last_s = dict.fromkeys(self._last_s, now_s)

    def late(self) -> list[Silence[R]]:
        """Returns the ranks that are late, the longest silence first."""
        now_s = self._clock()
        silences = [Silence(rank, now_s - last_s) for rank, last_s in self._last_s.items()]
        late = [item for item in silences if item.seconds >= self._limit_s]
        return sorted(late, key=lambda item: -item.seconds)
