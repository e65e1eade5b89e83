"""The best plan and the proof so far of one layer that the integer program works on.

E experts, D devices, R copies.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.ilp.highs import Found, run_highs
from experts.placement.solvers.ilp.layer_program import LayerProgram, Window
from experts.placement.solvers.ilp.layer_task import LayerTask

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
        """True if more than `gap`, relative to the bound, may remain to be gained."""
        return self.objective > self.bound * (1.0 + max(gap, _CLOSED))

    @property
    def is_stuck(self) -> bool:
        """True if windows of all sizes have found nothing for a while."""
        return self._since_better > 3 * self.task.num_devices

    def close(self, seconds: float, most_nodes: int) -> None:
        """Solve the whole program to its end, if it fits; `most_nodes` limits HiGHS's tree."""
        whole = self._whole()
        if whole is None:
            self.bound = self.objective
        elif whole.num_binaries <= self._max_binaries:
            program = LayerProgram(self.task, whole, self.holds_ED, self.objective)
            found = run_highs(program, seconds, gap=_EXACT, most_nodes=most_nodes)
            self._take_plan(program, found)
            self._take_bound(found.bound, found.is_optimal)

    def work(self, seconds: float) -> None:
        """Solve one program, for at most `seconds`."""
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
        """Return the numbers of copies that a better plan may have; None if there is no better
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
        """Choose the busiest devices, or in turn random ones; numbers of copies stay or change by
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
