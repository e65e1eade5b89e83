"""The attention ranks of all cells, for the carrier, and the comparison of their pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from moe_serve.cluster.control.messages import Loaded
from moe_serve.cluster.control.parcel_messages import ParcelFacts, ParcelOrder
from moe_serve.cluster.members.roster import RankState, Roster
from moe_serve.cluster.parcels.parcel import RankPlace


class CellRanks(Protocol):
    """The part of the cells that the carrier uses."""

    def loaded(self, place: RankPlace) -> Loaded | None:
        """Returns the message with which a process reported that it had loaded; None if the process
        is gone.
        """
        ...

    def send(self, place: RankPlace, order: ParcelOrder) -> None:
        """Sends an order to a process that may be gone."""
        ...


class RosterRanks:
    """Implements CellRanks for the rosters of all cells, by the number of the cell."""

    def __init__(self, rosters: Mapping[int, Roster]) -> None:
        self._rosters = dict(rosters)

    def add(self, cell: int, roster: Roster) -> None:
        """Adds the ranks of a cell that serves from now on."""
        self._rosters[cell] = roster

    def remove(self, cell: int) -> None:
        """Forgets a cell whose processes have ended."""
        self._rosters.pop(cell, None)

    def loaded(self, place: RankPlace) -> Loaded | None:
        state = self._state(place)
        return None if state is None else state.loaded

    def send(self, place: RankPlace, order: ParcelOrder) -> None:
        if (state := self._state(place)) is not None:
            state.send(order)

    def place_of(self, cell: int, rank: str) -> RankPlace:
        """Returns the present process of a rank."""
        return RankPlace(cell, rank, self._rosters[cell][rank].num_starts)

    def _state(self, place: RankPlace) -> RankState | None:
        roster = self._rosters.get(place.cell)
        state = None if roster is None else roster.states.get(place.rank)
        return state if state is not None and state.num_starts == place.start else None


def pages_refusal(source: Loaded, target: Loaded) -> str:
    """Returns why one rank cannot use the pages of another, with both values; empty if it can use
    them as if it had computed them.
    """
    ours, theirs = _facts(source), _facts(target)
    for name, a, b in (
        ("weights", source.weights_hash[:12], target.weights_hash[:12]),
        ("page size", ours.page_size, theirs.page_size),
        ("dtype", source.report.dtype, target.report.dtype),
        ("KV dtype", source.report.kv_dtype, target.report.kv_dtype),
        ("kernels", source.report.kernels, target.report.kernels),
        ("build of the kernels", source.report.build, target.report.build),
        ("device", source.report.device, target.report.device),
        ("form of quantised weights", source.report.expert_weights, target.report.expert_weights),
        ("shape of pages", ours.geometry[:12], theirs.geometry[:12]),
    ):
        if a != b:
            return f"they differ in {name}: {a} at the source and {b} at the target"
    return ""


def _facts(loaded: Loaded) -> ParcelFacts:
    assert loaded.parcels is not None, "the rank takes part in parcels"
    return loaded.parcels
