"""Improves a first plan: descents, then kicks and descents of rows that are not proved best.

A budget of moves is spent one change at a time, on the change that lowers the peak most for each
copy. Shapes as in `state.py`; n rows still worth a try, t tries of each at a time, g pairs of
devices of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from experts.placement.solvers.search.descent import MANY, DescentStage, Stop, settle
from experts.placement.solvers.search.exchange import (
    CHEAPEST,
    Pairs,
    allowed_swaps,
    best_swaps,
    bundles_of,
    promises,
    swap_slots,
)
from experts.placement.solvers.search.folding import can_fold, folded
from experts.placement.solvers.search.recount import best_recounts, put, recount, without_replicas
from experts.placement.solvers.search.soft_peak import SoftPeak
from experts.placement.solvers.search.state import Bools, Floats, Ints, State
from experts.placement.solvers.search.watch import Watch

_NUM_PAIRS = 24  # pairs examined for a swap
_LEAST = 1e-9
# With one scenario use the peak itself; with several begin with a soft peak, because scenarios
# block each other.
_FINE = DescentStage(sharpness=1000.0, least=1e-3, sizes=(1, 2), num_pairs=8)
_BROAD = DescentStage(sharpness=100.0, least=2.5e-2, sizes=(1, 2))
_NARROW = DescentStage(sharpness=300.0, least=2.5e-2, sizes=(1, 2))
_MANY_COPIES = 100_000
_MOST_KICKS, _RECOUNTS = 3, 0.5  # changes of a kick, and the share of them that change counts
_MOST_KICKS_OF_MANY, _RECOUNTS_OF_MANY = 4, 0.3  # with many devices
_LEAVING_SHARPNESS = (10.0, 50.0)
_SPENDING_SHARPNESS = (8.0, 80.0)
_NARROWEST = DescentStage(sharpness=300.0, least=8e-3, sizes=(1, 2, 3), num_pairs=8)
_SHARPNESS = 30.0
_SPREAD = 0.02  # difference in even loads within which a device counts as hot


def spend(state: State, sharpness_N: Floats, random: np.random.Generator | None) -> None:
    """Makes changes until none helps or is allowed.

    A sharp peak considers the hottest device alone, a soft one also the next hottest. `random` adds
    noise to the choice between the two kinds of change, so that several tries differ.
    """
    if state.slot_NDC.shape[1] == 1:
        return  # all load is on one device
    live = np.arange(len(state.slot_NDC))
    while len(live):
        part = state.take(live)
        changed_n = _spend_once(part, sharpness_N[live], random)
        state.put(live, part, np.arange(len(live)))
        live = live[changed_n]


def _spend_once(
    state: State, sharpness_N: Floats, random: np.random.Generator | None
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    soft = SoftPeak(state, sharpness_N)
    rows = np.arange(len(state.slot_NDC))
    recounts = best_recounts(state, soft, per_copy=True)
    weighed_NDS = soft.weighed(state.loads_NDS)
    pairs = _pairs(promises(weighed_NDS))
    slots_C1 = bundles_of(state.slot_NDC.shape[2], (1,))
    swaps = best_swaps(state, soft, weighed_NDS, pairs, slots_C1, per_copy=True)
    score_Ng = (swaps.change_n / np.maximum(swaps.cost_n, CHEAPEST)).reshape(len(rows), -1)
    recount_N = recounts.change_N / np.maximum(recounts.cost_N, CHEAPEST)
    if random is not None:
        score_Ng = score_Ng * random.uniform(0.6, 1.0, score_Ng.shape)
        recount_N = recount_N * random.uniform(0.6, 1.0, recount_N.shape)
    best_N = score_Ng.argmin(axis=1)
    swap_N = score_Ng[rows, best_N]
    is_recount_N = (recount_N <= swap_N) & (recount_N < -_LEAST)
    is_swap_N = ~is_recount_N & (swap_N < -_LEAST)
    live = rows[is_swap_N]
    n = live * score_Ng.shape[1] + best_N[live]
    swap_slots(state, live, (pairs.a_n[n], swaps.from_n[n]), (pairs.b_n[n], swaps.to_n[n]))
    live = rows[is_recount_N]
    put(state, live, recounts.expert_N[live], recounts.place_N[live])
    return np.asarray(is_recount_N | is_swap_N)


def _pairs(promise_NDD: Floats) -> Pairs:
    """Returns the `_NUM_PAIRS` most promising pairs, each once; a device may be in several."""
    num_rows, num_devices, _ = promise_NDD.shape
    a_p, b_p = np.triu_indices(num_devices, 1)
    promise_Np = promise_NDD[:, a_p, b_p]
    count = min(_NUM_PAIRS, len(a_p))
    if count == len(a_p):
        chosen_Ng: Ints = np.tile(np.arange(count), (num_rows, 1))
    else:
        chosen_Ng = np.argpartition(-promise_Np, count - 1, axis=1)[:, :count]
    row_n = np.repeat(np.arange(num_rows), count)
    return Pairs(row_n=row_n, a_n=a_p[chosen_Ng].ravel(), b_n=b_p[chosen_Ng].ravel())


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The amount of work of a search; every part is deterministic."""

    stages: tuple[DescentStage, ...]
    rounds: int  # rounds of kicks, at most
    tries: int  # in each round, of each layer
    patience: int  # rounds without a better plan before a layer is left
    folding_steps: int = 2500  # if devices have two slots
    spending_rounds: int = 2  # if moves are limited
    spending_tries: int = 6
    tolerance: float = 5e-4  # relative gap below which a layer counts as optimal

    @classmethod
    def usual(cls, num_scenarios: int, num_copies: int, num_devices: int = 1) -> Effort:
        """Returns the effort until a good plan is found; `num_copies` counts all layers."""
        if num_scenarios == 1 and num_devices <= MANY:
            return cls(stages=(_FINE,), rounds=12, tries=6, patience=4)
        if num_scenarios == 1:
            return cls(stages=(_FINE,), rounds=12, tries=4, patience=12)
        # Kick only if a round is fast.
        rounds = min(_MANY_COPIES // (num_scenarios * num_copies), 12)
        return cls(stages=(_BROAD, _NARROW), rounds=rounds, tries=4, patience=4)

    @classmethod
    def thorough(cls, num_scenarios: int, num_copies: int, num_devices: int = 1) -> Effort:
        """Returns the effort until hardly anything more is found; for a search with a deadline."""
        if num_scenarios == 1:
            return cls(stages=(_FINE,), rounds=10_000, tries=8, patience=60, spending_rounds=10_000)
        stages = (_BROAD, _NARROW, _NARROWEST)
        return cls(stages=stages, rounds=10_000, tries=2, patience=30, spending_rounds=10_000)


def improve(state: State, bound_N: Floats, effort: Effort, seed: int, watch: Watch) -> None:
    """Improves the state in place; whenever it is interrupted, `state` holds valid slots."""
    random = np.random.default_rng(seed)
    enough_N = bound_N * (1.0 + 0.2 * effort.tolerance)
    if state.rules.budget is not None:
        _spend(state, effort, random, watch)
    num_parts = len(effort.stages) + effort.rounds
    for done, stage in enumerate(effort.stages):
        settle(state, stage, enough_N, partial(_tell_cost, watch, done / num_parts))
    if not state.rules.fill:
        _leave_out(state, effort.stages[-1], enough_N, partial(_tell_cost, watch, 1.0))
    if state.rules.budget is not None:
        return  # kicks would use up the budget of moves
    if can_fold(state):
        _fold(state, effort, enough_N, random, partial(_tell_cost, watch, 0.5))
    idle_N = np.zeros(len(bound_N), dtype=np.int64)
    for done in range(len(effort.stages), num_parts):
        cost_N = state.costs()
        is_open_N = cost_N > bound_N * (1.0 + effort.tolerance)
        live = np.flatnonzero(is_open_N & (idle_N < effort.patience))
        stop = partial(_tell, watch, float(cost_N.mean()), done / num_parts)
        if not len(live) or stop(0.0):
            return
        better_n = _round(state, live, enough_N, effort, random, stop)
        idle_N[live] = np.where(better_n, 0, idle_N[live] + 1)


def _fold(
    state: State, effort: Effort, enough_N: Floats, random: np.random.Generator, stop: Stop
) -> None:
    """Tries the numbers of copies that the annealing found, for rows that they improve."""
    cost_N = state.costs()
    live = np.flatnonzero(cost_N > enough_N * (1.0 + effort.tolerance))
    told = partial(stop, float(cost_N.mean()))
    if not len(live) or told():
        return
    part = folded(state.take(live), effort.folding_steps, random, told)
    # no device got two copies of an expert
    is_full_n = (part.slot_NDC < part.num_experts).all(axis=(1, 2))
    live, part = live[is_full_n], part.take(np.flatnonzero(is_full_n))
    settle(part, effort.stages[-1], enough_N[live], stop)
    better = np.flatnonzero(part.costs() < state.costs()[live])
    state.put(live[better], part, better)


def _leave_out(state: State, stage: DescentStage, enough_N: Floats, stop: Stop) -> None:
    """Removes copies that bring no gain, which is possible if slots need not be filled: from the
    current plan, and from one without replicas."""
    _recount_softly(state, stage, enough_N, stop)
    if state.rules.budget is None:
        other = without_replicas(state)
        settle(other, stage, enough_N, stop)
        _recount_softly(other, stage, enough_N, stop)
        better = np.flatnonzero(other.costs() < state.costs() - 1e-9)
        state.put(better, other, better)


def _recount_softly(state: State, stage: DescentStage, enough_N: Floats, stop: Stop) -> None:
    """Makes several changes at a time, because the peak falls only with the last of several equally
    hot devices and others may rise in between."""
    for sharpness in (*_LEAVING_SHARPNESS, stage.sharpness):
        live = np.arange(len(state.slot_NDC))
        while len(live) and not stop(float(state.costs().mean())):
            part = state.take(live)
            before_n = part.costs()
            for _ in range(part.slot_NDC[0].size):
                if not recount(part, SoftPeak(part, sharpness)).any():
                    break
            settle(part, stage, enough_N[live], stop)
            after_n = part.costs()
            kept = np.flatnonzero(after_n <= before_n)
            state.put(live[kept], part, kept)
            live = live[after_n < before_n - 1e-9]


def _spend(state: State, effort: Effort, random: np.random.Generator, watch: Watch) -> None:
    """Spends the budget from the current plan, with soft and sharp peaks; keeps the best try of
    each row."""
    tries, rows = effort.spending_tries, np.arange(len(state.slot_NDC))
    first, idle = state.take(rows), 0
    for done in range(effort.spending_rounds):
        if done and (idle >= effort.patience or watch.tell(float(state.costs().mean()), 0.0)):
            return
        part = first.take(np.repeat(rows, tries))
        spend(part, np.tile(np.geomspace(*_SPENDING_SHARPNESS, tries), len(rows)), random)
        costs_Nt = part.costs().reshape(-1, tries)
        better_N = costs_Nt.min(axis=1) < state.costs() - 1e-9
        chosen_N = rows * tries + costs_Nt.argmin(axis=1)
        state.put(rows[better_N], part, chosen_N[better_N])
        idle = 0 if better_N.any() else idle + 1


def _tell_cost(watch: Watch, done: float, objective: float) -> bool:
    return watch.tell(objective, done)


def _tell(watch: Watch, objective: float, done: float, _: float) -> bool:
    return watch.tell(objective, done)


def _round(
    state: State,
    live: Ints,
    enough_N: Floats,
    effort: Effort,
    random: np.random.Generator,
    stop: Stop,
) -> Bools:
    """Keeps each row's best try if it is better. Returns [n]: whether it was."""
    tries = effort.tries
    part = state.take(np.repeat(live, tries))
    before_NDS = part.loads_NDS.copy()
    _kick(part, random)
    same_ND = (np.abs(part.loads_NDS - before_NDS) < 1e-12).all(axis=2)
    settle(part, effort.stages[-1], np.repeat(enough_N[live], tries), stop, same_ND)
    costs_nt = part.costs().reshape(-1, tries)
    best_n = costs_nt.argmin(axis=1)
    better_n = costs_nt.min(axis=1) < state.costs()[live] - 1e-9
    chosen_n = np.arange(len(live)) * tries + best_n
    state.put(live[better_n], part, chosen_n[better_n])
    return np.asarray(better_n)


def _kick(state: State, random: np.random.Generator) -> None:
    """Makes a few random changes of each row."""
    kicks, share = (_MOST_KICKS, _RECOUNTS)
    if state.slot_NDC.shape[1] > MANY:
        kicks, share = (_MOST_KICKS_OF_MANY, _RECOUNTS_OF_MANY)
    num_kicks_N = random.integers(1, kicks + 1, size=len(state.slot_NDC))
    for kick in range(kicks):
        recounts_N = random.random(len(num_kicks_N)) < share
        kick_recount(state, np.flatnonzero((num_kicks_N > kick) & recounts_N), random)
        kick_swap(state, np.flatnonzero((num_kicks_N > kick) & ~recounts_N), random)


def kick_swap(state: State, rows: Ints, random: np.random.Generator) -> None:
    """Swap, in some rows, a random slot of a hot device with a random slot elsewhere."""
    if not len(rows):
        return
    part, index_n = state.take(rows), np.arange(len(rows))
    hot_n = _hot(part, random)
    num_devices = part.slot_NDC.shape[1]
    device_n = (hot_n + random.integers(1, max(2, num_devices), size=len(rows))) % num_devices
    there_nC, back_nC = allowed_swaps(part, Pairs(row_n=index_n, a_n=hot_n, b_n=device_n))
    from_n, leaves_n = _any(there_nC, random)
    to_n, comes_n = _any(back_nC, random)
    live = np.flatnonzero(leaves_n & comes_n & (hot_n != device_n))
    swap_slots(part, live, (hot_n[live], from_n[live]), (device_n[live], to_n[live]))
    if part.rules.budget is not None:
        live = np.flatnonzero(part.new_copies() <= part.rules.budget)
        state.put(rows[live], part, live)
    else:
        state.put(rows, part, index_n)


def kick_recount(state: State, rows: Ints, random: np.random.Generator) -> None:
    """Makes, in some rows, one of the recounts that harm least."""
    if not len(rows):
        return
    part = state.take(rows)
    chosen = best_recounts(part, SoftPeak(part, _SHARPNESS), random=random)
    live = np.flatnonzero(np.isfinite(chosen.change_N))
    put(part, live, chosen.expert_N[live], chosen.place_N[live])
    state.put(rows, part, np.arange(len(rows)))


def _hot(state: State, random: np.random.Generator) -> Ints:
    """Draws a device [N], hotter ones with higher probability, in a random scenario."""
    num_rows, num_devices, num_scenarios = state.loads_NDS.shape
    scenario_N = random.integers(num_scenarios, size=num_rows)
    heat_ND = state.loads_NDS[np.arange(num_rows), :, scenario_N]
    noise_ND = random.exponential(_SPREAD, size=(num_rows, num_devices))
    return np.asarray((heat_ND + noise_ND).argmax(axis=1))


def _any(open_Nn: Bools, random: np.random.Generator) -> tuple[Ints, Bools]:
    """Draws one open entry [N], all with equal probability; the second result says whether there is
    one."""
    ticket_Nn: Floats = np.where(open_Nn, random.random(open_Nn.shape), -1.0)
    chosen_N = ticket_Nn.argmax(axis=1)
    return chosen_N, open_Nn[np.arange(len(open_Nn)), chosen_N]
