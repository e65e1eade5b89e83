"""The integer program of one layer, and the best plan and the proof that it gave so far.

    u[e, d, r]  1: expert e has r copies, and one of them is on device d
    y[e, r]     1: expert e has r copies
    v[g, n]     1: group g may have copies on node n
    t[s]        the largest load of a device in scenario s
    q           1: keep the known plan, whose objective is in the cost

    least  mean of t  +  known * q
    sum_r y[e, r] + q = 1              sum_d u[e, d, r] = r y[e, r]        u[e, d, r] <= y[e, r]
    sum u[., d, .] = slots[d] (1 - q)  sum load[s, e, r] u[e, d, r] / speed[d] <= t[s]

q gives the program a first solution, because the solver accepts none: it prunes like an incumbent,
and the solver's bound holds for the problem itself.

S scenarios, E experts, D devices, R copies, G groups, M nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.ilp.highs import Found, Rows, run_highs
from experts.placement.solvers.ilp.layer_task import LayerTask

# up to this many experts, equal devices are ordered by the first expert they hold
_ORDERED_EXPERTS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a plan that a program may change. The window of a whole task has every device and
    every number of copies."""

    copies_ER: NDArray[np.bool_]  # [expert, r - 1]: r copies are allowed
    is_free_D: NDArray[np.bool_]  # other devices keep what they hold

    @property
    def num_binaries(self) -> int:
        """Approximate number of binary variables of the program."""
        return int(self.copies_ER.sum()) * (1 + len(self.is_free_D))


