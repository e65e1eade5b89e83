"""Makes the first plan of a search: packed anew, or the current plan made to fit.

Groups of experts get their nodes first, in the way in which experts are packed on devices. Then
replicas go to the experts that weigh most, and the heaviest copy to the device with the least load.
Shapes as in `state.py`; L layers, E experts, G groups; M nodes, or one for all devices without a
grouping.
"""

from __future__ import annotations

import numpy as np

from experts.placement.judge.copies import CopyLoad, copies_of
from experts.placement.placement_error import PlacementError
from experts.placement.problem.feasible import pins_of_layer
from experts.placement.problem.plan_limits import Grouping
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.search.complete import complete
from experts.placement.solvers.search.descent import DescentStage, settle
from experts.placement.solvers.search.state import Bools, Floats, Ints, Rules, State


def replicate(state: State, nodes_NEM: Bools, room_NM: Ints, most_NE: Ints) -> None:
    """Adds a copy to the expert whose copy weighs most in any scenario, `room_NM` times on the
    nodes that it may use."""
    heaviest_NE = np.maximum(state.each_NES[:, :-1].max(axis=2), 0.0)
    room_NM = room_NM.copy()
    rows = np.arange(len(heaviest_NE))
    for _ in range(int(room_NM.sum(axis=1).max(initial=0))):
        open_NE = (nodes_NEM & (room_NM > 0)[:, None, :]).any(axis=2)
        open_NE &= state.copies_NE[:, :-1] < most_NE
        expert_N = np.where(open_NE, heaviest_NE, -1.0).argmax(axis=1)
        live = rows[open_NE[rows, expert_N]]
        if not len(live):
            return
        expert_n = expert_N[live]
        node_n = np.where(nodes_NEM[live, expert_n], room_NM[live], -1).argmax(axis=1)
        room_NM[live, node_n] -= 1
        state.copies_NE[live, expert_n] += 1
        each_nS = state.each_with(live, expert_n, state.copies_NE[live, expert_n])
        state.each_NES[live, expert_n] = each_nS
        heaviest_NE[live, expert_n] = each_nS.max(axis=1)


def pack(state: State) -> None:
    """Puts all copies, heaviest first, onto the device where they meet the least load; a replica is
    left out if every device has its expert. Pinned copies are placed already."""
    num_rows, num_devices, _ = state.slot_NDC.shape
    rows = np.arange(num_rows)
    room_ND = (state.rules.open_NDC & (state.slot_NDC == state.num_experts)).sum(axis=2)
    for expert_N in _heaviest_first(state).T:
        open_ND = state.free_NED[rows, expert_N] & (room_ND > 0)
        each_NS = state.each_NES[rows, expert_N]
        meets_ND = _meeting(state, each_NS)
        device_N = np.where(open_ND, meets_ND, np.inf).argmin(axis=1)
        put_N = open_ND[rows, device_N] & (expert_N < state.num_experts)
        live = rows[put_N]
        lay(state, live, expert_N[live], device_N[live])
        room_ND[live, device_N[live]] -= 1


def _meeting(state: State, each_NS: Floats) -> Floats:
    """[N, D]: the load that a copy would meet, weighted by the scenarios in which it weighs."""
    loads_NDS = state.loads_NDS + each_NS[:, None, :] / state.speed_D[None, :, None]
    if loads_NDS.shape[2] == 1:
        return np.asarray(loads_NDS[:, :, 0])
    return np.asarray(np.square(loads_NDS).sum(axis=2) - np.square(state.loads_NDS).sum(axis=2))


def _heaviest_first(state: State) -> Ints:
    """[N, most copies of a row]: each expert as often as it has copies that are not placed yet,
    heaviest first; padded with "empty"."""
    num_experts = state.num_experts
    lying_NE = np.zeros_like(state.copies_NE)
    rows_N11 = np.arange(len(lying_NE))[:, None, None]
    np.add.at(lying_NE, (rows_N11, state.slot_NDC), 1)
    left_NE = (state.copies_NE - lying_NE)[:, :-1].clip(min=0)
    order_NE = np.argsort(-state.each_NES[:, :-1].sum(axis=2), axis=1, kind="stable")
    result = np.full((len(left_NE), int(left_NE.sum(axis=1).max(initial=0))), num_experts)
    for row, order_E in enumerate(order_NE):
        sequence = np.repeat(order_E, left_NE[row, order_E])
        result[row, : len(sequence)] = sequence
    return result


def lay(state: State, rows: Ints, experts: Ints, devices: Ints) -> None:
    """Puts a copy into the first empty slot of each device, and updates the loads."""
    is_open = state.rules.open_NDC[rows, devices]
    empty = is_open & (state.slot_NDC[rows, devices] == state.num_experts)
    state.slot_NDC[rows, devices, empty.argmax(axis=1)] = experts
    state.free_NED[rows, experts, devices] = False
    speed_n1 = state.speed_D[devices][:, None]
    state.loads_NDS[rows, devices] += state.each_NES[rows, experts] / speed_n1


_GROUP_STAGE = DescentStage(sharpness=100.0, least=1e-4)


