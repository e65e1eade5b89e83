"""Down to a plan that no exchange between two devices improves. Shapes as in `state.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experts.placement.search.exchange import bundles_of, exchange
from experts.placement.search.soft_peak import SoftPeak
from experts.placement.search.state import Bools, Floats, Ints, State

Stop = Callable[[float], bool]  # told the mean cost of all rows; True ends the descent
_MOST_STEPS = 20_000  # a bound for ever, far above what is needed
_MOST_CELLS = 120_000  # exchanges judged at a time: what a core's cache holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How finely a descent looks."""

    sharpness: float  # of the soft peak
    least: float  # of a pair's promise, in each scenario, that is worth a look
    sizes: tuple[int, ...] = (1, 2, 3)
    num_pairs: int = 4


def settle(
    state: State, stage: Stage, enough_N: Floats, stop: Stop, tried_NDD: Bools | None = None
) -> None:
    """Until no pair of devices promises more; a row whose cost is `enough` is left as it is.
    `tried_NDD`: pairs that need no look until one of the two changes."""
    num_rows, num_devices, num_slots = state.slot_NDC.shape
    bundles = bundles_of(num_slots, stage.sizes)
    num_cells = stage.num_pairs * max(len(slots_Bm) for slots_Bm in bundles) ** 2
    num_blocks = -(-num_rows * num_cells // _MOST_CELLS)
    costs_N = state.costs()
    for rows in np.array_split(np.arange(num_rows), min(num_blocks, num_rows)):
        if tried_NDD is None:
            tried = np.zeros((len(rows), num_devices, num_devices), dtype=bool)
        else:
            tried = tried_NDD[rows]
        _settle(state, rows, stage, bundles, enough_N, tried, costs_N, stop)


def _settle(
    state: State,
    live: Ints,
    stage: Stage,
    bundles: list[Ints],
    enough_N: Floats,
    tried_nDD: Bools,
    costs_N: Floats,
    stop: Stop,
) -> None:
    """Of the rows `live`, together."""
    least = stage.least * state.loads_NDS.shape[2]
    part = state.take(live)
    soft = SoftPeak(part, stage.sharpness)
    for _ in range(_MOST_STEPS):
        goes_on_n = exchange(part, soft, tried_nDD, bundles, num_pairs=stage.num_pairs, least=least)
        costs_N[live] = part.costs()
        goes_on_n &= costs_N[live] > enough_N[live]
        is_stopped = stop(float(costs_N.mean()))
        if goes_on_n.sum() > 0.7 * len(live) and not is_stopped:
            continue
        state.put(live, part, np.arange(len(live)))
        live = live[goes_on_n]
        if not len(live) or is_stopped:
            return
        part, tried_nDD = state.take(live), tried_nDD[goes_on_n]
        soft = SoftPeak(part, stage.sharpness)
    state.put(live, part, np.arange(len(live)))
