"""Chooses the nodes that a group of experts may use, like the packing of experts on devices.

L layers, E experts, G groups, D devices, M nodes.
"""

from __future__ import annotations

import numpy as np

from experts.placement.judge.copies import copies_of
from experts.placement.judge.copy_load import CopyLoad
from experts.placement.problem.limits import Grouping
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.search.complete import complete
from experts.placement.solvers.search.descent import Stage, settle
from experts.placement.solvers.search.packing import lay, pack
from experts.placement.solvers.search.state import Bools, Ints, Rules, State

_STAGE = Stage(sharpness=100.0, least=1e-4)


def group_nodes(problem: PlacementProblem, grouping: Grouping, pinned_LED: Bools) -> Bools:
    """[L, G, M]: nodes of the current plan if few moves are allowed, otherwise packed by load."""
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
    """Choose nodes with pins, then those that hold most of the group."""
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
    settle(state, _STAGE, np.zeros(num_layers), lambda _: False)
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
    """Divide the places by slots; the largest remainders are rounded up."""
    exact_M = wanted * slots_M / slots_M.sum()
    parts_M = np.asarray(np.floor(exact_M), dtype=np.int64)
    order_M = np.argsort(parts_M - exact_M, kind="stable")
    parts_M[order_M[: wanted - int(parts_M.sum())]] += 1
    return parts_M
