"""Exchanges copies between two devices whose loads complement each other: one for one, two for two,
three for three. An exchange with an empty slot is a move.

Shapes as in `state.py`; n pairs of devices, (a, b), each pair of one row; B bundles of m slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from experts.placement.solvers.search.soft_peak import FORBIDDEN, SoftPeak
from experts.placement.solvers.search.state import Bools, Floats, Ints, State

_LEAST = 1e-12  # a smaller gain is rounding
CHEAPEST = 0.25  # in copies: the assumed cost of a change that uses none of the budget
_MOST_BUNDLES = 48  # bundles of each size; of more an even selection is used


def bundles_of(num_slots: int, sizes: Sequence[int]) -> list[Ints]:
    """[B, m] for every size up to half of the slots, because swapping a bundle equals swapping the
    rest of the device; sets of slots of one device."""
    result = []
    for size in sizes:
        if size == 1 or 2 * size <= num_slots:
            every = np.array(list(combinations(range(num_slots), size)), dtype=np.int64)
            step = -(-len(every) // _MOST_BUNDLES) if size > 1 else 1
            result.append(every[::step])
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of devices of rows; a row may occur several times, with other devices each time."""

    row_n: Ints
    a_n: Ints
    b_n: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Swaps:
    """For every pair: bundle `from_n` of a changes places with bundle `to_n` of b, of size number
    `size_n`."""

    change_n: Floats  # of the soft peak; 0 if no swap lowers it
    cost_n: Ints  # additional copies that the current plan lacks; 0 without a current plan
    size_n: Ints
    from_n: Ints
    to_n: Ints


def exchange(
    state: State,
    soft: SoftPeak,
    tried_NDD: Bools,
    bundles: Sequence[Ints],
    *,
    num_pairs: int,
    least: float,
) -> Bools:
    """Makes the best exchange of each row's `num_pairs` most promising pairs, if it lowers the soft
    peak. Returns [N]: whether a pair was left to try; pairs without such an exchange are marked as
    tried.

    Two devices cannot do better than halve their load, which bounds a pair's gain: with E the
    exponentials, it is the sum over scenarios of (sqrt E_a - sqrt E_b)^2, which must be at least
    `least`.
    """
    weighed_NDS = soft.weighed(state.loads_NDS)
    promise_NDD = promises(weighed_NDS)
    promise_NDD[tried_NDD] = 0.0
    if state.rules.budget is not None:
        num_pairs = 1  # several pairs could spend the same moves
    pairs, open_N = _most_promising(promise_NDD, num_pairs, least)
    if len(pairs.row_n):
        swaps = best_swaps(state, soft, weighed_NDS, pairs, bundles)
        tried_NDD[pairs.row_n, pairs.a_n, pairs.b_n] = True
        tried_NDD[pairs.row_n, pairs.b_n, pairs.a_n] = True
        _do(state, pairs, swaps, bundles, tried_NDD)
    return open_N


def promises(weighed_NDS: Floats) -> Floats:
    """Returns [N, D, D]: upper bound of a pair's gain."""
    root_NDS = np.sqrt(weighed_NDS)
    if root_NDS.shape[2] == 1:
        return np.asarray(np.square(root_NDS - root_NDS.transpose(0, 2, 1)))
    heat_ND = weighed_NDS.sum(axis=2)
    both_NDD = root_NDS @ root_NDS.transpose(0, 2, 1)
    return np.asarray(heat_ND[:, :, None] + heat_ND[:, None] - 2.0 * both_NDD)


