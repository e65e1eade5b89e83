"""Solves layers exactly whose whole integer program takes milliseconds.

L layers, E experts, D devices, R copies that an expert may have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.bound import Bound
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.ilp.layer_state import LayerState
from experts.placement.solvers.ilp.layer_task import LayerTask, layer_tasks

_MOST_BINARIES = 100  # binaries of a layer's program: 5 to 150 ms on a busy core
# binaries of one layer and of all, if few layers are to be solved: up to 1 s
_MOST_OF_FEW, _MOST_OF_ALL = 160, 640
_MOST_CHOICES = 48  # experts times devices; programs without replicas take seconds above this
_MOST_NODES = 2_000  # nodes of HiGHS's tree
_LONGEST_S = 5.0  # never reached in practice; the limit of nodes ends a program


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallLayers:
    """Plans of all layers; HiGHS proved `num_proved` of them optimal."""

    copies_LED: NDArray[np.int64]
    bound_L: NDArray[np.float64]
    num_proved: int


def solve_small(
    problem: PlacementProblem,
    copies_LED: NDArray[np.int64],
    counted: Bound,
    stop: Callable[[], bool],
) -> SmallLayers | None:
    """Solve the layers that do not meet their bound yet; None if layers are too large."""
    num_experts, num_devices = copies_LED.shape[1:]
    spare = int(problem.slots_by_layer().sum(axis=1).max()) - num_experts
    most_copies = max(1, min(num_devices, 1 + spare))
    num_binaries = num_experts * (1 + num_devices) * most_copies
    is_small = num_binaries <= _MOST_BINARIES or (
        num_binaries <= _MOST_OF_FEW and num_binaries * len(copies_LED) <= _MOST_OF_ALL
    )
    if not is_small or num_experts * num_devices > _MOST_CHOICES:
        return None
    result_LED, bound_L, num_proved = copies_LED.copy(), counted.by_SL.mean(axis=0), 0
    for row, task in enumerate(layer_tasks(problem, counted)):
        if stop():
            break
        if _solve(task, result_LED[row], bound_L, row):
            num_proved += 1
    return SmallLayers(copies_LED=result_LED, bound_L=bound_L, num_proved=num_proved)


def _solve(
    task: LayerTask, copies_ED: NDArray[np.int64], bound_L: NDArray[np.float64], row: int
) -> bool:
    """Solve one layer in place; returns whether its plan is proved optimal."""
    state = LayerState(task, copies_ED > 0, _MOST_OF_FEW)
    if state.is_closed:
        return False
    state.close(_LONGEST_S, _MOST_NODES)
    copies_ED[:] = state.holds_ED
    bound_L[row] = state.bound
    return state.is_closed
