"""Down to a plan that no exchange between two devices improves. Shapes as in `state.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experts.placement.solvers.search.exchange import bundles_of, exchange
from experts.placement.solvers.search.soft_peak import LARGEST_OF_ONE, SoftPeak
from experts.placement.solvers.search.state import Bools, Floats, Ints, State
from experts.placement.solvers.search.sweep import AT_A_TIME, MANY, sweep

Stop = Callable[[float], bool]  # told the mean cost of all rows; True ends the descent
_MOST_STEPS = 20_000  # a bound for ever, far above what is needed
_MOST_CELLS = 120_000  # exchanges judged at a time: what a core's cache holds
_MOST_SWEPT = 300_000  # the same for sweeps, whose steps have more overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How finely a descent looks."""

    sharpness: float  # of the soft peak
    least: float  # of a pair's promise, in each scenario, that is worth a look
    sizes: tuple[int, ...] = (1, 2, 3)
    num_pairs: int = 4


class _Steps(Protocol):
    """One kind of step, with what it remembers of some rows."""

    def weigh(self, part: State) -> None:
        """Called first, and again when rows were left out."""

    def step(self, part: State) -> Bools:
        """[n]: rows that may have more to gain."""
        ...

    def keep(self, rows_n: Bools) -> None:
        """Forget the other rows."""


class _Pairwise:
    """The most promising pairs of devices; `tried_nDD`: those that need no look."""

    def __init__(self, stage: Stage, bundles: list[Ints], tried_nDD: Bools) -> None:
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
    """Devices that changed against all; `dirty_nD`: those that need a look."""

    def __init__(self, stage: Stage, dirty_nD: Bools) -> None:
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
    state: State, stage: Stage, enough_N: Floats, stop: Stop, same_ND: Bools | None = None
) -> None:
    """Until no pair of devices promises more; a row whose cost is `enough` is left as it is.
    `same_ND`: devices of which no two need a look until one of them changes."""
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
    """Of the rows `live`, together."""
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
