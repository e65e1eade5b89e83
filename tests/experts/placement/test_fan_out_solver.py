"""The fan-out solver: swaps against a recount, planted groups, limits, early ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.placement.judge.balance import objective_of
from experts.placement.judge.copies import copies_of
from experts.placement.judge.plan_judge import measure_fan_out
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices, even_devices
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import Grouping, Move, Pin, PlacementProblem
from experts.placement.solution import Progress, Solution
from experts.placement.solvers.fan_out.fan_out_solver import FanOutOptions, FanOutSolver
from experts.placement.solvers.fan_out.layer_cost import CostWeights, TokenSets
from experts.placement.solvers.search import watch

NUM_LAYERS, NUM_EXPERTS, NUM_DEVICES = 3, 16, 4


class Dealt:
    """Deals experts to devices in turn, with replicas of the first experts behind them."""

    name = "dealt"

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        num_devices = len(problem.devices)
        ranks = tuple(
            tuple(
                (expert + copy * 3) % num_devices
                for copy in range(1 + (expert < problem.num_replicas))
            )
            for expert in range(problem.loads.num_experts)
        )
        placement = Placement(
            num_ranks=num_devices,
            num_experts=problem.loads.num_experts,
            ranks_of=dict.fromkeys(problem.loads.layers, ranks),
        )
        copies_LED = copies_of(placement, problem.loads.layers)
        return Solution(
            placement=placement,
            objective=objective_of(problem, copies_LED),
            bound=1.0,
            bound_proof="the mean",
            solver=self.name,
            seconds=0.0,
            is_complete=True,
        )


def planted(num_tokens: int = 200, seed: int = 9) -> TokenChoices:
    """Returns tokens of two kinds. Each kind chooses 3 of 8 experts that belong together, in
    another order in each layer; one choice in ten is any expert."""
    rng = np.random.default_rng(seed)
    ids_NLK = np.empty((num_tokens, NUM_LAYERS, 3), dtype=np.int64)
    order_LE = np.array([rng.permutation(NUM_EXPERTS) for _ in range(NUM_LAYERS)])
    for token in range(num_tokens):
        kind = int(rng.integers(2))
        for layer in range(NUM_LAYERS):
            ids_K = kind * 8 + rng.permutation(8)[:3]
            if rng.random() < 0.1:
                ids_K = rng.permutation(NUM_EXPERTS)[:3]
            ids_NLK[token, layer] = order_LE[layer, ids_K]
    return TokenChoices(
        expert_ids_NLK=ids_NLK, num_experts=NUM_EXPERTS, layers=tuple(range(NUM_LAYERS))
    )


CHOICES = planted()


def problem_of(num_slots: int = NUM_EXPERTS) -> PlacementProblem:
    return PlacementProblem(
        loads=CHOICES.loads("trace"), devices=even_devices(NUM_DEVICES, 2, num_slots)
    )


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.data())
def test_a_swaps_change_is_that_of_counting_anew(data: st.DataObject) -> None:
    num_copies, num_groups = data.draw(st.integers(4, 9)), data.draw(st.integers(1, 4))
    rows = st.permutations(range(num_copies)).map(lambda order: order[:3])
    copies_NK = np.array(data.draw(st.lists(rows, min_size=1, max_size=12)))
    group = st.integers(0, num_groups - 1)
    group_C = np.array(data.draw(st.lists(group, min_size=num_copies, max_size=num_copies)))
    sets = TokenSets(copies_NK, num_copies)
    before = sets.groups_per_token(group_C)
    assert before == pytest.approx(np.mean([len({*group_C[row]}) for row in copies_NK]))
    change_CC = sets.swap_changes(group_C, num_groups)
    for a in range(num_copies):
        for b in range(num_copies):
            after_C = group_C.copy()
            after_C[[a, b]] = group_C[[b, a]]
            after = sets.groups_per_token(after_C)
            assert change_CC[a, b] == pytest.approx(after - before, abs=1e-12), f"{a} for {b}"


@pytest.mark.parametrize("num_slots", [NUM_EXPERTS, NUM_EXPERTS + 4])
def test_experts_that_go_together_come_to_one_node(num_slots: int) -> None:
    """A tenth of the tokens choose freely and mostly use two nodes."""
    problem = problem_of(num_slots)
    start = Dealt().solve(problem).placement
    options = FanOutOptions(cap=0.1)
    solution = FanOutSolver(CHOICES, Dealt(), options).solve(problem)
    before = measure_fan_out(start, CHOICES, problem.devices)
    after = measure_fan_out(solution.placement, CHOICES, problem.devices)
    assert before.nodes_per_token > 1.7
    assert after.nodes_per_token < (1.12 if num_slots == NUM_EXPERTS else 1.3)
    assert after.cross_node_pairs < 0.6 * before.cross_node_pairs
    assert after.devices_per_token < before.devices_per_token
    assert solution.is_complete and solution.solver == "fan-out"
    held_D = copies_of(solution.placement, problem.loads.layers).sum(axis=1)
    assert (held_D == num_slots // NUM_DEVICES).all(), "slots are as full as before"


def test_memory_that_layers_share_unequally_is_kept() -> None:
    """Identical devices then have different numbers of slots in a layer, and swap nothing in it."""
    num_copies = NUM_LAYERS * NUM_EXPERTS // NUM_DEVICES + 2
    devices = tuple(
        Device(node=index // 2, num_slots=NUM_EXPERTS, memory_bytes=10 * num_copies)
        for index in range(NUM_DEVICES)
    )
    problem = PlacementProblem(
        loads=CHOICES.loads("trace"),
        devices=Devices(devices=devices),
        bytes_per_expert=10,
        fill=False,
    )
    slots_LD = problem.slots_by_layer()
    assert (slots_LD.min(axis=1) < slots_LD.max(axis=1)).any(), "not all layers divide"
    placement = FanOutSolver(CHOICES).solve(problem).placement
    held_LD = copies_of(placement, problem.loads.layers).sum(axis=1)
    assert (held_LD <= slots_LD).all() and held_LD.sum(axis=0).max() <= num_copies


@pytest.mark.parametrize("cap", [0.0, 0.05])
def test_no_layer_passes_the_cap(cap: float) -> None:
    problem = problem_of()
    start = Dealt().solve(problem)
    solution = FanOutSolver(CHOICES, Dealt(), FanOutOptions(cap=cap)).solve(problem)
    layers = problem.loads.layers
    for index in range(NUM_LAYERS):
        one = replace(
            problem,
            loads=replace(
                problem.loads,
                counts_SLE=problem.loads.counts_SLE[:, [index]],
                layers=(layers[index],),
            ),
        )
        at_start, at_end = (
            objective_of(one, copies_of(each.placement, [layers[index]]))
            for each in (start, solution)
        )
        assert at_end <= at_start * (1 + cap) + 1e-9, f"layer {index}: {at_start} to {at_end}"


def test_limits_are_kept() -> None:
    problem = problem_of()
    start = Dealt().solve(problem).placement
    pinned = replace(problem, pins=(Pin(expert=5, device=1), Pin(expert=2, device=2, layer=1)))
    moved = replace(problem, move=Move(current=start, max_copies_per_layer=4))
    solver = FanOutSolver(CHOICES, Dealt(), FanOutOptions(cap=0.1))
    with_pins = copies_of(solver.solve(pinned).placement, pinned.loads.layers)
    assert with_pins[:, 5, 1].all() and with_pins[1, 2, 2]
    current_LED = copies_of(start, moved.loads.layers)
    with_moves = copies_of(solver.solve(moved).placement, moved.loads.layers)
    num_moves_L = ((with_moves > 0) & (current_LED == 0)).sum(axis=(1, 2))
    assert (num_moves_L <= 4).all() and num_moves_L.any(), f"{num_moves_L}"


def test_groups_stay_on_few_nodes() -> None:
    problem = replace(problem_of(), grouping=Grouping(num_groups=2))
    size = NUM_EXPERTS // 2
    ranks = tuple((2 * (e // size) + e % 2,) for e in range(NUM_EXPERTS))

    class Whole(Dealt):
        def solve(
            self,
            problem: PlacementProblem,
            *,
            seconds: float | None = None,
            report: Callable[[Progress], bool] | None = None,
        ) -> Solution:
            placement = Placement(
                num_ranks=NUM_DEVICES,
                num_experts=NUM_EXPERTS,
                ranks_of=dict.fromkeys(problem.loads.layers, ranks),
            )
            return replace(super().solve(problem), placement=placement)

    solution = FanOutSolver(CHOICES, Whole(), FanOutOptions(cap=0.5)).solve(problem)
    copies_LED = copies_of(solution.placement, problem.loads.layers)
    is_on_node = copies_LED.reshape(NUM_LAYERS, 2, size, 2, 2).any(axis=(2, 4))
    assert (is_on_node.sum(axis=2) == 1).all(), "each group on one node"


def test_small_layers_are_proved_best_of_all_plans() -> None:
    """Top 2 of 6 experts on 3 devices of 2 nodes: 15 sets, and 90 plans of a layer under the
    cap."""
    rng = np.random.default_rng(4)
    ids_NLK = np.array([[rng.permutation(6)[:2]] for _ in range(300)])
    ids_NLK[:200, 0] = ids_NLK[:200, 0] // 3 * 3 + rng.permutation(3)[:2]
    choices = TokenChoices(expert_ids_NLK=ids_NLK, num_experts=6, layers=(0,))
    devices = Devices(
        devices=(
            Device(node=0, num_slots=2),
            Device(node=0, num_slots=2),
            Device(node=1, num_slots=2),
        )
    )
    problem = PlacementProblem(loads=choices.loads("trace"), devices=devices)
    options = FanOutOptions(cap=0.2, exact_slice_s=100.0, weights=CostWeights(spread=0.0))
    start = Dealt().solve(problem)
    solution = FanOutSolver(choices, Dealt(), options).solve(problem)
    assert "1 of 1 layers proved best by HiGHS" in solution.bound_proof

    def cost(placement: Placement) -> float:
        found = measure_fan_out(placement, choices, devices)
        return found.nodes_per_token + options.weights.devices * found.devices_per_token

    least = np.inf
    for order in itertools.permutations((0, 0, 1, 1, 2, 2)):
        ranks_of = {0: tuple((device,) for device in order)}
        placement = Placement(num_ranks=3, num_experts=6, ranks_of=ranks_of)
        if objective_of(problem, copies_of(placement, (0,))) <= 1.2 * start.objective:
            least = min(least, cost(placement))
    assert cost(solution.placement) == pytest.approx(least, abs=1e-5)


@pytest.mark.parametrize("way", ["no", "interrupt", "deadline"])
def test_the_plan_so_far_comes_back(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "deadline":  # a fast machine would be done before it says so
        monkeypatch.setattr(watch, "_BETWEEN_S", 0.0)
    problem, said = problem_of(), list[Progress]()

    def report(progress: Progress) -> bool:
        said.append(progress)
        if way == "interrupt":
            raise KeyboardInterrupt
        return False

    seconds = 0.0 if way == "deadline" else None
    solver = FanOutSolver(CHOICES, Dealt())
    solution = solver.solve(problem, seconds=seconds, report=report)
    assert not solution.is_complete
    solution.placement.check_fits(problem.loads.layers, NUM_EXPERTS, NUM_DEVICES)
    assert len(said) == {"no": 1, "interrupt": 1, "deadline": 0}[way]


def test_another_models_trace_and_a_wrong_cap_are_refused() -> None:
    problem = problem_of()
    other = TokenChoices(
        expert_ids_NLK=CHOICES.expert_ids_NLK[:, :2], num_experts=NUM_EXPERTS, layers=(0, 1)
    )
    with pytest.raises(PlacementError, match="16 experts in 2 layers, but the loads have 16 in 3"):
        FanOutSolver(other, Dealt()).solve(problem)
    with pytest.raises(PlacementError, match="cap .* got -0.1"):
        FanOutSolver(CHOICES, Dealt(), FanOutOptions(cap=-0.1))
