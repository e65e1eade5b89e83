"""Makes the first plan of a search: packed anew, or the current plan made to fit.

Shapes as in `state.py`; M nodes, or one for all devices without a grouping.
"""

from __future__ import annotations

import numpy as np

from experts.placement.errors import PlacementError
from experts.placement.judge.copies import copies_of
from experts.placement.judge.copy_load import CopyLoad
from experts.placement.problem.feasible import pins_of_layer
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.search.complete import complete
from experts.placement.solvers.search.groups import group_nodes
from experts.placement.solvers.search.packing import lay, pack, replicate
from experts.placement.solvers.search.state import Bools, Ints, Rules, State


def first_state(problem: PlacementProblem) -> State:
    """Return the first state, one row a layer, which keeps every rule. Raises PlacementError if an
    expert finds no place."""
    slots_LD = problem.slots_by_layer()
    pinned_LED = _pinned(problem)
    nodes_LEM = _nodes(problem, pinned_LED)
    rules = _rules(problem, slots_LD, pinned_LED, nodes_LEM)
    speed_D = np.array([device.speed for device in problem.devices.devices])
    state = State.empty(CopyLoad.of(problem), speed_D, rules)
    if rules.current_NED is None:
        _pack(state, problem, slots_LD, pinned_LED, nodes_LEM)
    else:
        _keep(state, rules.current_NED[:, :-1], pinned_LED)
    complete(state, problem.loads.layers)
    return state


def _pinned(problem: PlacementProblem) -> Bools:
    shape = (len(problem.loads.layers), problem.loads.num_experts, len(problem.devices))
    pinned_LED = np.zeros(shape, dtype=bool)
    for row, layer in enumerate(problem.loads.layers):
        for expert, device in pins_of_layer(problem.pins, layer):
            pinned_LED[row, expert, device] = True
    return pinned_LED


def _nodes(problem: PlacementProblem, pinned_LED: Bools) -> Bools:
    """[L, E, M]: nodes that an expert may be on."""
    num_layers, num_experts, _ = pinned_LED.shape
    if problem.grouping is None:
        return np.ones((num_layers, num_experts, 1), dtype=bool)
    nodes_LGM = group_nodes(problem, problem.grouping, pinned_LED)
    return np.repeat(nodes_LGM, num_experts // problem.grouping.num_groups, axis=1)


def _rules(problem: PlacementProblem, slots_LD: Ints, pinned_LED: Bools, nodes_LEM: Bools) -> Rules:
    with_empty = ((0, 0), (0, 1), (0, 0))
    allowed_LED = None
    if problem.grouping is not None:
        node_D = [device.node for device in problem.devices.devices]
        allowed_LED = np.pad(nodes_LEM[:, :, node_D], with_empty, constant_values=True)
    current_LED, budget = None, None
    if problem.move is not None and problem.move.max_copies_per_layer is not None:
        budget = problem.move.max_copies_per_layer
        copies_LED = copies_of(problem.move.current, problem.loads.layers)
        current_LED = np.pad(copies_LED > 0, with_empty, constant_values=True)
    return Rules(
        open_NDC=np.arange(slots_LD.max()) < slots_LD[:, :, None],
        allowed_NED=allowed_LED,
        pinned_NED=np.pad(pinned_LED, with_empty) if pinned_LED.any() else None,
        current_NED=current_LED,
        budget=budget,
        fill=problem.fill,
    )


def _pack(
    state: State,
    problem: PlacementProblem,
    slots_LD: Ints,
    pinned_LED: Bools,
    nodes_LEM: Bools,
) -> None:
    num_nodes = nodes_LEM.shape[2]
    node_D = [device.node for device in problem.devices.devices] if num_nodes > 1 else 0
    is_node_DM = np.eye(num_nodes, dtype=np.int64)[np.broadcast_to(node_D, slots_LD.shape[1])]
    state.copies_NE[:, :-1] = np.maximum(pinned_LED.sum(axis=2), 1)
    state.weigh()
    # A copy of an expert on several nodes takes a part of a slot on each.
    share_LEM = nodes_LEM / nodes_LEM.sum(axis=2, keepdims=True)
    taken_LM = np.einsum("le,lem->lm", state.copies_NE[:, :-1], share_LEM)
    room_LM = np.maximum(slots_LD @ is_node_DM - np.ceil(taken_LM - 1e-9).astype(np.int64), 0)
    most_LE = nodes_LEM @ ((slots_LD > 0) @ is_node_DM)[:, :, None]
    replicate(state, nodes_LEM, room_LM, most_LE[:, :, 0])
    for row, expert, device in np.argwhere(pinned_LED):
        lay(state, np.array([row]), np.array([expert]), np.array([device]))
    pack(state)


def _keep(state: State, current_NED: Bools, pinned_NED: Bools) -> None:
    """Keep the copies of the current plan that may stay, with pins beside them or in place of
    others."""
    allowed = state.rules.allowed_NED
    kept_NED = current_NED if allowed is None else current_NED & allowed[:, :-1]
    row, device, expert = np.nonzero(kept_NED.transpose(0, 2, 1))
    counts_ND = kept_NED.sum(axis=1)
    first_ND = np.cumsum(counts_ND).reshape(counts_ND.shape) - counts_ND
    slot = np.arange(len(row)) - np.repeat(first_ND.ravel(), counts_ND.ravel())
    state.slot_NDC[row, device, slot] = expert
    for row, expert, device in np.argwhere(pinned_NED & ~kept_NED):
        slot_C = state.slot_NDC[row, device]
        pinned_C = np.append(pinned_NED[row, :, device], False)[slot_C]
        copies_C = np.append(kept_NED[row].sum(axis=1), state.num_experts)[slot_C]
        open_C = state.rules.open_NDC[row, device] & ~pinned_C
        if not open_C.any():
            raise PlacementError(f"No slot of device {device} is left for pinned expert {expert}.")
        # Prefer an empty slot, then that of the expert with most copies.
        slot = np.where(open_C, copies_C, -1).argmax()
        state.slot_NDC[row, device, slot] = expert