def _most_promising(promise_NDD: Floats, num_pairs: int, least: float) -> tuple[Pairs, Bools]:
    """Returns pairs of a row without a common device, and the rows [N] that have one."""
    num_rows, num_devices, _ = promise_NDD.shape
    rows = np.arange(num_rows)
    found = np.zeros((3, 0), dtype=np.int64)
    open_N = np.zeros(num_rows, dtype=bool)
    for turn in range(min(num_pairs, num_devices // 2)):
        flat_N = promise_NDD.reshape(num_rows, -1).argmax(axis=1)
        a_N, b_N = np.divmod(flat_N, num_devices)
        live = rows[promise_NDD[rows, a_N, b_N] > least]
        if not len(live):
            break
        if turn == 0:
            open_N[live] = True
        found = np.concatenate((found, [live, a_N[live], b_N[live]]), axis=1)
        for device_N in (a_N, b_N):
            promise_NDD[rows, device_N] = 0.0
            promise_NDD[rows, :, device_N] = 0.0
    return Pairs(row_n=found[0], a_n=found[1], b_n=found[2]), open_N


def best_swaps(
    state: State,
    soft: SoftPeak,
    weighed_NDS: Floats,
    pairs: Pairs,
    bundles: Sequence[Ints],
    *,
    per_copy: bool = False,
) -> Swaps:
    """Returns the swaps that lower the soft peak most; with `per_copy`, most for each copy of the
    budget."""
    there_nC, back_nC = allowed_swaps(state, pairs)
    cost_there_nC, cost_back_nC, left_n = _new_copies(state, pairs)
    num_pairs = len(pairs.row_n)
    index_n, score_n, change_n = np.arange(num_pairs), np.zeros(num_pairs), np.zeros(num_pairs)
    cost_n, size_n, from_n, to_n = (np.zeros(num_pairs, dtype=np.int64) for _ in range(4))
    tables = soft.pair_tables(state, weighed_NDS, pairs.row_n, pairs.a_n, pairs.b_n)
    before_n = tables.before()
    for size, slots_Bm in enumerate(bundles):
        there_nB = np.asarray(there_nC[:, slots_Bm].all(axis=2))
        back_nB = np.asarray(back_nC[:, slots_Bm].all(axis=2))
        after_nBB = tables.after(slots_Bm, there_nB, back_nB)
        score_nBB, least_n = after_nBB, before_n + score_n
        if state.rules.budget is not None:
            cost_nB1 = cost_there_nC[:, slots_Bm].sum(axis=2)[:, :, None]
            cost_nBB = cost_nB1 + cost_back_nC[:, slots_Bm].sum(axis=2)[:, None]
            after_nBB[cost_nBB > left_n[:, None, None]] = FORBIDDEN
            if per_copy:
                change_nBB = after_nBB - before_n[:, None, None]
                score_nBB, least_n = change_nBB / np.maximum(cost_nBB, CHEAPEST), score_n
        flat = score_nBB.reshape(num_pairs, -1)
        chosen_n = flat.argmin(axis=1)
        better = np.flatnonzero(flat[index_n, chosen_n] < least_n)
        i, j = np.divmod(chosen_n[better], len(slots_Bm))
        size_n[better], from_n[better], to_n[better] = size, i, j
        change_n[better] = after_nBB[better, i, j] - before_n[better]
        score_n[better] = change_n[better]
        if state.rules.budget is not None:
            cost_n[better] = cost_nBB[better, i, j]
            if per_copy:
                score_n[better] = flat[better, chosen_n[better]]
    return Swaps(change_n=change_n, cost_n=cost_n, size_n=size_n, from_n=from_n, to_n=to_n)


def allowed_swaps(state: State, pairs: Pairs) -> tuple[Bools, Bools]:
    """[n, C] each: copies of a that may go to b, and copies of b that may come to a."""
    row_n1 = pairs.row_n[:, None]
    there_nC = state.free_NED[row_n1, state.slot_NDC[pairs.row_n, pairs.a_n], pairs.b_n[:, None]]
    back_nC = state.free_NED[row_n1, state.slot_NDC[pairs.row_n, pairs.b_n], pairs.a_n[:, None]]
    movable_NDC = movable(state)
    if movable_NDC is not None:
        there_nC &= movable_NDC[pairs.row_n, pairs.a_n]
        back_nC &= movable_NDC[pairs.row_n, pairs.b_n]
    return there_nC, back_nC


def movable(state: State) -> Bools | None:
    """Returns [N, D, C]: slots that exist and whose copy is not pinned; None if all are."""
    rules = state.rules
    result = None if rules.open_NDC.all() else rules.open_NDC
    if rules.pinned_NED is None:
        return result
    row_N11 = np.arange(len(state.slot_NDC))[:, None, None]
    device_1D1 = np.arange(state.slot_NDC.shape[1])[None, :, None]
    free_NDC = np.asarray(~rules.pinned_NED[row_N11, state.slot_NDC, device_1D1])
    return free_NDC if result is None else np.asarray(free_NDC & result)


def _new_copies(state: State, pairs: Pairs) -> tuple[Ints, Ints, Ints]:
    """Returns the change of the number of copies that the current plan lacks when a copy moves from
    a to b [n, C] and from b to a, and the number of such copies still allowed [n]."""
    current_NED, budget = state.rules.current_NED, state.rules.budget
    if current_NED is None or budget is None:
        nothing = np.zeros((0, 0), dtype=np.int64)
        return nothing, nothing, nothing
    row_n1, a_n1, b_n1 = pairs.row_n[:, None], pairs.a_n[:, None], pairs.b_n[:, None]
    is_there = current_NED.view(np.int8)
    a_nC = state.slot_NDC[pairs.row_n, pairs.a_n]
    b_nC = state.slot_NDC[pairs.row_n, pairs.b_n]
    there_nC = is_there[row_n1, a_nC, a_n1] - is_there[row_n1, a_nC, b_n1]
    back_nC = is_there[row_n1, b_nC, b_n1] - is_there[row_n1, b_nC, a_n1]
    left_n = (budget - state.new_copies())[pairs.row_n]
    return there_nC.astype(np.int64), back_nC.astype(np.int64), left_n


def _do(
    state: State, pairs: Pairs, swaps: Swaps, bundles: Sequence[Ints], tried_NDD: Bools
) -> None:
    for index, slots_Bm in enumerate(bundles):
        chosen = np.flatnonzero((swaps.change_n < -_LEAST) & (swaps.size_n == index))
        rows, a, b = pairs.row_n[chosen], pairs.a_n[chosen], pairs.b_n[chosen]
        for slot_B in slots_Bm.T:
            i, j = slot_B[swaps.from_n[chosen]], slot_B[swaps.to_n[chosen]]
            swap_slots(state, rows, (a, i), (b, j))
        for device in (a, b):
            tried_NDD[rows, device] = False
            tried_NDD[rows, :, device] = False


def swap_slots(state: State, rows: Ints, one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> None:
    """Swaps slot i of device a with slot j of b, in some rows; in a row no device occurs twice."""
    (a, i), (b, j) = one, other
    e, f = state.slot_NDC[rows, a, i], state.slot_NDC[rows, b, j]
    state.slot_NDC[rows, a, i], state.slot_NDC[rows, b, j] = f, e
    shift_nS = state.each_NES[rows, e] - state.each_NES[rows, f]
    state.loads_NDS[rows, a] -= shift_nS / state.speed_D[a][:, None]
    state.loads_NDS[rows, b] += shift_nS / state.speed_D[b][:, None]
    allowed = state.rules.allowed_NED
    state.free_NED[rows, e, a] = True if allowed is None else allowed[rows, e, a]
    state.free_NED[rows, f, b] = True if allowed is None else allowed[rows, f, b]
    state.free_NED[rows, e, b] = False
    state.free_NED[rows, f, a] = False
    state.free_NED[rows, -1] = True
