"""The simulator runs the server's own decisions: the same schedules, also with a bug in them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cluster.autoscale.autoscaler import Autoscaler
from moe_serve.cluster.autoscale.plan_table import PlanTable
from moe_serve.cluster.autoscale.policies import PlannedPolicy
from moe_serve.cluster.autoscale.rate_forecast import RateForecast
from moe_serve.cluster.autoscale.scale_view import AutoscalePolicy
from moe_serve.cluster.cells.migration import Migration
from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.cluster.cells.open_moves import OpenMoves
from moe_serve.cluster.cells.places import CellLike
from moe_serve.cluster.cells.rates import LinkRates, StepRates
from moe_serve.cluster.cells.router import CellRouter
from moe_serve.cluster.parcels.parcel import PageCarrier
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.step_in_flight import StepCoordinator
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor, StepExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.engine.schedule.scheduler import Scheduler
from moe_serve.engine.schedule.starter import Starter
from moe_serve.engine.schedule.waiting_queue import WaitingQueue
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.service.service_policy import ServicePolicy
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.micro_batch_choice import MicroBatchChooser
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepCosts
from moe_serve.simulate import simulated_cell as cell_module
from moe_serve.simulate.coordinated.cells_world import CellsWorld, Watcher
from moe_serve.simulate.coordinated.coordinated_cell import CoordinatedCell
from moe_serve.simulate.coordinated.instant_carrier import InstantCarrier
from moe_serve.simulate.coordinated.shared_links import SharedLinks
from moe_serve.simulate.instant_executor import InstantExecutor
from moe_serve.simulate.instant_ranks import InstantCoordinator
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulated_cell import CellLimits, SimulatedCell, make_cell
from moe_serve.simulate.steps_ahead import SimulatedRequest
from moe_serve.simulate.virtual_clock import VirtualClock
from moe_serve.simulate.world import World
from tests.support.cluster.calibrations import cpu_calibration
from tests.support.cluster.fake_coordinator import FakeCoordinator, fake_cluster
from tests.support.engine.fake_runner import FakeRunner

COSTS = cpu_calibration().costs
LIMITS = CellLimits(
    scheduler=SchedulerConfig(max_num_seqs=4, max_batched_tokens=32),
    num_pages=14,
    page_size=16,
    max_model_len=160,
    micro_batches=2,
)
RANKS = Ranks(num_attention=1, num_experts=1)
Step = list[tuple[int, int, int, int, tuple[int, ...]]]


def jobs() -> list[SimulatedRequest]:
    """Returns prompts that share beginnings, in bursts, and too many for the pages."""
    made = []
    for index in range(14):
        shared = [7] * 16 * (index % 3)
        prompt = [*shared, *range(20, 30 + 5 * index)]
        made.append(
            SimulatedRequest(
                index=index,
                at_s=0.004 * (index // 3),
                num_output=10 + 9 * (index % 5),
                make_prompt=partial(list, prompt),
            )
        )
    return made


def shown(plan: StepPlan) -> Step:
    return [
        (s.sequence_id, s.start, len(s.token_ids), s.num_logits, s.page_table) for s in plan.slices
    ]


def simulated_steps(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Step], int]:
    """Runs the simulator -> the plan of every step, and the number of preemptions."""
    plans: list[StepPlan] = []
    run = InstantExecutor.run

    def recorded(self: InstantExecutor, plan: StepPlan, sequences: object) -> object:
        plans.append(plan)
        return run(self, plan, sequences)  # type: ignore[arg-type]

    monkeypatch.setattr(InstantExecutor, "run", recorded)
    layout, ranks = Layout.parse("colocated", 1), Ranks(num_attention=1, num_experts=1)
    cell = make_cell(layout, COSTS, ranks, LIMITS)
    World([cell], jumps=False).run(iter(jobs()))
    cell.engine.check_integrity()
    return [shown(plan) for plan in plans], cell.engine.stats().counts.num_preemptions


def real_steps() -> list[Step]:
    """Serves the same requests with a fake model, at the same times."""
    clock, runner, left = VirtualClock(), FakeRunner(), jobs()
    engine = Engine(
        LocalExecutor(runner, Sampler(frozenset())),
        scheduler=LIMITS.scheduler,
        num_pages=LIMITS.num_pages,
        micro_batches=1,
        max_model_len=LIMITS.max_model_len,
        eos_token_ids=frozenset(),
        clock=clock,
    )
    while left or engine.has_work:
        if not engine.has_work:
            clock.advance_to(left[0].at_s)
        while left and left[0].at_s <= clock.now:
            engine.add(request_of(left.pop(0)))
        engine.step()
        clock.advance_to(clock.now + COSTS.colocated_time(BatchLoad.of(runner.plans[-1].slices)))
    return [shown(plan) for plan in runner.plans]


def request_of(job: SimulatedRequest) -> GenerationRequest:
    params = SamplingParams(max_tokens=job.num_output, temperature=0.0, ignore_eos=True)
    return GenerationRequest(
        request_id=str(job.index),
        prompt_token_ids=tuple(job.make_prompt()),
        params=params,
        arrival_time=job.at_s,
    )


def test_steps_are_those_of_a_real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated, num_preemptions = simulated_steps(monkeypatch)
    assert num_preemptions > 0, "the workload must be hard"
    assert simulated == real_steps()


def test_a_bug_in_the_scheduler_shows_in_both_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, _ = simulated_steps(monkeypatch)
    monkeypatch.setattr(Starter, "has_seat", property(lambda self: len(self._running) < 2))
    wrong, _ = simulated_steps(monkeypatch)
    assert wrong != sound
    assert wrong == real_steps()


def test_steps_of_ranks_are_those_of_a_real_cluster_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[type, list[dict[str, tuple[tuple[object, ...], ...]]]] = {}
    for kind, name in ((FakeCoordinator, "launch"), (InstantCoordinator, "_sent")):
        original = getattr(kind, name)

        def recorded(self, works, *rest, of=kind, original=original, **options):  # type: ignore[no-untyped-def]
            batches = {rank: work.micro_batches for rank, work in works.items()}
            sent.setdefault(of, []).append(batches)
            return original(self, works, *rest, **options)

        monkeypatch.setattr(kind, name, recorded)
    layout = Layout.parse("2A1E", 3)
    limits = replace(LIMITS, num_pages=20)  # as the fake cluster's
    cell = make_cell(layout, COSTS, Ranks(num_attention=2, num_experts=1), limits)
    real = fake_cluster(FakeCoordinator(2))
    for engine in (real, cell.engine):
        for job in jobs():
            engine.add(request_of(job))
        while engine.has_work:
            engine.step()
    assert len(sent[FakeCoordinator]) > 20
    assert sent[InstantCoordinator] == sent[FakeCoordinator]


def test_scatter_stretches_steps_and_is_the_same_each_time() -> None:
    ends = []
    for scatter in ((), (2.0, 2.0), (1.0, 3.0), (1.0, 3.0)):
        limits = replace(LIMITS, scatter=scatter)
        cell = make_cell(Layout.parse("colocated", 1), COSTS, RANKS, limits)
        World([cell]).run(iter(jobs()), 3)
        ends.append(cell.clock.now)
    assert ends[1] == pytest.approx(2 * ends[0]) and ends[2] == ends[3]
    assert ends[0] < ends[2] < 3 * ends[0]


def names_of(*kinds: type) -> set[str]:
    return {name for kind in kinds for name in vars(kind) if not name.startswith("__")}


def room() -> Iterable[tuple[str, ast.Module]]:
    folder = Path(cell_module.__file__).parent
    for path in folder.rglob("*.py"):
        yield path.name, ast.parse(path.read_text("utf-8"))


def test_the_room_makes_no_decision_of_the_server() -> None:
    """It defines no method of the parts that decide, and uses engines, moves and autoscalers by
    their public methods."""
    deciding = names_of(
        Scheduler, WaitingQueue, BatchPolicy, PrefixCache, MicroBatchChooser, ClusterEngine, Engine,
        CellMoves, CellRouter, Migration, OpenMoves, StepRates, LinkRates, Autoscaler,
        PlannedPolicy, PlanTable, RateForecast, ServicePolicy, ServiceState, Admission,
    )  # fmt: skip
    implemented = names_of(
        StepCosts, StepExecutor, StepCoordinator, SimulatedCell, World, CellLimits, CellLike,
        PageCarrier, CoordinatedCell, CellsWorld, Watcher, AutoscalePolicy, SharedLinks,
        InstantCarrier,
    )  # fmt: skip
    used: dict[str, set[str]] = {"engine": set(), "_moves": set(), "_autoscaler": set()}
    for name, tree in room():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.name not in deciding - implemented, f"{name} defines {node.name}"
            if isinstance(node, ast.Attribute):
                owner = node.value
                if isinstance(owner, ast.Attribute) and owner.attr in used:
                    used[owner.attr].add(node.attr)
                is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                assert is_own or not is_private, f"{name} reaches into {node.attr}"
    counts = {"has_work", "num_running", "num_waiting", "rank_engines", "start_of"}
    deciders = {"admission", "service"}
    assert used["engine"] <= counts | deciders | {"add", "step", "begin", "wait", "end"}
    assert used["_moves"] == {"add", "before_step", "after_step", "turn", "due_s"}
    assert used["_autoscaler"] == {"wanted"}
