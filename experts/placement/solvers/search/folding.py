"""Chooses the numbers of copies by annealing, for devices of two slots each.

There the best packing of given copies is known: the heaviest with the lightest, and so on inwards.
The search is therefore over numbers of copies alone. Single exchanges do not help it: one copy more
of an expert makes all its copies lighter and every partner wrong.

M chains, several for a row; E experts, P = 2 D copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experts.placement.solvers.search.start import pack
from experts.placement.solvers.search.state import Floats, Ints, State

_NUM_CHAINS = 4
_HOT_SHARE = 0.1  # share of changes that give one copy more to the hottest pair
_HOTTEST, _COLDEST = 0.01, 1e-4  # temperatures, in even loads


def can_fold(state: State) -> bool:
    """Returns True if devices are equal with two slots each, all to be filled, with one scenario,
    with replicas, and without other rules."""
    rules, num_slots = state.rules, state.slot_NDC.shape[2]
    return (
        num_slots == 2
        and state.loads_NDS.shape[2] == 1
        and bool(rules.open_NDC.all())
        and rules.fill
        and rules.allowed_NED is None
        and rules.pinned_NED is None
        and rules.budget is None
        and bool((state.speed_D == state.speed_D[0]).all())
        and bool((state.copies_NE > 1).any())
    )


def folded(
    state: State, num_steps: int, random: np.random.Generator, stop: Callable[[], bool]
) -> State:
    """Returns other plans for the same rows, packed from the best numbers of copies found."""
    num_rows = len(state.slot_NDC)
    chains = _Chains.of(state.take(np.repeat(np.arange(num_rows), _NUM_CHAINS)))
    best_ME, best_M = chains.copies_ME.copy(), chains.cost_M.copy()
    for temperature in np.geomspace(_HOTTEST, _COLDEST, num_steps):
        if stop():
            break
        chains.step(temperature, random)
        better_M = chains.cost_M < best_M
        best_M[better_M] = chains.cost_M[better_M]
        best_ME[better_M] = chains.copies_ME[better_M]
    chosen_N = best_M.reshape(num_rows, -1).argmin(axis=1) + np.arange(num_rows) * _NUM_CHAINS
    result = State.empty(state.load, state.speed_D, state.rules)
    result.copies_NE[:, :-1] = best_ME[chosen_N]
    result.weigh()
    pack(result)
    return result


@dataclass(slots=True)
class _Chains:
    """Annealing chains, changed in place. A cost is the largest sum of the heaviest and the
    lightest copy, of the next two, and so on; `hot_M` is the expert of the heavier copy there."""

    state: State  # provides the loads of copies
    copies_ME: Ints
    expert_MP: Ints  # expert of each copy, in no order
    each_ME: Floats
    cost_M: Floats
    hot_M: Ints

    @classmethod
    def of(cls, state: State) -> _Chains:
        copies_ME = state.copies_NE[:, :-1].copy()
        expert_MP = state.slot_NDC.reshape(len(copies_ME), -1).copy()
        each_ME = state.each_NES[:, :-1, 0].copy()
        cost_M, hot_M = _costs(expert_MP, each_ME)
        return cls(state, copies_ME, expert_MP, each_ME, cost_M, hot_M)

    def step(self, temperature: float, random: np.random.Generator) -> None:
        """Changes one or two copies to another expert, sometimes that of the hottest pair; a change
        for the worse is accepted with a probability."""
        num_chains, num_experts = self.copies_ME.shape
        copies_ME, expert_MP = self.copies_ME.copy(), self.expert_MP.copy()
        each_ME = self.each_ME.copy()
        anyone = random.integers(num_experts, size=(2, num_chains))
        is_hot = random.random(num_chains) < _HOT_SHARE
        self._change(np.arange(num_chains), np.where(is_hot, self.hot_M, anyone[0]), random)
        again = np.flatnonzero(random.random(num_chains) < 0.5)
        self._change(again, anyone[1, again], random)
        cost_M, hot_M = _costs(self.expert_MP, self.each_ME)
        chance_M = np.exp(np.minimum(self.cost_M - cost_M, 0.0) / temperature)
        back_M = random.random(num_chains) >= chance_M
        self.copies_ME[back_M], self.expert_MP[back_M] = copies_ME[back_M], expert_MP[back_M]
        self.each_ME[back_M] = each_ME[back_M]
        self.cost_M = np.where(back_M, self.cost_M, cost_M)
        self.hot_M = np.where(back_M, self.hot_M, hot_M)

    def _change(self, rows: Ints, come: Ints, random: np.random.Generator) -> None:
        num_copies = self.expert_MP.shape[1]
        place = random.integers(num_copies, size=len(rows))
        go = self.expert_MP[rows, place]
        may = self.copies_ME[rows, go] > 1
        may &= (self.copies_ME[rows, come] < num_copies // 2) & (come != go)
        rows, place, come, go = rows[may], place[may], come[may], go[may]
        self.expert_MP[rows, place] = come
        for expert, step in ((come, 1), (go, -1)):
            self.copies_ME[rows, expert] += step
            copies = self.copies_ME[rows, expert]
            self.each_ME[rows, expert] = self.state.each_with(rows, expert, copies)[:, 0]


def _costs(expert_MP: Ints, each_ME: Floats) -> tuple[Floats, Ints]:
    rows_M = np.arange(len(expert_MP))
    each_MP = each_ME[rows_M[:, None], expert_MP]
    order_MP = np.argsort(each_MP, axis=1)
    sorted_MP = each_MP[rows_M[:, None], order_MP]
    pair_MP = sorted_MP + sorted_MP[:, ::-1]
    half = pair_MP.shape[1] // 2  # in the second half the heavier copy comes first
    hottest_M = half + pair_MP[:, half:].argmax(axis=1)
    return pair_MP[rows_M, hottest_M], expert_MP[rows_M, order_MP[rows_M, hottest_M]]
