"""Adds a copy of an expert, in an empty slot or in one given up by an expert with several copies.

Shapes as in `state.py`; q experts and p slots are examined, P = D x C slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experts.placement.solvers.search.exchange import CHEAPEST, movable
from experts.placement.solvers.search.soft_peak import SoftPeak
from experts.placement.solvers.search.state import Bools, Floats, Ints, State

_NUM_RANDOM = 12  # best changes of a row, of which a random one may be chosen
_NUM_EXPERTS, _NUM_SLOTS = 8, 48  # most promising experts and slots of a row that are examined


@dataclass(frozen=True, slots=True, kw_only=True)
class Recounts:
    """For every row: put expert `expert_N` into slot `place_N`."""

    change_N: Floats  # of the soft peak; infinite if there is none
    cost_N: Ints  # additional copies that the current plan lacks; 0 without a current plan
    expert_N: Ints
    place_N: Ints


def recount(state: State, soft: SoftPeak, *, must_fill: bool = False) -> Bools:
    """Makes the change that lowers the soft peak most. With `must_fill`, fill an empty slot even if
    that raises the peak. Returns [N]: rows that were changed."""
    best = best_recounts(state, soft, must_fill=must_fill)
    changed_N = np.isfinite(best.change_N) if must_fill else best.change_N < -1e-9
    live = np.flatnonzero(changed_N)
    put(state, live, best.expert_N[live], best.place_N[live])
    return np.asarray(changed_N)


def best_recounts(
    state: State,
    soft: SoftPeak,
    *,
    must_fill: bool = False,
    per_copy: bool = False,
    random: np.random.Generator | None = None,
) -> Recounts:
    """Returns the best recounts; with `per_copy`, those that lower the peak most for each copy of
    the budget, and with `random` any of the best few with equal probability.

    The sum ignores the joint effect of two experts on devices that hold both, which only lowers it
    further.
    """
    rows = np.arange(len(state.slot_NDC))
    row_N1 = rows[:, None]
    relief_NE = _relief(state, soft)
    loss_NP = _loss(state, soft)
    loss_NP[~gives(state, only_empty=must_fill)] = np.inf
    expert_Nq = _candidates(state, relief_NE, must_fill=must_fill)
    place_Np = _least(loss_NP, _NUM_SLOTS)
    change_Nqp = _arrival(state, soft, expert_Nq, place_Np)
    change_Nqp += relief_NE[row_N1, expert_Nq][:, :, None] + loss_NP[row_N1, place_Np][:, None]
    cost_Nqp = _costs(state, expert_Nq, place_Np)
    change_Nqp[~allowed_recounts(state, expert_Nq, place_Np)] = np.inf
    score_Nqp = change_Nqp / np.maximum(cost_Nqp, CHEAPEST) if per_copy else change_Nqp
    flat = score_Nqp.reshape(len(rows), -1)
    best_N = flat.argmin(axis=1) if random is None else _one_of_the_best(flat, random)
    which_N, where_N = np.divmod(best_N, place_Np.shape[1])
    return Recounts(
        change_N=change_Nqp[rows, which_N, where_N],
        cost_N=cost_Nqp[rows, which_N, where_N],
        expert_N=expert_Nq[rows, which_N],
        place_N=place_Np[rows, where_N],
    )


def _one_of_the_best(score_Nn: Floats, random: np.random.Generator) -> Ints:
    """Draws one of the best, or takes the very best if the drawn one is not allowed."""
    best_Nm = _least(score_Nn, _NUM_RANDOM)
    rows = np.arange(len(best_Nm))
    chosen_N = best_Nm[rows, random.integers(best_Nm.shape[1], size=len(best_Nm))]
    is_allowed_N = np.isfinite(score_Nn[rows, chosen_N])
    return np.where(is_allowed_N, chosen_N, score_Nn.argmin(axis=1))


def put(state: State, rows: Ints, experts: Ints, places: Ints) -> None:
    """Puts experts into slots, and updates all loads."""
    if not len(rows):
        return
    device, slot = np.divmod(places, state.slot_NDC.shape[2])
    changed = state.take(rows)
    changed.slot_NDC[np.arange(len(rows)), device, slot] = experts
    changed.add_up()
    state.put(rows, changed, np.arange(len(rows)))


def without_replicas(state: State) -> State:
    """Returns a copy of the state in which every expert keeps only its pinned copies, or its first
    copy."""
    result = state.take(np.arange(len(state.slot_NDC)))
    row_N1, slot_NP, device_P = _slots(state)
    pinned = state.rules.pinned_NED
    is_pinned_NP = np.zeros(slot_NP.shape, dtype=bool)
    if pinned is not None:
        is_pinned_NP = np.asarray(pinned[row_N1, slot_NP, device_P])
    # Pinned copies come first, so that the first copy of an expert is one of them.
    order_NP = np.argsort(~is_pinned_NP, axis=1, kind="stable")
    keys_NP = row_N1 * (state.num_experts + 1) + slot_NP[row_N1, order_NP]
    is_first_NP = np.zeros(slot_NP.shape, dtype=bool)
    first = np.unique(keys_NP.ravel(), return_index=True)[1]
    is_first_NP.ravel()[first] = True
    keeps_NP = is_pinned_NP.copy()
    np.put_along_axis(keeps_NP, order_NP, is_first_NP | is_pinned_NP[row_N1, order_NP], axis=1)
    slots = np.where(keeps_NP, slot_NP, state.num_experts)
    result.slot_NDC = slots.reshape(state.slot_NDC.shape)
    result.add_up()
    return result


def _each(state: State, copies_NE: Ints) -> Floats:
    """[N, E + 1, S]: load of one copy if the expert had that many copies."""
    each_SNE = state.load.each(state.load.shares_SLE, copies_NE) / state.even_SN[:, :, None]
    return np.pad(each_SNE.transpose(1, 2, 0), ((0, 0), (0, 1), (0, 0)))


def _slots(state: State) -> tuple[Ints, Ints, Ints]:
    """Returns the rows [N, 1], experts [N, P] and devices [P] of all slots."""
    num_rows, num_devices, num_slots = state.slot_NDC.shape
    device_P = np.repeat(np.arange(num_devices), num_slots)
    return np.arange(num_rows)[:, None], state.slot_NDC.reshape(num_rows, -1), device_P


def _sum_by_expert(state: State, change_NPS: Floats) -> Floats:
    """[N, E + 1]: sum over the slots that hold an expert, and over scenarios."""
    row_N1, slot_NP, _ = _slots(state)
    keys = (row_N1 * (state.num_experts + 1) + slot_NP).ravel()
    num_rows = len(slot_NP)
    change = change_NPS.sum(axis=2).ravel()
    sums = np.bincount(keys, change, minlength=num_rows * (state.num_experts + 1))
    return np.asarray(sums, dtype=np.float64).reshape(num_rows, -1)


def _by_slot(state: State, soft: SoftPeak, change_NES: Floats) -> Floats:
    """Returns [N, P, S]: change of the load of a slot's device when its expert's copy gets heavier
    by the given amount."""
    row_N1, slot_NP, device_P = _slots(state)
    loads_NPS = state.loads_NDS[:, device_P]
    change_NPS = change_NES[row_N1, slot_NP] / state.speed_D[device_P][None, :, None]
    return soft.change(state, loads_NPS, change_NPS)


def _relief(state: State, soft: SoftPeak) -> Floats:
    """[N, E + 1]: change on the devices that hold the expert, when it gets another copy."""
    more_NES = _each(state, state.copies_NE[:, :-1] + 1) - state.each_NES
    relief_NE = _sum_by_expert(state, _by_slot(state, soft, more_NES))
    relief_NE[:, -1] = 0.0
    return relief_NE


def _loss(state: State, soft: SoftPeak) -> Floats:
    """Returns [N, P]: change on the other devices that hold a slot's expert, when the slot gives it
    up."""
    row_N1, slot_NP, _ = _slots(state)
    fewer_NES = _each(state, np.maximum(state.copies_NE[:, :-1] - 1, 1)) - state.each_NES
    rise_NPS = _by_slot(state, soft, fewer_NES)
    rise_NE = _sum_by_expert(state, rise_NPS)
    rise_NE[:, -1] = 0.0
    return np.asarray(rise_NE[row_N1, slot_NP] - rise_NPS.sum(axis=2))


def _candidates(state: State, relief_NE: Floats, *, must_fill: bool) -> Ints:
    """[N, q]: experts with most relief first; without `fill`, also "empty" in place of a copy."""
    num_experts = state.num_experts
    if must_fill:
        return np.broadcast_to(np.arange(num_experts), (len(relief_NE), num_experts))
    expert_Nq = _least(relief_NE[:, :-1], _NUM_EXPERTS)
    if state.rules.fill:
        return expert_Nq
    return np.pad(expert_Nq, ((0, 0), (0, 1)), constant_values=num_experts)


def _least(value_Nn: Floats, count: int) -> Ints:
    num_rows, num_values = value_Nn.shape
    if count >= num_values:
        return np.broadcast_to(np.arange(num_values), (num_rows, num_values))
    return np.asarray(np.argpartition(value_Nn, count - 1, axis=1)[:, :count])


def _arrival(state: State, soft: SoftPeak, expert_Nq: Ints, place_Np: Ints) -> Floats:
    """[N, q, p]: change on the slot's device, when the expert replaces the slot's content."""
    row_N1, slot_NP, device_P = _slots(state)
    device_Np = device_P[place_Np]
    come_NqS = _each(state, state.copies_NE[:, :-1] + 1)[row_N1, expert_Nq]
    go_NpS = state.each_NES[row_N1, slot_NP[row_N1, place_Np]]
    loads_NpS = state.loads_NDS[row_N1, device_Np]
    speed_Np1 = state.speed_D[device_Np][:, :, None]
    gain_Nqp = np.empty((*expert_Nq.shape, place_Np.shape[1]))
    for q in range(expert_Nq.shape[1]):
        shift_NpS = (come_NqS[:, q, None] - go_NpS) / speed_Np1
        gain_Nqp[:, q] = soft.change(state, loads_NpS, shift_NpS).sum(axis=2)
    return gain_Nqp


def gives(state: State, *, only_empty: bool) -> Bools:
    """Returns [N, P]: slots that are empty, or whose expert has another copy."""
    row_N1, slot_NP, _ = _slots(state)
    gives_NP = slot_NP == state.num_experts
    if not only_empty:
        gives_NP |= state.copies_NE[row_N1, slot_NP] > 1
    movable_NDC = movable(state)
    if movable_NDC is not None:
        gives_NP &= movable_NDC.reshape(gives_NP.shape)
    return np.asarray(gives_NP)


def allowed_recounts(state: State, expert_Nq: Ints, place_Np: Ints) -> Bools:
    """[N, q, p]: the slot's device may hold the expert and does not hold it yet, and the budget
    suffices."""
    row_N1, _, device_P = _slots(state)
    row_N11, device_N1p = row_N1[:, :, None], device_P[place_Np][:, None]
    allowed_Nqp = state.free_NED[row_N11, expert_Nq[:, :, None], device_N1p]
    if state.rules.budget is not None:
        left_N = state.rules.budget - state.new_copies()
        allowed_Nqp &= _costs(state, expert_Nq, place_Np) <= left_N[:, None, None]
    return np.asarray(allowed_Nqp)


def _costs(state: State, expert_Nq: Ints, place_Np: Ints) -> Ints:
    """[N, q, p]: additional copies that the current plan lacks."""
    row_N1, slot_NP, device_P = _slots(state)
    current_NED = state.rules.current_NED
    if current_NED is None:
        return np.zeros((*expert_Nq.shape, place_Np.shape[1]), dtype=np.int64)
    device_Np = device_P[place_Np]
    gone_Np = ~current_NED[row_N1, slot_NP[row_N1, place_Np], device_Np]
    come_Nqp = ~current_NED[row_N1[:, :, None], expert_Nq[:, :, None], device_Np[:, None]]
    return come_Nqp.astype(np.int64) - gone_Np.astype(np.int64)[:, None]
