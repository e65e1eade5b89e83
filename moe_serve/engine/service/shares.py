"""Shares the server between the tenants of a tier, by counters of the work done for each.

A tenant with waiting requests whose counter is more than Delta above the least one lets the others
go first. One that returns is lifted to the least counter, so idle time earns nothing (VTC, Sheng et
al., OSDI 24). Tenants without requests are remembered up to a limit; one that was forgotten starts
at the least counter.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.service_stats import MAX_TENANTS, TenantCounts, jain_index

_MAX_REMEMBERED = 4096  # tenants without requests
_FIRST_CAPACITY = 64
_Key = tuple[int, str]  # tier, tenant


@dataclass(slots=True)
class _Totals:
    """Counts the work of a tenant for reports."""

    service_s: float = 0.0
    num_finished: int = 0
    num_good: int = 0


class Shares:
    """The counters of all engines of a server. A tenant has a place (a small number) as long as it
    has open requests; places are used again."""

    def __init__(self) -> None:
        self._places: dict[_Key, int] = {}
        self._keys: list[_Key | None] = []  # by place
        self._free: list[int] = []
        self._num_open = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._num_waiting = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._tier = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._counter_s = np.zeros(_FIRST_CAPACITY)
        self._service_s = np.zeros(_FIRST_CAPACITY)  # work that is not in the totals yet
        self._idle: OrderedDict[_Key, float] = OrderedDict()  # counters, least recent first
        self._floor_s: dict[int, float] = {}  # tier -> the least counter when a tenant last waited
        self._totals: dict[_Key, _Totals] = {}

    @property
    def num_remembered(self) -> int:
        """Number of tenants with any state."""
        return len(self._places) + len(self._idle)

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return int(self._num_open.sum())

    def enter(self, tier: int, tenant: str) -> int:
        """Notes a new request. Returns the place of its tenant."""
        key = (tier, tenant)
        place = self._places.get(key)
        if place is None:
            place = self._new_place()
            self._places[key], self._keys[place] = place, key
            self._tier[place], self._num_open[place], self._num_waiting[place] = tier, 0, 0
            self._counter_s[place] = self._idle.pop(key, 0.0)
            self._service_s[place] = 0.0
        self._num_open[place] += 1
        return place

    def leave(self, place: int) -> None:
        """Notes the end of a request."""
        self._num_open[place] -= 1
        if self._num_open[place] > 0:
            return
        key = self._keys[place]
        assert key is not None, f"place {place} has no tenant"
        self._total(key).service_s += float(self._service_s[place])
        del self._places[key]
        self._keys[place] = None
        self._free.append(place)
        self._idle[key] = float(self._counter_s[place])
        if len(self._idle) > _MAX_REMEMBERED:
            self._idle.popitem(last=False)

    def wait(self, place: int) -> None:
        """Notes that a request of a tenant waits. If none did, the tenant is lifted."""
        if not self._num_waiting[place]:
            least_s = self._least(int(self._tier[place]))
            self._counter_s[place] = max(self._counter_s[place], least_s)
        self._num_waiting[place] += 1

    def stop_waiting(self, place: int) -> None:
        """Notes that a request started, or ended while it waited."""
        tier = int(self._tier[place])
        self._floor_s[tier] = self._least(tier)
        self._num_waiting[place] -= 1

    def charge(self, place: int, seconds: float) -> None:
        """Adds work that is done for a tenant."""
        self._counter_s[place] += seconds
        self._service_s[place] += seconds

    def charge_all(self, places: Items[int], seconds: Items[float]) -> None:
        """Adds the work of a step: seconds by request, and the places of their tenants."""
        work = np.bincount(places, weights=seconds, minlength=len(self._counter_s))
        self._counter_s += work
        self._service_s += work

    def are_ahead(self, delta_s: float) -> NDArray[np.bool_] | None:
        """Returns by place whether a tenant has had more than its share; None if no tenant has."""
        waiting = self._num_waiting > 0
        if len(self._places) < 2:
            return None
        counters = self._counter_s[waiting]
        if len(counters) < 2 or counters.max() - counters.min() <= delta_s:
            return None
        ahead = np.zeros(len(waiting), dtype=np.bool_)
        for tier in np.flatnonzero(np.bincount(self._tier[waiting])):
            of_tier = waiting & (self._tier == tier)
            ahead |= of_tier & (self._counter_s > self._counter_s[of_tier].min() + delta_s)
        return ahead if ahead.any() else None

    def names(self, places: Iterable[int]) -> list[tuple[int, str]]:
        """Returns the tiers and tenants of places."""
        return [key for place in places if (key := self._keys[place]) is not None]

    def counter_s(self, place: int) -> float:
        return float(self._counter_s[place])

    def finished(self, place: int, *, is_good: bool) -> None:
        """Counts an answer for the reports."""
        key = self._keys[place]
        if key is not None:
            total = self._total(key)
            total.num_finished += 1
            total.num_good += is_good

    def top(self, tiers: Iterable[str]) -> tuple[TenantCounts, ...]:
        """Returns the tenants with most service. Safe from any thread."""
        names, places, totals = list(tiers), dict(self._places), dict(self._totals)
        services = {key: total.service_s for key, total in totals.items()}
        for key, place in places.items():
            services[key] = services.get(key, 0.0) + float(self._service_s[place])
        found = []
        for key in heapq.nlargest(MAX_TENANTS, services, key=services.__getitem__):
            total = totals.get(key, _Totals())
            found.append(
                TenantCounts(
                    tier=names[key[0]],
                    tenant=key[1],
                    service_s=services[key],
                    num_finished=total.num_finished,
                    num_good=total.num_good,
                )
            )
        return tuple(found)

    @property
    def jain_index(self) -> float:
        """Evenness of the counters of the tenants with waiting requests: 1 is even."""
        return jain_index(self._counter_s[self._num_waiting > 0].tolist())

    def check_integrity(self) -> None:
        """Asserts that places and tenants agree."""
        for key, place in self._places.items():
            assert self._keys[place] == key, f"place {place} is not that of {key}"
            waiting, opened = int(self._num_waiting[place]), int(self._num_open[place])
            assert 0 <= waiting <= opened, f"{waiting} of {opened} requests of {key} wait"

    def _least(self, tier: int) -> float:
        """Returns the least counter of the tier's waiting tenants, else the last one known."""
        waiting = (self._num_waiting > 0) & (self._tier == tier)
        if waiting.any():
            return float(self._counter_s[waiting].min())
        return self._floor_s.get(tier, 0.0)

    def _total(self, key: _Key) -> _Totals:
        total = self._totals.get(key)
        if total is None:
            total = self._totals[key] = _Totals()
            if len(self._totals) > _MAX_REMEMBERED:
                del self._totals[next(iter(self._totals))]
        return total

    def _new_place(self) -> int:
        if self._free:
            return self._free.pop()
        place = len(self._keys)
        self._keys.append(None)
        if place == len(self._counter_s):
            self._num_open, self._num_waiting = _twice(self._num_open), _twice(self._num_waiting)
            self._tier = _twice(self._tier)
            zeros = np.zeros_like(self._counter_s)
            self._counter_s = np.concatenate([self._counter_s, zeros])
            self._service_s = np.concatenate([self._service_s, zeros])
        return place


def _twice(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([values, np.zeros_like(values)])
