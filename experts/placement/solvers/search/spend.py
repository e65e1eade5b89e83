"""Spends a budget of moves one change at a time, on the change that lowers the peak most for each
copy.

Shapes as in `state.py`; g pairs of devices of a row.
"""

from __future__ import annotations

import numpy as np

from experts.placement.solvers.search.exchange import (
    CHEAPEST,
    Pairs,
    best_swaps,
    bundles_of,
    promises,
    swap_slots,
)
from experts.placement.solvers.search.recount import best_recounts, put
from experts.placement.solvers.search.soft_peak import SoftPeak
from experts.placement.solvers.search.state import Floats, Ints, State

_NUM_PAIRS = 24  # pairs examined for a swap
_LEAST = 1e-9


def spend(state: State, sharpness_N: Floats, random: np.random.Generator | None) -> None:
    """Make changes until none helps or is allowed.

    A sharp peak considers the hottest device alone, a soft one also the next hottest. `random` adds
    noise to the choice between the two kinds of change, so that several tries differ.
    """
    if state.slot_NDC.shape[1] == 1:
        return  # all load is on one device
    live = np.arange(len(state.slot_NDC))
    while len(live):
        part = state.take(live)
        changed_n = _spend_once(part, sharpness_N[live], random)
        state.put(live, part, np.arange(len(live)))
        live = live[changed_n]


def _spend_once(
    state: State, sharpness_N: Floats, random: np.random.Generator | None
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    soft = SoftPeak(state, sharpness_N)
    rows = np.arange(len(state.slot_NDC))
    recounts = best_recounts(state, soft, per_copy=True)
    weighed_NDS = soft.weighed(state.loads_NDS)
    pairs = _pairs(promises(weighed_NDS))
    slots_C1 = bundles_of(state.slot_NDC.shape[2], (1,))
    swaps = best_swaps(state, soft, weighed_NDS, pairs, slots_C1, per_copy=True)
    score_Ng = (swaps.change_n / np.maximum(swaps.cost_n, CHEAPEST)).reshape(len(rows), -1)
    recount_N = recounts.change_N / np.maximum(recounts.cost_N, CHEAPEST)
    if random is not None:
        score_Ng = score_Ng * random.uniform(0.6, 1.0, score_Ng.shape)
        recount_N = recount_N * random.uniform(0.6, 1.0, recount_N.shape)
    best_N = score_Ng.argmin(axis=1)
    swap_N = score_Ng[rows, best_N]
    is_recount_N = (recount_N <= swap_N) & (recount_N < -_LEAST)
    is_swap_N = ~is_recount_N & (swap_N < -_LEAST)
    live = rows[is_swap_N]
    n = live * score_Ng.shape[1] + best_N[live]
    swap_slots(state, live, (pairs.a_n[n], swaps.from_n[n]), (pairs.b_n[n], swaps.to_n[n]))
    live = rows[is_recount_N]
    put(state, live, recounts.expert_N[live], recounts.place_N[live])
    return np.asarray(is_recount_N | is_swap_N)


def _pairs(promise_NDD: Floats) -> Pairs:
    """Return the `_NUM_PAIRS` most promising pairs, each once; a device may be in several."""
    num_rows, num_devices, _ = promise_NDD.shape
    a_p, b_p = np.triu_indices(num_devices, 1)
    promise_Np = promise_NDD[:, a_p, b_p]
    count = min(_NUM_PAIRS, len(a_p))
    if count == len(a_p):
        chosen_Ng: Ints = np.tile(np.arange(count), (num_rows, 1))
    else:
        chosen_Ng = np.argpartition(-promise_Np, count - 1, axis=1)[:, :count]
    row_n = np.repeat(np.arange(num_rows), count)
    return Pairs(row_n=row_n, a_n=a_p[chosen_Ng].ravel(), b_n=b_p[chosen_Ng].ravel())
