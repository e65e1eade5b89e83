"""The default solver: a packing, improved in all layers and scenarios at once. Interchangeable
devices are renamed at the end, so that most copies stay where they are.

Layers whose whole integer program takes milliseconds are solved exactly instead. L layers, E
experts, D devices, R copies that an expert may have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.bound import Bound, lower_bound
from experts.placement.judge.copies import copies_in_slots, copies_of
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, judged
from experts.placement.solvers.ilp.layer_state import LayerState
from experts.placement.solvers.ilp.layer_task import LayerTask, layer_tasks
from experts.placement.solvers.search.improve import Effort, improve
from experts.placement.solvers.search.start import first_state
from experts.placement.solvers.search.watch import Watch

_MOST_BINARIES = 100  # binaries of a layer's program: 5 to 150 ms on a busy core
# binaries of one layer and of all, if few layers are to be solved: up to 1 s
_MOST_OF_FEW, _MOST_OF_ALL = 160, 640
_MOST_CHOICES = 48  # experts times devices; programs without replicas take seconds above this
_MOST_NODES = 2_000  # nodes of HiGHS's tree
_LONGEST_S = 5.0  # never reached in practice; the limit of nodes ends a program
Ints = NDArray[np.int64]
SECONDS = 120.0  # default limit if `solve` is given none; practical plans take far less


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
    """Solves the layers that do not meet their bound yet; None if layers are too large."""
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
    """Solves one layer in place; returns whether its plan is proved optimal."""
    state = LayerState(task, copies_ED > 0, _MOST_OF_FEW)
    if state.is_closed:
        return False
    state.close(_LONGEST_S, _MOST_NODES)
    copies_ED[:] = state.holds_ED
    bound_L[row] = state.bound
    return state.is_closed


def relabelled(problem: PlacementProblem, copies_LED: Ints) -> Ints:
    """Renames devices if moves are counted but not limited; pins and groups fix the names."""
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
    """Returns the kind of each device: those with the same speed, slots and (if groups are on
    nodes) node are interchangeable."""
    devices = problem.devices.devices
    kinds = [
        (device.speed, device.num_slots, device.node if problem.grouping else 0)
        for device in devices
    ]
    return np.array([sorted(set(kinds)).index(kind) for kind in kinds])


def _assigned(overlap_DD: Ints) -> Ints:
    """Returns, for every name, the device that gets it, so that most copies stay."""
    from scipy.optimize import linear_sum_assignment

    names, devices = linear_sum_assignment(-overlap_DD.T)
    assert (names == np.arange(len(overlap_DD))).all(), (
        "the assignment must list the names in order"
    )
    return np.asarray(devices)


class Search:
    """Returns the same plan for the same problem and seed, unless it is ended early: work is
    counted in rounds of tries, not in seconds, and the default time limit is only for very large
    problems.

    It ends as soon as the plan is good. `thorough` continues until hardly anything more is found,
    for callers with a deadline.
    """

    name = "search"

    def __init__(
        self, *, seed: int = 0, thorough: bool = False, effort: Effort | None = None
    ) -> None:
        """`effort` replaces the usual or the thorough one."""
        self._seed, self._thorough, self._effort = seed, thorough, effort

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """See `Solver.solve`. Ctrl-C ends it with the best plan so far, as a deadline does. Without
        `seconds` the deadline is after `SECONDS`."""
        bound = lower_bound(problem)
        watch = Watch(bound.value, SECONDS if seconds is None else seconds, report)
        state = first_state(problem)
        try:
            kind = Effort.thorough if self._thorough else Effort.usual
            num_copies = int(state.rules.open_NDC.sum())
            effort = self._effort or kind(len(bound.by_SL), num_copies, len(problem.devices))
            improve(state, bound.by_SL.mean(axis=0), effort, self._seed, watch)
        except KeyboardInterrupt:
            watch.end()
        slot_LDC = np.where(state.slot_NDC == state.num_experts, -1, state.slot_NDC)
        copies_LED = copies_in_slots(slot_LDC, problem.loads.num_experts)
        small = solve_small(problem, copies_LED, bound, watch.stop)
        if small is not None:
            copies_LED = small.copies_LED
        solution = judged(
            problem,
            relabelled(problem, copies_LED),
            solver=self.name,
            seconds=watch.elapsed,
            is_complete=not watch.is_over,
            bound=bound,
        )
        return solution if small is None else _with_proof(problem, solution, small)


def _with_proof(problem: PlacementProblem, solution: Solution, small: SmallLayers) -> Solution:
    """Adds the proofs of HiGHS, unless memory is shared by layers: then they hold only for these
    slots."""
    if not small.num_proved or problem.bytes_per_expert is not None:
        return solution
    words = f"{small.num_proved} of {len(small.bound_L)} layers proved best by HiGHS."
    return replace(
        solution,
        bound=min(float(small.bound_L.mean()), solution.objective),
        bound_proof=f"{words} {solution.bound_proof}",
    )
