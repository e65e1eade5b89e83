"""One layer while the integer program works on it: the best plan, and what was proved.

E experts, D devices, R copies.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from experts.placement.solvers.ilp.highs import Found, run_highs
from experts.placement.solvers.ilp.layer_program import LayerProgram, Window
from experts.placement.solvers.ilp.layer_task import LayerTask

_CLOSED = 2e-6  # a relative gap below this is none: solvers' tolerances
_EXACT = 1e-9  # the gap asked for where a program is solved to its end
_MIN_FREE, _MAX_FREE = 2, 12  # devices of a window
_WHOLE_EVERY = 4  # programs: the others are windows, which find more, and prove nothing


class Proof(Enum):
    """Where a layer's bound comes from."""

    COUNTING = "counting"  # `bound.py`
    RELAXATION = "relaxation"  # HiGHS's, with its cuts, when time was over
    OPTIMAL = "optimal"  # HiGHS closed the gap


class LayerState:
    """Whole programs where they fit, by turns with windows of a few devices, the busiest among
    them: restarted in every slice, a whole program is slow to find what is better."""

    def __init__(self, task: LayerTask, holds_ED: NDArray[np.bool_], max_binaries: int) -> None:
        """`holds_ED`: a plan to start from."""
        self.task, self.holds_ED = task, holds_ED
        self.objective = task.objective(holds_ED)
        self.bound, self.proof = float(task.floor_S.mean()), Proof.COUNTING
        self._max_binaries, self._num_free, self._turn, self._since_better = max_binaries, 3, 0, 0
        self._rng = np.random.default_rng(20261122)

    @property
    def is_closed(self) -> bool:
        """No plan is better."""
        return self.objective <= self.bound * (1.0 + _CLOSED)

    def has_gap(self, gap: float) -> bool:
        """More than so much may be left to gain, as a part of the bound."""
        return self.objective > self.bound * (1.0 + max(gap, _CLOSED))

    @property
    def is_stuck(self) -> bool:
        """Windows of all sizes found nothing for a while."""
        return self._since_better > 3 * self.task.num_devices

    def close(self, seconds: float, most_nodes: int) -> None:
        """The whole program to its end, if it fits; `most_nodes` of HiGHS's tree."""
        whole = self._whole()
        if whole is None:
            self.bound = self.objective
        elif whole.num_binaries <= self._max_binaries:
            program = LayerProgram(self.task, whole, self.holds_ED, self.objective)
            found = run_highs(program, seconds, gap=_EXACT, most_nodes=most_nodes)
            self._take_plan(program, found)
            self._take_bound(found.bound, found.is_optimal)

    def work(self, seconds: float) -> None:
        """One program, for so long at most."""
        whole = self._whole()
        if whole is None:  # even so many copies of each expert as any better plan needs do not fit
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
        """Numbers of copies that a better plan may have; None: there is none."""
        task = self.task
        fewest_E = task.fewest_copies(self.objective)
        spare = int(task.slots_D.sum()) - int(fewest_E.sum())
        if spare < 0 or (fewest_E > task.most_copies).any():
            return None
        copies_R = np.arange(1, task.most_copies + 1)
        is_thought_ER = (copies_R >= fewest_E[:, None]) & (copies_R <= fewest_E[:, None] + spare)
        return Window(copies_ER=is_thought_ER, is_free_D=np.ones(task.num_devices, dtype=bool))

    def _part(self, whole: Window) -> Window:
        """The busiest devices by turns with others by chance; copies as they are, or one more or
        less; of experts that stay on a device that is not free, as they are."""
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
        """Wider while windows are solved, narrower when they are not."""
        step = 1 if is_optimal else -1
        self._num_free = min(max(self._num_free + step, _MIN_FREE), _MAX_FREE)
        self._num_free = min(self._num_free, self.task.num_devices)
