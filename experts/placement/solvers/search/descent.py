"""Descends to a plan that no exchange between two devices improves. Shapes as in `state.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experts.placement.solvers.search.exchange import bundles_of, exchange
from experts.placement.solvers.search.soft_peak import LARGEST_OF_ONE, SoftPeak
from experts.placement.solvers.search.state import Bools, Floats, Ints, State
from experts.placement.solvers.search.sweep import AT_A_TIME, MANY, sweep

Stop = Callable[[float], bool]  # receives the mean cost of all rows; True ends the descent
_MOST_STEPS = 20_000  # safety limit, far above what is needed
_MOST_CELLS = 120_000  # exchanges evaluated at a time: as many as fit a core's cache
_MOST_SWEPT = 300_000  # the same for sweeps, whose steps have more overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentStage:
    """The resolution of a descent."""

    sharpness: float  # of the soft peak
    least: float  # smallest possible gain of a pair, in each scenario, for which it is examined
    sizes: tuple[int, ...] = (1, 2, 3)
    num_pairs: int = 4


class _Steps(Protocol):
    """One kind of step, with its state for some rows."""

    def weigh(self, part: State) -> None:
        """Compute the tables; called first, and again when rows were left out."""

    def step(self, part: State) -> Bools:
        """[n]: make a step; True for rows that may have more to gain."""
        ...

    def keep(self, rows_n: Bools) -> None:
        """Keep only some rows."""


class _Pairwise:
    """Examines the most promising pairs of devices; `tried_nDD` marks pairs that need not be
    examined."""

    def __init__(self, stage: DescentStage, bundles: list[Ints], tried_nDD: Bools) -> None:
        self._stage, self._bundles, self._tried_nDD = stage, bundles, tried_nDD

    def weigh(self, part: State) -> None:
        """See `_Steps`."""
        self._soft = SoftPeak(part, self._stage.sharpness)

    def step(self, part: State) -> Bools:
        """See `_Steps`."""
        stage, least = self._stage, self._stage.least * part.loads_NDS.shape[2]
        tried_nDD, num_pairs = self._tried_nDD, stage.num_pairs
        return exchange(
            part, self._soft, tried_nDD, self._bundles, num_pairs=num_pairs, least=least
        )

    def keep(self, rows_n: Bools) -> None:
        """See `_Steps`."""
        self._tried_nDD = self._tried_nDD[rows_n]


class _Sweeps:
    """Examines devices that changed against all others; `dirty_nD` marks devices to examine."""

    def __init__(self, stage: DescentStage, dirty_nD: Bools) -> None:
        self._stage, self._dirty_nD = stage, dirty_nD

    def weigh(self, part: State) -> None:
        """See `_Steps`. Single copies change places, so the peak may be sharper."""
        sharpness = self._stage.sharpness * (2 if part.loads_NDS.shape[2] == 1 else 1)
        self._soft = SoftPeak(part, sharpness, LARGEST_OF_ONE)

    def step(self, part: State) -> Bools:
        """See `_Steps`."""
        least = self._stage.least * part.loads_NDS.shape[2]
        return sweep(part, self._soft, self._dirty_nD, least)

    def keep(self, rows_n: Bools) -> None:
        """See `_Steps`."""
        self._dirty_nD = self._dirty_nD[rows_n]


def settle(
    state: State, stage: DescentStage, enough_N: Floats, stop: Stop, same_ND: Bools | None = None
) -> None:
    """Exchange until no pair of devices promises more; a row whose cost is at most `enough` is left
    as it is. Of the devices in `same_ND` no two are examined until one of them changes."""
    num_rows, num_devices, num_slots = state.slot_NDC.shape
    if same_ND is None:
        same_ND = np.zeros((num_rows, num_devices), dtype=bool)
    bundles = bundles_of(num_slots, stage.sizes)
    is_swept = num_devices > MANY
    if is_swept:
        num_blocks = -(-num_rows * AT_A_TIME * num_devices * num_slots**2 // _MOST_SWEPT)
    else:
        num_cells = stage.num_pairs * max(len(slots_Bm) for slots_Bm in bundles) ** 2
        num_blocks = -(-num_rows * num_cells // _MOST_CELLS)
    costs_N = state.costs()
    for rows in np.array_split(np.arange(num_rows), min(num_blocks, num_rows)):
        steps: _Steps = _Sweeps(stage, ~same_ND[rows])
        if not is_swept:
            same_nDD = same_ND[rows][:, :, None] & same_ND[rows][:, None]
            steps = _Pairwise(stage, bundles, same_nDD)
        _settle(state, rows, steps, enough_N, costs_N, stop)


def _settle(
    state: State, live: Ints, steps: _Steps, enough_N: Floats, costs_N: Floats, stop: Stop
) -> None:
    """Settle the rows `live` together."""
    part = state.take(live)
    steps.weigh(part)
    for _ in range(_MOST_STEPS):
        goes_on_n = steps.step(part)
        costs_N[live] = part.costs()
        goes_on_n &= costs_N[live] > enough_N[live]
        is_stopped = stop(float(costs_N.mean()))
        if goes_on_n.sum() > 0.7 * len(live) and not is_stopped:
            continue
        state.put(live, part, np.arange(len(live)))
        live = live[goes_on_n]
        if not len(live) or is_stopped:
            return
        part = state.take(live)
        steps.keep(goes_on_n)
        steps.weigh(part)
    state.put(live, part, np.arange(len(live)))
