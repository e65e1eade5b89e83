"""Makes a new epoch: ranks take over the experts of lost ranks, and all members meet."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_serve.cluster.control.messages import (
    DropExperts,
    Join,
    Joined,
    Order,
    TakeExperts,
    TookExperts,
)
from moe_serve.cluster.members.current_placement import (
    CurrentPlacement,
    beyond,
    covered,
    renumbered,
)
from moe_serve.cluster.members.membership import Membership
from moe_serve.cluster.members.rank_calls import RankCalls
from moe_serve.cluster.members.roster import RankPhase, RankState
from moe_serve.pipeline.links.data_group import MEETING_TIMEOUT_S
from moe_serve.pipeline.links.meeting import MeetingPlace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Epoch:
    """The ranks that exchange data with each other, in order."""

    number: int = 0
    attention: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    starts: Mapping[str, int] = field(default_factory=dict)  # rank -> number of its process


class EpochMaker:
    """Makes epochs. The members meet at `place`, whose store the coordinator serves."""

    def __init__(
        self,
        membership: Membership,
        calls: RankCalls,
        current: CurrentPlacement,
        place: MeetingPlace,
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._membership, self._calls = membership, calls
        self._current, self._place = current, place
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._last = Epoch()
        self._refused: dict[str, int] = {}  # expert ranks that had no room for all experts

    @property
    def can_make(self) -> bool:
        """Returns True if both pools are there, and the expert ranks may have room for all
        experts."""
        roster = self._membership.roster
        return roster.has_both_pools and _starts(roster.present("expert")) != self._refused

    def make(self, number: int) -> Epoch | None:
        """Tries once with all ranks that are there. Returns None if a rank was lost meanwhile."""
        roster = self._membership.roster
        experts = roster.present("expert")
        starts = _starts(experts)
        if not experts or not self._cover(experts):
            return None
        attention, experts = roster.present("attention"), roster.present("expert")
        if not attention or _starts(experts) != starts:
            return None  # the ranks left may not hold every expert
        members = [*attention, *experts]
        epoch = Epoch(
            number,
            tuple(str(s.name) for s in attention),
            tuple(str(s.name) for s in experts),
            _starts(members),
        )
        for state in members:
            state.phase = RankPhase.SERVING
        return epoch if self._meet(epoch, self._ranks_of(experts)) else None

    def _ranks_of(self, experts: Sequence[RankState]) -> dict[int, list[list[int]]]:
        present = [state.name.index for state in experts]
        return renumbered(covered(self._current.version.placement, set(present)), present)

    def _meet(self, epoch: Epoch, ranks_of: dict[int, list[list[int]]]) -> bool:
        """Returns True if all members met. If one does not come, the others need not wait for
        it.
        """
        join = Join(
            epoch=epoch.number,
            attention_ranks=epoch.attention,
            expert_ranks=epoch.experts,
            store_host=self._place.host,
            store_port=self._place.port,
            ranks_of=ranks_of,
            placement=self._current.version.number,
        )
        names, refused = (*epoch.attention, *epoch.experts), dict[str, str]()

        def note(name: str, report: Any) -> None:
            why = "it is lost" if report is None else report.why
            if why is not None:
                if not refused:
                    self._place.call_off(epoch.number)
                refused[name] = why

        # A member may wait for a lost one until its old step's time-out, and then twice in here.
        timeout_s = self._timeout_s + 2 * MEETING_TIMEOUT_S
        self._calls.ask(dict.fromkeys(names, join), Joined, timeout_s, note)
        last, self._last = self._last, epoch
        self._place.forget(last.number)
        if refused:
            prefix = self._membership.prefix
            told = "; ".join(f"{prefix}{name}: {why}" for name, why in refused.items())
            _log.warning("epoch %d could not be formed: %s", epoch.number, told)
        return not refused

    def _cover(self, experts: Sequence[RankState]) -> bool:
        """Makes the present ranks load the experts of lost ranks. Returns False if one failed."""
        whole = self._current.version.placement
        now = covered(whole, {s.name.index for s in experts})
        orders: dict[str, Order] = {}
        for state in experts:
            needed = beyond(whole, now, state.name.index)
            missing = {
                layer: sorted(set(ids) - set(state.extra.get(layer, ())))
                for layer, ids in needed.items()
            }
            missing = {layer: ids for layer, ids in missing.items() if ids}
            if missing:
                orders[str(state.name)] = TakeExperts(experts=missing)
                for layer, ids in missing.items():
                    state.extra.setdefault(layer, []).extend(ids)
            elif state.extra and now == whole:
                orders[str(state.name)] = DropExperts()
                state.extra = {}
        answers = self._calls.ask(orders, TookExperts, self._start_timeout_s)  # a load from disk
        unable = {name: answer.why for name, answer in answers.items() if answer.why is not None}
        if unable:
            self._wait_for_others(experts, unable)
        return not unable and answers.keys() == orders.keys()

    def _wait_for_others(self, experts: Sequence[RankState], unable: Mapping[str, str]) -> None:
        """Notes that some ranks have no room for more experts, so lost ranks must come back."""
        self._refused = _starts(experts)
        for name, why in unable.items():
            full = f"{self._membership.prefix}{name}"
            _log.error("%s could not take over experts; waiting for the lost ranks: %s", full, why)
            self._membership.roster[name].extra = {}
        self._calls.ask(dict.fromkeys(unable, DropExperts()), TookExperts, self._timeout_s)


def _starts(states: Sequence[RankState]) -> dict[str, int]:
    """Returns the process number of each rank."""
    return {str(state.name): state.num_starts for state in states}