class LayerProgram:
    """The arrays of the program, and the conversion of a solution to a plan."""

    def __init__(
        self, task: LayerTask, window: Window, known_ED: NDArray[np.bool_], known: float
    ) -> None:
        """`known_ED` is a known plan, `known` its objective."""
        self.task, self._window, self._known_ED, self.known = task, window, known_ED, known
        self.rows = Rows()
        self._number_variables()
        self._add_copies()
        self._add_devices()
        self._add_limits()
        if window.is_free_D.all():
            self._add_order()

    def _number_variables(self) -> None:
        task, copies_ER = self.task, self._window.copies_ER
        expert_n, less_one_n = np.nonzero(copies_ER)
        self._expert_n, self._copies_n = expert_n, less_one_n + 1  # n: pairs of expert and r
        num_pairs, num_devices = len(expert_n), task.num_devices
        self.u_nD = np.arange(num_pairs * num_devices).reshape(num_pairs, num_devices)
        self.y_n = self.u_nD.size + np.arange(num_pairs)
        num_groups = 0 if task.group_E is None else int(task.group_E.max()) + 1
        num_nodes = int(task.node_D.max()) + 1
        self.v_GM = self.y_n[-1] + 1 + np.arange(num_groups * num_nodes).reshape(-1, num_nodes)
        first = int(self.y_n[-1]) + 1 + self.v_GM.size
        self.t_S = first + np.arange(len(task.floor_S))
        self.q = np.array([first + len(task.floor_S)])
        self.num_variables = int(self.q[0]) + 1
        self.cost = np.zeros(self.num_variables)
        self.cost[self.t_S] = 1.0 / len(task.floor_S)
        self.cost[self.q] = self.known
        self.is_integer = np.ones(self.num_variables)
        self.is_integer[self.t_S] = 0
        self.upper = np.ones(self.num_variables)
        self.upper[self.t_S] = np.inf

    def _add_copies(self) -> None:
        for expert in range(self.task.num_experts):
            self.rows.add([(self.y_n[self._expert_n == expert], 1), (self.q, 1)], 1, 1)
        for pair, copies in enumerate(self._copies_n.tolist()):
            self.rows.add([(self.u_nD[pair], 1), (self.y_n[[pair]], -copies)], 0, 0)
            if copies > 1:
                for device in range(self.task.num_devices):
                    terms = [(self.u_nD[pair, [device]], 1), (self.y_n[[pair]], -1)]
                    self.rows.add(terms, -1, 0)

    def _add_devices(self) -> None:
        task = self.task
        for device, slots in enumerate(task.slots_D.tolist()):
            low = slots if task.is_filled else 0
            self.rows.add([(self.u_nD[:, device], 1), (self.q, slots)], low, slots)
        for scenario, floor in enumerate(task.floor_S.tolist()):
            t = self.t_S[[scenario]]
            load_n = task.copy_load_SER[scenario, self._expert_n, self._copies_n - 1]
            for device, speed in enumerate(task.speeds_D.tolist()):
                self.rows.add([(self.u_nD[:, device], load_n / speed), (t, -1)], -np.inf, 0)
            self.rows.add([(t, 1), (self.q, floor)], floor, np.inf)

    def _add_limits(self) -> None:
        task = self.task
        for expert, device in task.pins:
            self.rows.add([(self._here(expert, device), 1), (self.q, 1)], 1, 1)
        if task.group_E is not None:
            for v_M in self.v_GM:
                self.rows.add([(v_M, 1)], 0, task.max_nodes_per_group)
            for expert, group in enumerate(task.group_E.tolist()):
                for device, node in enumerate(task.node_D.tolist()):
                    terms = [(self._here(expert, device), 1), (self.v_GM[group, [node]], -1)]
                    self.rows.add(terms, -1, 0)
        if task.is_current_ED is not None:
            is_new_nD = ~task.is_current_ED[self._expert_n]
            self.rows.add([(self.u_nD[is_new_nD], 1)], 0, task.max_moves)
        for device in np.flatnonzero(~self._window.is_free_D).tolist():
            for expert in range(task.num_experts):
                held = int(self._known_ED[expert, device])
                self.rows.add([(self._here(expert, device), 1), (self.q, held)], held, held)

    def _add_order(self) -> None:
        """Break the symmetry of equal devices: one holds expert e only if the one before holds an
        expert up to e (heaviest first). Of all plans that differ only by device names, one
        remains."""
        task = self.task
        heaviest = np.argsort(-task.copy_load_SER[:, :, 0].mean(axis=0), kind="stable")
        heaviest = heaviest[:_ORDERED_EXPERTS]
        for devices in task.equal_devices():
            for before, after in zip(devices, devices[1:], strict=False):
                up_to: list[NDArray[np.int64]] = []
                for expert in heaviest.tolist():
                    up_to.append(self._here(expert, before))
                    terms = [(self._here(expert, after), 1), (np.concatenate(up_to), -1)]
                    self.rows.add(terms, -np.inf, 0)

    def _here(self, expert: int, device: int) -> NDArray[np.int64]:
        """Returns the variables u of an expert on a device, for every number of copies."""
        return np.asarray(self.u_nD[self._expert_n == expert, device])

    def plan_of(self, x: NDArray[np.float64]) -> NDArray[np.bool_] | None:
        """Returns True where a device holds an expert; None means that the known plan is kept."""
        if x[self.q[0]] > 0.5:
            return None
        holds_ED = np.zeros((self.task.num_experts, self.task.num_devices), dtype=bool)
        pair, device = np.nonzero(x[self.u_nD] > 0.5)
        holds_ED[self._expert_n[pair], device] = True
        return holds_ED


_CLOSED = 2e-6  # a relative gap below this counts as closed: the solvers' tolerances
_EXACT = 1e-9  # gap requested if a program is solved to its end
_MIN_FREE, _MAX_FREE = 2, 12  # devices of a window
# one program in four is whole; the others are windows, which find more but prove nothing
_WHOLE_EVERY = 4


class Proof(Enum):
    """The origin of a layer's bound."""

    COUNTING = "counting"  # from `bound.py`
    RELAXATION = "relaxation"  # HiGHS's bound, with its cuts, when time ran out
    OPTIMAL = "optimal"  # HiGHS closed the gap