def group_nodes(problem: PlacementProblem, grouping: Grouping, pinned_LED: Bools) -> Bools:
    """Returns [L, G, M]: nodes of the current plan if few moves are allowed, otherwise packed by
    load."""
    is_node_DM = _is_node(problem)
    wanted_LGM = _by_group(pinned_LED, grouping) @ is_node_DM > 0
    if problem.move is not None and problem.move.max_copies_per_layer is not None:
        copies_LED = copies_of(problem.move.current, problem.loads.layers)
        held_LGM = _by_group(copies_LED, grouping) @ is_node_DM
        return _most_held(held_LGM, wanted_LGM, grouping)
    if grouping.max_nodes_per_group >= is_node_DM.shape[1]:
        return np.ones_like(wanted_LGM)
    return _packed(problem, grouping, pinned_LED, is_node_DM)


def _is_node(problem: PlacementProblem) -> Ints:
    node_D = [device.node for device in problem.devices.devices]
    return np.eye(problem.devices.num_nodes, dtype=np.int64)[node_D]


def _by_group(copies_LED: Bools | Ints, grouping: Grouping) -> Ints:
    num_layers, _, num_devices = copies_LED.shape
    split = copies_LED.reshape(num_layers, grouping.num_groups, -1, num_devices)
    return np.asarray(split.sum(axis=2), dtype=np.int64)


def _most_held(held_LGM: Ints, wanted_LGM: Bools, grouping: Grouping) -> Bools:
    """Chooses nodes with pins, then those that hold most of the group."""
    first_LGM = np.where(wanted_LGM, held_LGM + held_LGM.sum() + 1, held_LGM)
    order_LGM = np.argsort(-first_LGM, axis=2, kind="stable")
    nodes_LGM = np.zeros(held_LGM.shape, dtype=bool)
    np.put_along_axis(nodes_LGM, order_LGM[:, :, : grouping.max_nodes_per_group], True, axis=2)
    return nodes_LGM


def _packed(
    problem: PlacementProblem, grouping: Grouping, pinned_LED: Bools, is_node_DM: Ints
) -> Bools:
    wanted_LGM = _by_group(pinned_LED, grouping) @ is_node_DM > 0
    num_layers, num_groups, _ = wanted_LGM.shape
    load = CopyLoad.of(problem)
    alone_SLE = load.each(load.shares_SLE, 1)
    loads_SLG = alone_SLE.reshape(*alone_SLE.shape[:2], num_groups, -1).sum(axis=3)
    speed_D = np.array([device.speed for device in problem.devices.devices])
    speed_M = np.asarray(speed_D @ is_node_DM, dtype=np.float64)
    places_LM = _places(problem, grouping, pinned_LED, is_node_DM)
    places_LM = np.clip(places_LM, wanted_LGM.sum(axis=1), num_groups)
    open_LMC = np.arange(max(1, int(places_LM.max()))) < places_LM[:, :, None]
    pinned_LGM = np.pad(wanted_LGM, ((0, 0), (0, 1), (0, 0)))
    pinned = pinned_LGM if wanted_LGM.any() else None
    rules = Rules(open_NDC=open_LMC, pinned_NED=pinned, fill=False)
    state = State.empty(CopyLoad(shares_SLE=loads_SLG), speed_M, rules)
    state.copies_NE[:, :-1] = grouping.max_nodes_per_group
    state.weigh()
    for row, group, node in np.argwhere(wanted_LGM):
        lay(state, np.array([row]), np.array([group]), np.array([node]))
    pack(state)
    complete(state, problem.loads.layers, what="group", where="node")
    settle(state, _GROUP_STAGE, np.zeros(num_layers), lambda _: False)
    return np.asarray(~state.free_NED[:, :-1])  # where a group was placed


def _places(
    problem: PlacementProblem, grouping: Grouping, pinned_LED: Bools, is_node_DM: Ints
) -> Ints:
    """[L, M]: number of groups that a node takes: whole ones if each group has one node, otherwise
    the node's share of all."""
    slots_LD = problem.slots_by_layer()
    slots_LM = np.asarray(slots_LD @ is_node_DM, dtype=np.int64)
    group_size = problem.loads.num_experts // grouping.num_groups
    # a pin beside another copy of its expert takes one more slot
    if grouping.max_nodes_per_group == 1:
        pins_LEM = np.asarray(pinned_LED @ is_node_DM, dtype=np.int64)
        spare_LM = slots_LM - np.maximum(pins_LEM - 1, 0).sum(axis=1)
        return np.asarray(np.maximum(spare_LM, 0) // group_size)
    wanted = grouping.num_groups * grouping.max_nodes_per_group
    widest_LM = (slots_LD[:, :, None] * is_node_DM).max(axis=1)
    parts_LM = np.array([_parts(slots_M, wanted) for slots_M in slots_LM])
    return np.asarray(np.maximum(parts_LM, -(-widest_LM // group_size)))


def _parts(slots_M: Ints, wanted: int) -> Ints:
    """Divides the places by slots; the largest remainders are rounded up."""
    exact_M = wanted * slots_M / slots_M.sum()
    parts_M = np.asarray(np.floor(exact_M), dtype=np.int64)
    order_M = np.argsort(parts_M - exact_M, kind="stable")
    parts_M[order_M[: wanted - int(parts_M.sum())]] += 1
    return parts_M


def first_state(problem: PlacementProblem) -> State:
    """Returns the first state, one row a layer, which keeps every rule. Raises PlacementError if an
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
    """Returns [L, E, M]: nodes that an expert may be on."""
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
    """Keeps the copies of the current plan that may stay, with pins beside them or in place of
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
