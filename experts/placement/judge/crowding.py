"""How little the fullest place can hold when things have one place each: hot things cannot all lie
alone, nor all with the coldest.

S scenarios, n things (experts, or groups of them), m places (devices, or nodes).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def crowded(loads_Sn: Floats, slots_m: Ints, speed_m: Floats) -> Floats:
    """[S]: a bound on the largest load over speed of any place."""
    down_Sn = -np.sort(-loads_Sn, axis=1)
    together_S = _pigeonholes(down_Sn, slots_m) / speed_m.max()
    return np.asarray(np.maximum(together_S, _apart_or_together(down_Sn, slots_m, speed_m)))


def _pigeonholes(down_Sn: Floats, slots_m: Ints) -> Floats:
    """Of the m k + 1 hottest, k + 1 lie together, at best the coldest of them, and with the very
    coldest where a place has more slots than that and all are used.

    Worked example, loads 5, 4, 3, 2 in 2 places of 2: of the hottest three two meet, 4 + 3 = 7.
    """
    num_places, num_things = len(slots_m), down_Sn.shape[1]
    beside = _fewest(down_Sn, slots_m)
    most_S = np.zeros(len(down_Sn))
    for k in range(1, int(slots_m.max())):
        if num_places * k >= num_things:
            break
        together_S = down_Sn[:, num_places * k - k : num_places * k + 1].sum(axis=1)
        most_S = np.maximum(most_S, together_S + _coldest(down_Sn, beside - k - 1))
    return most_S


def _apart_or_together(down_Sn: Floats, slots_m: Ints, speed_m: Floats) -> Floats:
    """For every i: two of the i hottest are together, or they are in i places, whose other slots
    hold at least the coldest things.

    Where all places have two slots, one of the i hottest then lies with the i-th coldest or worse.
    Worked example, loads 5, 4, 3, 2 in 2 places of 2: 5 with 2 at best, or 4 with 3: 7.
    """
    beside = _fewest(down_Sn, slots_m)
    is_full = slots_m.sum() == down_Sn.shape[1]
    others_m = np.cumsum(np.sort(slots_m[slots_m > 0]) - 1)
    fastest_m = np.cumsum(-np.sort(-speed_m))
    most_S = np.zeros(len(down_Sn))
    for i in range(1, min(len(others_m), down_Sn.shape[1]) + 1):
        apart_S = down_Sn[:, :i].sum(axis=1)
        if is_full:
            apart_S = apart_S + _coldest(down_Sn, int(others_m[i - 1]))
        apart_S = apart_S / fastest_m[i - 1]
        if is_full and (slots_m == 2).all():
            apart_S = np.maximum(apart_S, (down_Sn[:, i - 1] + down_Sn[:, -i]) / speed_m.max())
        if i > 1:
            pair_S = down_Sn[:, i - 2] + down_Sn[:, i - 1] + _coldest(down_Sn, beside - 2)
            apart_S = np.minimum(apart_S, pair_S / speed_m.max())
        most_S = np.maximum(most_S, apart_S)
    return most_S


def _fewest(down_Sn: Floats, slots_m: Ints) -> int:
    """Things in a place that has any, at the least."""
    is_full = slots_m.sum() == down_Sn.shape[1]
    return int(slots_m[slots_m > 0].min()) if is_full else 0


def _coldest(down_Sn: Floats, count: int) -> Floats:
    return np.asarray(down_Sn[:, down_Sn.shape[1] - max(0, count) :].sum(axis=1))
