"""Plans a fleet: searches cells, packs them, simulates the best fleets, and compares them.

The formulas only choose what is simulated. A fleet is recommended by its simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_serve.config.cells import CellRole
from moe_serve.errors import ConfigError
from moe_serve.fleet.cell_kinds import (
    CellKind,
    CellStyle,
    cells_with_role,
    pages_of,
    step_seconds_of,
)
from moe_serve.fleet.certify import Certified, Certifier
from moe_serve.fleet.demand import Demand
from moe_serve.fleet.offer import Offer
from moe_serve.fleet.packing import Fleet, equal_cells, fleet_of, pack
from moe_serve.fleet.roles import fleets_with_roles
from moe_serve.fleet.workers import Workers, useful_processes
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import MEMORY_SHARE

_KINDS_PACKED = 4  # of each style and type of device
_MOST_TRIALS = 6  # simulations of fleets with another number of cells
_MOST_LOAD = 1.3  # of a fleet that is tried: the formulas are that far off for some layouts
_DEFAULT_BATCH = 64
_ROLES: tuple[CellRole, ...] = ("both", "decode", "prefill")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A fleet by formula: its price of an hour and the TPOT of its slowest cells."""

    name: str
    price: float
    step_s: float
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The simulated fleets, best first, and all that the formulas considered.

    `one_device`: the result of one device alone, or `why_not` one device cannot run the model.
    """

    demand: Demand
    certified: tuple[Certified, ...]
    points: tuple[PlanPoint, ...]
    one_device: Certified | None
    why_not: str
    num_cells: int  # kinds of cells that the formulas found within the limits

    @property
    def best(self) -> Certified | None:
        """The cheapest fleet that meets the limits."""
        return next((each for each in self.certified if each.meets), None)

    def cheapest(self, is_wanted: Callable[[Certified], bool]) -> Certified | None:
        """Returns the cheapest fleet of a sort that meets the limits."""
        return next((each for each in self.certified if each.meets and is_wanted(each)), None)


def plan_fleet(
    offers: Sequence[Offer],
    demand: Demand,
    num_certified: int,
    progress: Progress,
    num_processes: int | None = None,
) -> FleetPlan:
    """Searches, simulates and ranks fleets. Raises ConfigError if no layout fits the devices.

    `num_processes`: that search and simulate; None: as many as cores, or one if there is little to
    do. The plan is the same with any number.
    """
    _check_context(offers, demand)
    num_tokens = sum(slot.output_tokens for slot in demand.slots)
    with Workers(num_processes or useful_processes(num_certified, num_tokens)) as workers:
        kinds, fleets = _search(offers, demand, workers, progress)
        chosen = _chosen(fleets, num_certified)
        alone, why_not = _one_device(offers, kinds, demand)
        certifier = Certifier(demand, workers)
        for fleet in chosen if alone is None else (*chosen, alone):
            certifier.start(fleet)
        done: list[Certified] = []
        for number, fleet in enumerate(chosen, 1):
            progress(f"simulating {number} of {len(chosen)}: {fleet.name}")
            done.append(certifier.result(fleet))
        done += _adjusted(done, certifier, progress)
        progress("simulating one device")
        one_device = None if alone is None else certifier.result(alone)
    done.sort(key=lambda each: (not each.meets, each.fleet.price, each.fleet.step_s))
    return FleetPlan(
        demand=demand,
        certified=tuple(done),
        points=tuple(_points(fleets)),
        one_device=one_device,
        why_not=why_not,
        num_cells=len(kinds),
    )


def _search(
    offers: Sequence[Offer], demand: Demand, workers: Workers, progress: Progress
) -> tuple[list[CellKind], list[Fleet]]:
    """Returns the cells that do both, and all fleets by formula, the cheapest first. Raises
    ConfigError if there is no cell."""
    for role in _ROLES:
        for offer in offers:
            workers.start(f"{role} {offer.name}", cells_with_role, offer, demand, role)

    def cells(role: CellRole, offer: Offer) -> list[CellKind]:
        found: list[CellKind] = workers.result(f"{role} {offer.name}")
        return [replace(kind, offer=offer) for kind in found]

    kinds: list[CellKind] = []
    for offer in offers:
        progress(f"searching layouts on {offer.num_devices} x {offer.name}")
        kinds += cells("both", offer)
    if not kinds:
        raise ConfigError(_no_cell(offers, demand))
    fleets = _candidates(kinds, demand)
    decode, prefill = ([k for o in offers for k in cells(role, o)] for role in _ROLES[1:])
    fleets += fleets_with_roles(prefill, decode, offers, demand)
    fleets.sort(key=lambda fleet: (fleet.price, fleet.step_s))
    return kinds, fleets


def _check_context(offers: Sequence[Offer], demand: Demand) -> None:
    size = offers[0].size
    if demand.longest >= size.max_context:
        raise ConfigError(
            f"the longest request has {demand.longest} tokens, but {size.name} takes "
            f"{size.max_context}: cut with --max-prompt and --max-output."
        )


def _no_cell(offers: Sequence[Offer], demand: Demand) -> str:
    """Builds the error: how short the steps of the largest layout are, or why no layout fits."""
    why = []
    for offer in offers:
        try:
            pages_of(offer, _widest(offer))
        except ConfigError as error:
            why.append(str(error).rstrip("."))
            continue
        layout = _widest(offer)
        model = offer.costed(layout)
        load = BatchLoad.decode(1, int(demand.whole.tokens))
        step_s = step_seconds_of(model, layout, 1, load, load)
        why.append(
            f"{layout.num_devices} x {offer.name} take {1e3 * step_s:.1f} ms for one token of one "
            "request"
        )
    limits = str(demand.slo)
    return f"no layout of these devices meets {limits}: {'; '.join(why)}."


def _widest(offer: Offer) -> Layout:
    if offer.calibrated_shards is not None:
        return Layout.parse("colocated", 1)
    num = min(offer.num_devices, offer.size.num_experts)
    shards = 1 << max(0, min(3, num.bit_length() - 1, offer.node_devices.bit_length() - 1))
    return Layout.parse("colocated", num // shards * shards, shards)


def _candidates(kinds: Sequence[CellKind], demand: Demand) -> list[Fleet]:
    """Returns fleets of cells without roles, by formula: of equal cells, and packed ones."""
    equal = [fleet for kind in kinds if (fleet := equal_cells(kind, demand)) is not None]
    best = list(_best_kinds(kinds))
    served = [kind for kind in best if kind.is_served]
    has_several = len({kind.offer.name for kind in kinds}) > 1
    packed = [pack(best, demand), pack(served, demand)]
    if has_several:
        packed += [pack(best, demand, must_mix=True), pack(served, demand, must_mix=True)]
    fleets = [*equal, *(fleet for fleet in packed if fleet is not None)]
    if not fleets:  # the devices do not suffice: show what they can do
        fleets = [_as_many(kind, demand) for kind in best]
    return fleets


def _as_many(kind: CellKind, demand: Demand) -> Fleet:
    fleet = fleet_of(kind, kind.offer.num_devices // kind.num_devices, demand)
    assert fleet is not None, "one cell fits its offer"
    return fleet


def _best_kinds(kinds: Iterable[CellKind]) -> Iterator[CellKind]:
    """Yields the cheapest kinds per request, a few of each style and type of device."""
    found: dict[tuple[str, str, bool], list[CellKind]] = {}
    for kind in sorted(kinds, key=lambda k: (k.price / k.capacity, k.step_s)):
        group = found.setdefault((kind.offer.name, kind.style, kind.is_served), [])
        if len(group) < _KINDS_PACKED and all(each.layout != kind.layout for each in group):
            group.append(kind)
            yield kind


def _chosen(fleets: Sequence[Fleet], most: int) -> list[Fleet]:
    """Returns the fleets to simulate: the cheapest of every sort first, then those that no other is
    both cheaper and faster than, then the cheapest."""
    firsts: dict[tuple[object, ...], Fleet] = {}
    for fleet in fleets:
        group = fleet.groups[0]
        kind = group.kind
        key: tuple[object, ...] = (fleet.has_roles, fleet.is_mixed, fleet.is_served)
        if not fleet.has_roles:
            key += (len(fleet.groups), kind.offer.name, kind.style)
        firsts.setdefault(key, fleet)
    chosen: dict[str, Fleet] = {}
    cheapest = sorted(firsts.values(), key=lambda f: f.price)
    for fleet in (*cheapest, *_frontier(fleets), *fleets):
        if len(chosen) < most:
            chosen.setdefault(fleet.name, fleet)
    return list(chosen.values())


def _frontier(fleets: Sequence[Fleet]) -> Iterator[Fleet]:
    """Yields the fleets along the frontier of price and step, with steps at least 5% shorter."""
    shortest = math.inf
    for fleet in fleets:
        if fleet.step_s < 0.95 * shortest:
            shortest = fleet.step_s
            yield fleet


def _adjusted(
    done: Sequence[Certified], certifier: Certifier, progress: Progress
) -> list[Certified]:
    """Simulates larger fleets where cheap ones missed the limits, and smaller ones than those that
    keep them, as long as one may become the cheapest.

    The formulas know the mean step, and not bursts. Fleets that moe-serve serves are compared with
    each other, as they may lose against other servers' layouts. Idle processes simulate what may
    come next.
    """
    known, tried = list(done), {each.fleet.name for each in done}
    for _ in range(_MOST_TRIALS):
        others = [
            fleet
            for each in known
            if (fleet := _resized(each, certifier.demand, _change(each))) is not None
            and fleet.name not in tried
            and fleet.price < _cheapest(known, each.fleet.is_served)
        ]
        if not others:
            break
        others.sort(key=lambda f: f.price)
        for fleet in others[: certifier.num_at_once]:
            certifier.start(fleet)
        fleet = others[0]
        tried.add(fleet.name)
        progress(f"simulating {fleet.name}")
        known.append(certifier.result(fleet))
    return known[len(done) :]


def _change(each: Certified) -> float:
    """Returns by how much to enlarge a fleet, from the share that met the limits; below 0: shrink
    it."""
    if each.meets:
        return -0.2
    return 0.5 if each.attainment < 0.6 else 0.2


def _cheapest(known: Iterable[Certified], is_served: bool) -> float:
    prices = [x.fleet.price for x in known if x.meets and (x.fleet.is_served or not is_served)]
    return min(prices, default=math.inf)


def _resized(each: Certified, demand: Demand, share: float) -> Fleet | None:
    """Returns the fleet with more or fewer cells of its largest group: at least one; None if there
    are not so many devices, or if fewer could not do. More cells are of the role that was late."""
    fleet, late = each.fleet, each.late_role if share > 0 else None
    indices = [i for i, group in enumerate(fleet.groups) if late in (None, group.kind.role)]
    index = max(indices, key=lambda i: fleet.groups[i].price)
    group = fleet.groups[index]
    change = math.copysign(max(1, round(abs(share) * group.num_cells)), share)
    num_cells = group.num_cells + int(change)
    others = sum(
        g.num_devices
        for g in fleet.groups
        if g is not group and g.kind.offer.name == group.kind.offer.name
    )
    is_possible = num_cells * group.kind.num_devices + others <= group.kind.offer.num_devices
    if num_cells < 1 or not is_possible:
        return None
    groups = [*fleet.groups]
    groups[index] = replace(group, num_cells=num_cells)
    resized = Fleet(groups=tuple(groups))
    return None if share < 0 and demand.whole.rate > _MOST_LOAD * resized.capacity else resized


def _one_device(
    offers: Sequence[Offer], kinds: Sequence[CellKind], demand: Demand
) -> tuple[Fleet | None, str]:
    """Returns a fleet of one device, with the largest batch; else why it cannot have the model."""
    why = ""
    for offer in offers:
        layout = Layout.parse("colocated", 1)
        try:
            num_pages = pages_of(offer, layout)
        except ConfigError:
            weights, usable = offer.size.device_bytes(layout)[0], _usable_bytes(offer)
            why = why or (
                f"the weights of {offer.size.name} are {weights / 2**30:.1f} GiB, and of one "
                f"{offer.name} {usable / 2**30:.1f} GiB are usable"
            )
            continue
        if num_pages is not None and num_pages * 16 <= demand.longest:
            why = why or f"one {offer.name} has no memory for a request of {demand.longest} tokens"
            continue
        own = [k for k in kinds if k.offer is offer and k.layout.num_cell_devices == 1]
        kind = max(own, key=lambda k: k.capacity, default=None) or CellKind(
            offer=offer,
            model=offer.costed(layout),
            layout=layout,
            micro_batches=1,
            max_num_seqs=_DEFAULT_BATCH,
            max_batched_tokens=2048,
            num_pages=num_pages,
            headroom=1.0,
            step_s=0.0,
            capacity=0.0,
        )
        return fleet_of(kind, 1, demand), ""
    return None, why


def _usable_bytes(offer: Offer) -> float:
    assert offer.memory_bytes is not None, "a model fits a memory without a limit"
    return offer.memory_bytes * MEMORY_SHARE


def _points(fleets: Iterable[Fleet]) -> Iterator[PlanPoint]:
    for fleet in fleets:
        style: CellStyle | str = "mixed" if fleet.is_mixed else fleet.groups[0].kind.style
        style = "roles" if fleet.has_roles else style
        yield PlanPoint(name=fleet.name, price=fleet.price, step_s=fleet.step_s, style=style)
