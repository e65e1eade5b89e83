"""Renames interchangeable devices so that most copies stay where they are.

L layers, E experts, D devices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import copies_of
from experts.placement.problem.problem import PlacementProblem

Ints = NDArray[np.int64]


def relabelled(problem: PlacementProblem, copies_LED: Ints) -> Ints:
    """Rename devices if moves are counted but not limited; pins and groups fix the names."""
    move = problem.move
    if move is None or move.max_copies_per_layer is not None or problem.pins:
        return copies_LED
    current_LED = copies_of(move.current, problem.loads.layers)
    kind_D = _kinds(problem)
    slots_LD = problem.slots_by_layer()
    result = np.empty_like(copies_LED)
    for row, copies_ED in enumerate(copies_LED):
        # Shared memory may leave devices of a kind different numbers of slots in a layer.
        kinds_D = np.unique(np.stack((kind_D, slots_LD[row])), axis=1, return_inverse=True)[1]
        overlap_DD = copies_ED.T @ current_LED[row]
        alike_DD = kinds_D.reshape(-1, 1) == kinds_D.reshape(1, -1)
        result[row] = copies_ED[:, _assigned(np.where(alike_DD, overlap_DD, -(10**6)))]
    return result


def _kinds(problem: PlacementProblem) -> Ints:
    """Return the kind of each device: those with the same speed, slots and (if groups are on nodes)
    node are interchangeable."""
    devices = problem.devices.devices
    kinds = [
        (device.speed, device.num_slots, device.node if problem.grouping else 0)
        for device in devices
    ]
    return np.array([sorted(set(kinds)).index(kind) for kind in kinds])


def _assigned(overlap_DD: Ints) -> Ints:
    """Return, for every name, the device that gets it, so that most copies stay."""
    from scipy.optimize import linear_sum_assignment

    names, devices = linear_sum_assignment(-overlap_DD.T)
    assert (names == np.arange(len(overlap_DD))).all(), (
        "the assignment must list the names in order"
    )
    return np.asarray(devices)
