"""Packs a first plan: replicas for the experts that weigh most, then the heaviest copy to the
device with the least load. Shapes as in `state.py`; M nodes, or one for all devices without a
grouping."""

from __future__ import annotations

import numpy as np

from experts.placement.solvers.search.state import Bools, Floats, Ints, State


def replicate(state: State, nodes_NEM: Bools, room_NM: Ints, most_NE: Ints) -> None:
    """Add a copy to the expert whose copy weighs most in any scenario, `room_NM` times on the nodes
    that it may use."""
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
    """Put all copies, heaviest first, onto the device where they meet the least load; a replica is
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
    """Put a copy into the first empty slot of each device, and update the loads."""
    is_open = state.rules.open_NDC[rows, devices]
    empty = is_open & (state.slot_NDC[rows, devices] == state.num_experts)
    state.slot_NDC[rows, devices, empty.argmax(axis=1)] = experts
    state.free_NED[rows, experts, devices] = False
    speed_n1 = state.speed_D[devices][:, None]
    state.loads_NDS[rows, devices] += state.each_NES[rows, experts] / speed_n1
