"""Proposes fleets with cells for prompts and for answers, in the ratio that the load needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from moe_serve.cluster.autoscale.plan_table import cells_ratio
from moe_serve.fleet.cell_kinds import CellKind
from moe_serve.fleet.demand import Demand
from moe_serve.fleet.offer import Offer
from moe_serve.fleet.packing import Fleet, Group, num_cells_for
from moe_serve.simulate.layout import Layout

_KINDS = 3  # of each role that are combined


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRatio:
    """Cells for prompts by cells for answers, as the load takes them: `ratio` of the first for one
    of the second."""

    ratio: float
    prefill: CellKind
    decode: CellKind

    @classmethod
    def of(cls, fleet: Fleet, demand: Demand) -> CellRatio:
        """Returns the ratio for the cells of a fleet that has both roles."""
        kinds = {group.kind.role: group.kind for group in fleet.groups}
        prefill, decode, whole = kinds["prefill"], kinds["decode"], demand.whole
        rates = prefill.rates(whole), decode.rates(whole)
        return cls(
            ratio=cells_ratio(whole.computed, whole.output, *rates), prefill=prefill, decode=decode
        )


def fleets_with_roles(
    prefill: Sequence[CellKind],
    decode: Sequence[CellKind],
    offers: Sequence[Offer],
    demand: Demand,
) -> Iterator[Fleet]:
    """Yields fleets of the cheapest cells for prompts and for answers, of all layouts and of those
    that moe-serve serves. Both may be on unlike devices, as KV pages travel between them."""
    seen: set[str] = set()
    for is_served in (False, True):
        for first in _cheapest(prefill, demand, is_served=is_served):
            for second in _cheapest(decode, demand, is_served=is_served):
                fleet = _fleet(first, second, demand)
                if fleet.name not in seen and _suffices(fleet, offers):
                    seen.add(fleet.name)
                    yield fleet


def _cheapest(kinds: Iterable[CellKind], demand: Demand, *, is_served: bool) -> Sequence[CellKind]:
    """Returns the kinds whose cells for the whole load cost least, each of another layout."""
    found: dict[tuple[str, Layout], CellKind] = {}
    usable = [kind for kind in kinds if kind.is_served or not is_served]
    for kind in sorted(usable, key=lambda k: (num_cells_for(k, demand) * k.price, k.step_s)):
        if len(found) < _KINDS:
            found.setdefault((kind.offer.name, kind.layout), kind)
    return list(found.values())


def _fleet(prefill: CellKind, decode: CellKind, demand: Demand) -> Fleet:
    shares = (1.0,) * len(demand.buckets)
    return Fleet(
        groups=tuple(
            Group(kind=kind, num_cells=num_cells_for(kind, demand), shares=shares)
            for kind in (prefill, decode)
        )
    )


def _suffices(fleet: Fleet, offers: Sequence[Offer]) -> bool:
    """Returns True if the devices of all offers are enough."""
    needed = Counter[str]()
    for group in fleet.groups:
        needed[group.kind.offer.name] += group.num_devices
    return all(needed[offer.name] <= offer.num_devices for offer in offers)
