"""Completes a first plan: finds devices for experts that have none, and fills slots that must be
filled.

Shapes as in `state.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experts.placement.placement_error import PlacementError
from experts.placement.solvers.search.recount import recount
from experts.placement.solvers.search.soft_peak import SoftPeak
from experts.placement.solvers.search.state import Bools, Ints, State

_SHARPNESS = 100.0


def complete(
    state: State, layers: Sequence[int], *, what: str = "expert", where: str = "device"
) -> None:
    """Completes the state in place. Raises PlacementError, with the layer, if the rules leave no
    place."""
    for row, expert in np.argwhere(~_lies(state)):
        if not _make_room(state, int(row), int(expert)):
            raise PlacementError(
                f"No {where} was found for {what} {expert} in layer {layers[row]} within "
                "groups, pins and slots: relax one of these limits."
            )
    state.add_up()
    if state.rules.budget is not None:
        _check_budget(state, layers)
    if state.rules.fill:
        _fill(state, layers)


def _lies(state: State) -> Bools:
    """Returns [N, E]: experts with a copy."""
    lies_NE = np.zeros(state.copies_NE.shape, dtype=bool)
    lies_NE[np.arange(len(lies_NE))[:, None, None], state.slot_NDC] = True
    return lies_NE[:, :-1]


def _make_room(state: State, row: int, expert: int) -> bool:
    """Puts a copy onto an empty slot, or in place of a replica or of a copy that moves to an empty
    slot."""
    slot_DC, num_experts = state.slot_NDC[row], state.num_experts
    rules = state.rules
    is_empty_DC = (slot_DC == num_experts) & rules.open_NDC[row]
    may_D = _may_be_on(state, row, expert)
    copies_E = np.bincount(slot_DC.ravel(), minlength=num_experts + 1)
    copies_E[num_experts] = num_experts + len(slot_DC)  # an empty slot is used first
    gives_DC = rules.open_NDC[row] & may_D[:, None]
    if rules.pinned_NED is not None:
        device_D1 = np.arange(len(slot_DC))[:, None]
        gives_DC &= ~rules.pinned_NED[row, slot_DC, device_D1]
    best = np.where(gives_DC, copies_E[slot_DC], -1)
    device, slot = np.unravel_index(best.argmax(), best.shape)
    if best[device, slot] > 1:
        slot_DC[device, slot] = expert
        return True
    for device, slot in np.argwhere(gives_DC):
        other = int(slot_DC[device, slot])
        away_D = _may_be_on(state, row, other) & ~(slot_DC == other).any(axis=1)
        target_D = np.flatnonzero(is_empty_DC.any(axis=1) & away_D)
        if len(target_D):
            target = target_D[0]
            slot_DC[target, is_empty_DC[target].argmax()] = other
            slot_DC[device, slot] = expert
            return True
    return False


def _may_be_on(state: State, row: int, expert: int) -> Bools:
    allowed = state.rules.allowed_NED
    if allowed is None:
        return np.ones(state.slot_NDC.shape[1], dtype=bool)
    return np.asarray(allowed[row, expert])


def _check_budget(state: State, layers: Sequence[int]) -> None:
    new_N = state.new_copies()
    row = int(new_N.argmax())
    assert state.rules.budget is not None, "the rules have no budget of moves"
    if new_N[row] > state.rules.budget:
        raise PlacementError(
            f"Layer {layers[row]} must get {new_N[row]} copies to keep pins and groups, but "
            f"max_copies_per_layer (--max-moves) is {state.rules.budget}."
        )


def _fill(state: State, layers: Sequence[int]) -> None:
    while True:
        rows = np.flatnonzero(_empty_slots(state) > 0)
        if not len(rows):
            return
        part = state.take(rows)
        changed_n = recount(part, SoftPeak(part, _SHARPNESS), must_fill=True)
        if not changed_n.all():
            row = int(rows[np.argmin(changed_n)])
            raise PlacementError(
                f"No way was found to fill {_empty_slots(state)[row]} slots of layer "
                f"{layers[row]} within the groups and the limit of moves: allow empty "
                "slots (--no-fill), or more moves (--max-moves)."
            )
        state.put(rows, part, np.arange(len(rows)))


def _empty_slots(state: State) -> Ints:
    is_empty_NDC = state.rules.open_NDC & (state.slot_NDC == state.num_experts)
    return np.asarray(is_empty_NDC.sum(axis=(1, 2)))
