"""Chooses how many cells of each kind a fleet has, as an integer program.

After Mélange (arXiv 2404.14527):

    minimise    sum over kinds j of price_j n_j
    subject to  sum over j of x_kj = 1                              every bucket k is served
                sum over k of x_kj rate_k / capacity_kj <= u n_j    no kind is loaded above u
                sum over kinds j on device d of devices_j n_j <= devices of d

n_j are whole numbers, x_kj >= 0 the share of bucket k that goes to kind j. Mélange cuts buckets
into slices that each go to one type; here a share may be any number, as the balancer takes turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.ilp.highs import Rows, run_highs
from moe_serve.fleet.cell_kinds import CellKind, capacity_for
from moe_serve.fleet.demand import Bucket, Demand

LOAD = 0.85  # of the capacity: queues grow without bound near 1
_SECONDS = 10.0
_SMALL = 1e-6
_UNSERVED = 1e4  # price of an unserved bucket, in the largest price of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal cells of a fleet. `shares[k]`: the share of bucket k that they get."""

    kind: CellKind
    num_cells: int
    shares: tuple[float, ...]

    @property
    def num_devices(self) -> int:
        return self.num_cells * self.kind.num_devices

    @property
    def price(self) -> float:
        return self.num_cells * self.kind.price

    @property
    def name(self) -> str:
        return f"{self.num_cells} x {self.kind.name} on {self.kind.offer.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Groups of cells that together serve the demand."""

    groups: tuple[Group, ...]

    @property
    def name(self) -> str:
        return " + ".join(group.name for group in self.groups)

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def price(self) -> float:
        """Price of an hour."""
        return sum(group.price for group in self.groups)

    @property
    def has_roles(self) -> bool:
        """True if it has cells for prompts and cells for answers."""
        return any(group.kind.role != "both" for group in self.groups)

    @property
    def capacity(self) -> float:
        """Requests per second: with roles, of the cells of the scarcer one."""
        by_role: dict[str, float] = {}
        for group in self.groups:
            role = group.kind.role
            by_role[role] = by_role.get(role, 0.0) + group.num_cells * group.kind.capacity
        return min(by_role.values())

    @property
    def is_mixed(self) -> bool:
        """True if it has devices of several types."""
        return len({group.kind.offer.name for group in self.groups}) > 1

    @property
    def is_served(self) -> bool:
        return all(group.kind.is_served for group in self.groups)

    @property
    def step_s(self) -> float:
        """The longest predicted TPOT."""
        return max(group.kind.step_s for group in self.groups if group.kind.role != "prefill")


def equal_cells(kind: CellKind, demand: Demand) -> Fleet | None:
    """Returns the smallest fleet of one kind of cell; None if the devices do not suffice."""
    return fleet_of(kind, num_cells_for(kind, demand), demand)


def num_cells_for(kind: CellKind, demand: Demand) -> int:
    """Returns the fewest cells of a kind that are not loaded above LOAD."""
    return max(1, math.ceil(demand.whole.rate / (LOAD * kind.capacity) - _SMALL))


def fleet_of(kind: CellKind, num_cells: int, demand: Demand) -> Fleet | None:
    """Returns a fleet of equal cells; None if the devices do not suffice."""
    if num_cells * kind.num_devices > kind.offer.num_devices:
        return None
    shares = (1.0,) * len(demand.buckets)
    return Fleet(groups=(Group(kind=kind, num_cells=num_cells, shares=shares),))


@dataclass(slots=True)
class _Packing:
    """Implements Program. Variables: n_j of all kinds, x_kj bucket by bucket, and for each bucket
    the share that stays unserved, at a price at which it is 0 if the devices suffice."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    is_integer: NDArray[np.float64]
    rows: Rows = field(default_factory=Rows)


def pack(kinds: Sequence[CellKind], demand: Demand, *, must_mix: bool = False) -> Fleet | None:
    """Returns the cheapest fleet of these kinds; None if the devices do not suffice.

    `must_mix`: use at least one cell on every type of device.
    """
    slo, buckets = demand.slo, demand.buckets
    capacity_JK = np.array([[capacity_for(j, k, slo) for k in buckets] for j in kinds])
    if not kinds or not (capacity_JK > 0).any(axis=0).all():
        return None
    found = run_highs(_program(kinds, buckets, capacity_JK, must_mix), _SECONDS, gap=1e-3)
    num_kinds, num_shares = len(kinds), len(kinds) * len(buckets)
    if found.x is None or found.x[num_kinds + num_shares :].max() > _SMALL:
        return None
    x = found.x
    shares_KJ = x[num_kinds : num_kinds + num_shares].reshape(len(buckets), num_kinds)
    groups = tuple(
        Group(
            kind=kind,
            num_cells=round(x[j]),
            shares=tuple(float(max(0.0, share)) for share in shares_KJ[:, j]),
        )
        for j, kind in enumerate(kinds)
        if round(x[j]) > 0
    )
    return Fleet(groups=groups)


def _program(
    kinds: Sequence[CellKind],
    buckets: Sequence[Bucket],
    capacity_JK: NDArray[np.float64],
    must_mix: bool,
) -> _Packing:
    num_j, num_k = len(kinds), len(buckets)
    share_KJ = num_j + np.arange(num_k * num_j).reshape(num_k, num_j)
    counts_J = np.arange(num_j)
    most_J = [kind.offer.num_devices // kind.num_devices for kind in kinds]
    # Of equally cheap fleets the one with shorter steps wins.
    prices = [kind.price * (1 + 1e-4 * kind.step_s) for kind in kinds]
    is_possible_KJ = (capacity_JK > 0).T
    program = _Packing(
        cost=np.concatenate(
            [prices, np.zeros(num_k * num_j), np.full(num_k, _UNSERVED * max(prices))]
        ),
        upper=np.concatenate([most_J, is_possible_KJ.ravel().astype(float), np.ones(num_k)]),
        is_integer=np.concatenate([np.ones(num_j), np.zeros(num_k * num_j + num_k)]),
    )
    unserved_K = num_j + num_k * num_j + np.arange(num_k)
    for k in range(num_k):
        program.rows.add([(share_KJ[k], 1.0), (unserved_K[k : k + 1], 1.0)], 1.0, 1.0)
    rates_K = np.array([bucket.rate for bucket in buckets])
    for j in range(num_j):
        with np.errstate(divide="ignore"):
            work_K = np.where(capacity_JK[j] > 0, rates_K / capacity_JK[j], 0.0)
        program.rows.add([(share_KJ[:, j], work_K), (counts_J[j : j + 1], -LOAD)], -np.inf, 0.0)
    for name in {kind.offer.name for kind in kinds}:
        on = np.array([j for j, kind in enumerate(kinds) if kind.offer.name == name])
        sizes = np.array([kinds[j].num_devices for j in on], dtype=float)
        program.rows.add([(on, sizes)], 0.0, float(kinds[on[0]].offer.num_devices))
        if must_mix:
            program.rows.add([(on, 1.0)], 1.0, np.inf)
    return program
