"""The moves of the search change the load by exactly the amount that they report."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from experts.placement.judge.copies import CopyLoad
from experts.placement.problem.devices import even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.search.descent import DescentStage, settle
from experts.placement.solvers.search.exchange import Pairs, best_swaps, bundles_of, exchange
from experts.placement.solvers.search.folding import can_fold, folded
from experts.placement.solvers.search.improve import kick_recount, kick_swap
from experts.placement.solvers.search.recount import best_recounts, put
from experts.placement.solvers.search.search_solver import _assigned
from experts.placement.solvers.search.soft_peak import SoftPeak
from experts.placement.solvers.search.start import first_state
from experts.placement.solvers.search.state import State

SHARPNESS = 40.0


def state_of(
    num_scenarios: int = 2, slots: int = 4, num_devices: int = 4, num_experts: int = 11
) -> State:
    random = np.random.default_rng(num_scenarios)
    loads = ExpertLoads(
        counts_SLE=random.lognormal(0, 0.8, (num_scenarios, 3, num_experts)),
        layers=(0, 1, 2),
        scenarios=tuple(map(str, range(num_scenarios))),
    )
    devices = even_devices(num_devices, 1, num_devices * slots)
    return first_state(PlacementProblem(loads=loads, devices=devices))


def linear_part(state: State, before: State) -> np.ndarray:
    """Computes [N] by definition, with the weights of the loads before the move."""
    peak_N1S = before.loads_NDS.max(axis=1, keepdims=True)
    sums = [np.exp(SHARPNESS * (each.loads_NDS - peak_N1S)).sum(axis=1) for each in (state, before)]
    return np.asarray((sums[0] / sums[1]).sum(axis=1) - len(sums[0][0]))


@pytest.mark.parametrize("speeds", [(1.0,) * 4, (1.0, 2.0, 1.0, 1.5)])
def test_an_exchange_changes_what_it_says(speeds: tuple[float, ...]) -> None:
    state = state_of()
    state.speed_D[:] = speeds
    state.add_up()
    bundles = bundles_of(4, (1, 2))
    assert [len(slots_Bm) for slots_Bm in bundles] == [4, 6]
    for step in range(30):
        before = state.take(np.arange(3))
        tried = np.zeros((3, 4, 4), dtype=bool)
        soft = SoftPeak(state, SHARPNESS)
        weighed = soft.weighed(state.loads_NDS)
        pairs = Pairs(row_n=np.arange(3), a_n=np.full(3, step % 4), b_n=np.full(3, (step + 1) % 4))
        swaps = best_swaps(state, soft, weighed, pairs, bundles)
        # Only this pair is left to try, so it is this exchange that is made.
        tried[:] = True
        tried[:, step % 4, (step + 1) % 4] = False
        exchange(state, soft, tried, bundles, num_pairs=1, least=0.0)
        state.check_integrity()
        assert linear_part(state, before) == pytest.approx(swaps.change_n, abs=1e-9)
        assert (swaps.change_n <= 0).all()


@pytest.mark.parametrize("num_scenarios", [1, 3])
def test_a_recount_lowers_the_peak_at_least_as_much_as_it_says(num_scenarios: int) -> None:
    state = state_of(num_scenarios)
    for _ in range(10):
        before = state.take(np.arange(3))
        best = best_recounts(state, SoftPeak(state, SHARPNESS))
        rows = np.flatnonzero(np.isfinite(best.change_N))
        put(state, rows, best.expert_N[rows], best.place_N[rows])
        state.check_integrity()
        # What is far above the peak is not told apart, so only what is near it is compared.
        near = rows[best.change_N[rows] < 100.0]
        assert (linear_part(state, before)[near] <= best.change_N[near] + 1e-9).all()


def test_kicks_and_descents_keep_their_books() -> None:
    state, random = state_of(), np.random.default_rng(0)
    for _ in range(5):
        kick_swap(state, np.arange(3), random)
        kick_recount(state, np.array([0, 2]), random)
        state.check_integrity()
    kicked = state.costs()
    settle(state, DescentStage(sharpness=300.0, least=1e-4), np.zeros(3), lambda _: False)
    state.check_integrity()
    assert (state.costs() < kicked).all()


def test_folding_packs_what_it_found() -> None:
    state = state_of(num_scenarios=1, slots=2, num_devices=8)
    assert can_fold(state)
    result = folded(state, 400, np.random.default_rng(0), lambda: False)
    full = np.flatnonzero((result.slot_NDC < 11).all(axis=(1, 2)))
    assert len(full) > 0
    result.take(full).check_integrity()
    assert (result.costs()[full] <= state.costs()[full] + 1e-9).all()
    assert not can_fold(state_of(num_scenarios=2, slots=2, num_devices=8))
    assert not can_fold(state_of(num_scenarios=1))


def test_names_of_devices_keep_most_copies() -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        overlap_DD = random.integers(0, 9, (4, 4))
        kept = overlap_DD[_assigned(overlap_DD), np.arange(4)].sum()
        best = max(overlap_DD[list(order), np.arange(4)].sum() for order in permutations(range(4)))
        assert kept == best


def test_activated_load_of_a_copy_is_the_chance_that_a_step_reaches_it() -> None:
    """Half of the tokens choose the expert: a step of two misses one copy with 1/4, one of two
    copies with 9/16; an expert that every token chooses is always reached."""
    load = CopyLoad(shares_SLE=np.array([[[0.25, 0.75]]]), num_draws=2.0, top_k=2)
    shares_E = np.array([0.25, 0.5])
    assert load.each(shares_E, 1).tolist() == pytest.approx([0.75, 1.0])
    assert load.each(shares_E, 2).tolist() == pytest.approx([7 / 16, 0.75])
