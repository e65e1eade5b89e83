"""Tabu search: makes the best swap again and again, past local optima, and above a cap for a while.

C copies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.fan_out.layer_cost import LayerCost

_EPSILON = 1e-9
_STILL = 6  # swaps during which copies that just moved stay where they are
_PRICE = 4.0  # initial price of a load over the cap
_OSCILLATION = 4  # swaps over or under the cap, after which the price rises or falls


def best_swaps(
    cost_of: LayerCost,
    device_C: NDArray[np.int64],
    is_legal_CC: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
    patience: int,
    goes_on: Callable[[], bool],
) -> NDArray[np.int64]:
    """Return the cheapest plan under the cap that was found, or the one least above it. Ends after
    `patience` swaps without a better one. `is_legal_CC` says which two copies may swap."""
    device_C = device_C.copy()
    cost, overload = cost_of.cost(device_C), cost_of.overload(device_C)
    best_C, best = device_C.copy(), (_over(overload), cost)
    still_until_C = np.zeros(len(device_C), dtype=np.int64)
    price, num_over, num_under, since_best, turn = _PRICE, 0, 0, 0, 0
    while since_best < patience and goes_on():
        change_CC, over_CC = cost_of.changes(device_C), cost_of.overload_changes(device_C)
        is_still_C = still_until_C > turn
        is_best_CC = (overload + over_CC <= _EPSILON) & (
            (cost + change_CC < best[1] - _EPSILON) | (best[0] > 0)
        )
        is_allowed_CC = is_best_CC | ~(is_still_C[:, None] | is_still_C)
        is_allowed_CC &= is_legal_CC(device_C)
        score_CC = np.where(is_allowed_CC, change_CC + price * over_CC, np.inf)
        first, second = divmod(int(score_CC.argmin()), len(device_C))
        if not np.isfinite(score_CC[first, second]):
            break
        cost += float(change_CC[first, second])
        overload = max(0.0, overload + float(over_CC[first, second]))
        device_C[[first, second]] = device_C[[second, first]]
        still_until_C[[first, second]] = turn + 1 + _STILL
        is_under = overload <= _EPSILON
        num_over, num_under = (0, num_under + 1) if is_under else (num_over + 1, 0)
        if max(num_over, num_under) >= _OSCILLATION:
            price *= 0.5 if is_under else 2.0
            num_over = num_under = 0
        turn, since_best = turn + 1, since_best + 1
        if _is_better((_over(overload), cost), best):
            best_C, best, since_best = device_C.copy(), (_over(overload), cost), 0
    return np.asarray(best_C)


def _over(overload: float) -> float:
    """Return the overload, 0 if it is only rounding."""
    return overload if overload > _EPSILON else 0.0


def _is_better(one: tuple[float, float], best: tuple[float, float]) -> bool:
    """Return whether (overload, cost) is better by more than rounding."""
    lighter = best[0] - one[0]
    return lighter > _EPSILON or (abs(lighter) <= _EPSILON and one[1] < best[1] - _EPSILON)