class LayerState:
    """Alternates whole programs, if they fit, with windows of a few devices that include the
    busiest: a whole program restarts in every slice and is slow to improve a plan."""

    def __init__(self, task: LayerTask, holds_ED: NDArray[np.bool_], max_binaries: int) -> None:
        """`holds_ED` is a plan to start from."""
        self.task, self.holds_ED = task, holds_ED
        self.objective = task.objective(holds_ED)
        self.bound, self.proof = float(task.floor_S.mean()), Proof.COUNTING
        self._max_binaries, self._num_free, self._turn, self._since_better = max_binaries, 3, 0, 0
        self._rng = np.random.default_rng(20261122)

    @property
    def is_closed(self) -> bool:
        """True if no plan is better."""
        return self.objective <= self.bound * (1.0 + _CLOSED)

    def has_gap(self, gap: float) -> bool:
        """Returns True if more than `gap`, relative to the bound, may remain to be gained."""
        return self.objective > self.bound * (1.0 + max(gap, _CLOSED))

    @property
    def is_stuck(self) -> bool:
        """True if windows of all sizes have found nothing for a while."""
        return self._since_better > 3 * self.task.num_devices

    def close(self, seconds: float, most_nodes: int) -> None:
        """Solves the whole program to its end, if it fits; `most_nodes` limits HiGHS's tree."""
        whole = self._whole()
        if whole is None:
            self.bound = self.objective
        elif whole.num_binaries <= self._max_binaries:
            program = LayerProgram(self.task, whole, self.holds_ED, self.objective)
            found = run_highs(program, seconds, gap=_EXACT, most_nodes=most_nodes)
            self._take_plan(program, found)
            self._take_bound(found.bound, found.is_optimal)

    def work(self, seconds: float) -> None:
        """Solves one program, for at most `seconds`."""
        whole = self._whole()
        if whole is None:  # the copies that any better plan needs do not fit
            self.bound = self.objective
            return
        fits = whole.num_binaries <= self._max_binaries
        is_whole = fits and self._turn % _WHOLE_EVERY == 0
        self._turn += 1
        window = whole if is_whole else self._part(whole)
        program = LayerProgram(self.task, window, self.holds_ED, self.objective)
        found = run_highs(program, seconds)
        self._since_better += 1
        self._take_plan(program, found)
        if is_whole:
            self._take_bound(found.bound, found.is_optimal)
        else:
            self._next_window(found.is_optimal)

    def _take_plan(self, program: LayerProgram, found: Found) -> None:
        holds_ED = None if found.x is None else program.plan_of(found.x)
        if holds_ED is not None and self.task.objective(holds_ED) < self.objective:
            self.holds_ED, self.objective = holds_ED, self.task.objective(holds_ED)
            self._since_better = 0

    def _take_bound(self, bound: float, is_optimal: bool) -> None:
        if is_optimal:
            self.bound, self.proof = self.objective, Proof.OPTIMAL
        elif bound > self.bound * (1.0 + _CLOSED):
            self.bound, self.proof = min(bound, self.objective), Proof.RELAXATION

    def _whole(self) -> Window | None:
        """Returns the numbers of copies that a better plan may have; None if there is no better
        plan."""
        task = self.task
        fewest_E = task.fewest_copies(self.objective)
        spare = int(task.slots_D.sum()) - int(fewest_E.sum())
        if spare < 0 or (fewest_E > task.most_copies).any():
            return None
        copies_R = np.arange(1, task.most_copies + 1)
        is_thought_ER = (copies_R >= fewest_E[:, None]) & (copies_R <= fewest_E[:, None] + spare)
        return Window(copies_ER=is_thought_ER, is_free_D=np.ones(task.num_devices, dtype=bool))

    def _part(self, whole: Window) -> Window:
        """Chooses the busiest devices, or in turn random ones; numbers of copies stay or change by
        one. Experts on a device that is not free keep their number."""
        task, counts_E = self.task, self.holds_ED.sum(axis=1)
        each_SE = task.copy_load_SER[:, np.arange(task.num_experts), counts_E - 1]
        load_D = (each_SE @ self.holds_ED / task.speeds_D).mean(axis=0)
        is_free_D = np.zeros(task.num_devices, dtype=bool)
        is_free_D[int(load_D.argmax())] = True
        others = self._rng.permutation(np.flatnonzero(~is_free_D))
        is_free_D[others[: self._num_free - 1]] = True
        copies_R = np.arange(1, task.most_copies + 1)
        near_ER = np.abs(copies_R - counts_E[:, None]) <= 1
        is_now_ER = copies_R == counts_E[:, None]
        is_inside_E1 = ~(self.holds_ED & ~is_free_D).any(axis=1, keepdims=True)
        near_ER = is_now_ER | (near_ER & is_inside_E1 & whole.copies_ER)
        return Window(copies_ER=near_ER, is_free_D=is_free_D)

    def _next_window(self, is_optimal: bool) -> None:
        """Widen the window after a solved program, narrow it after an unsolved one."""
        step = 1 if is_optimal else -1
        self._num_free = min(max(self._num_free + step, _MIN_FREE), _MAX_FREE)
        self._num_free = min(self._num_free, self.task.num_devices)
