"""The hottest copy and what lies beside it, where every slot is used.

S scenarios, L layers, E experts; J replicas of an expert beyond the fewest it needs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copy_load import CopyLoad
from experts.placement.judge.fewest_peaks import FewestPeaks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_PRICES = 2.0 ** -np.arange(1, 9)  # of a replica, in loads of the heaviest companion


def companions(
    load: CopyLoad, peaks: FewestPeaks, slots_L: Ints, fastest: float, known_SL: Floats
) -> Floats:
    """[S, L]: the least, over how many replicas h go to what is hot, of the heaviest copy with h
    and the `slots_L` - 1 lightest copies of distinct experts that the other replicas can make.

    Zero where that is not above `known_SL`. Sound: let x be a plan's heaviest copy. Copies as heavy
    as x or lighter take at least the h replicas with which x is the least peak, so the others share
    what is left; and beside x lie slots - 1 copies of other experts.
    """
    result_SL = np.zeros_like(known_SL)
    hopeful_SL = _at_most(load, peaks, slots_L, fastest) > known_SL * (1 + 1e-9)
    for scenario, row in np.argwhere(hopeful_SL).tolist():
        least = np.inf
        for hot in range(int(peaks.replicas_L[row]), -1, -1):
            peak = float(peaks.peak_HSL[hot, scenario, row])
            if peak >= least:
                break  # fewer replicas for what is hot only raise it
            shares_E = load.shares_SLE[scenario, row]
            copies_E = peaks.copies(hot, scenario, row)
            spare = int(peaks.replicas_L[row]) - int(copies_E.sum() - len(copies_E))
            beside = _lightest(load, shares_E, copies_E, int(slots_L[row]) - 1, spare)
            least = min(least, peak + beside / fastest)
        result_SL[scenario, row] = least
    return result_SL


def _at_most(load: CopyLoad, peaks: FewestPeaks, slots_L: Ints, fastest: float) -> Floats:
    """[S, L]: above what the sum can be, as if all replicas were hot and companions had none."""
    alone_SLE = np.sort(load.each(load.shares_SLE, 1), axis=2)
    beside_SLE = np.pad(np.cumsum(alone_SLE, axis=2), ((0, 0), (0, 0), (1, 0)))
    rows_L = np.arange(len(slots_L))
    return np.asarray(peaks.last() + beside_SLE[:, rows_L, slots_L - 1] / fastest)


def _lightest(load: CopyLoad, shares_E: Floats, copies_E: Ints, count: int, spare: int) -> float:
    """Below the sum of `count` copies of distinct experts that have `copies_E` and share `spare`
    more: each replica costs a price, and what all cost is given back; any price gives a bound."""
    if count == 0:
        return 0.0
    alone = float(np.partition(load.each(shares_E, copies_E), count - 1)[:count].sum())
    if spare == 0:
        return alone
    more_J = np.arange(spare + 1)
    each_EJ = load.each(shares_E[:, None], copies_E[:, None] + more_J)
    heaviest = float(np.partition(each_EJ[:, 0], count - 1)[count - 1])
    most = 0.0
    for price in _PRICES * heaviest:
        priced_E = (each_EJ + price * more_J).min(axis=1)
        most = max(most, float(np.partition(priced_E, count - 1)[:count].sum()) - price * spare)
    return most
