"""Makes a placement problem from recorded loads, devices, and facts about the model.

request = ProblemRequest(files=(trace,), devices=ClusterDevices.even(8), num_replicas=8)
sources = request.read()
solution = make_solver("search").solve(sources.problem)
print(make_report(sources, solution).plan.mean)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from experts.placement.formats.engine_plan import EnginePlan, PlanFacts, only_layers
from experts.placement.formats.plan_text import parse_text
from experts.placement.placement_error import PlacementError, PlacementInputError
from experts.placement.problem.devices import ClusterDevices
from experts.placement.problem.model_facts import ModelFacts
from experts.placement.problem.plan_limits import Grouping, Move, Pin
from experts.placement.problem.problem import Balance, PlacementProblem
from experts.placement.problem.workloads import Workloads, read_workloads
from experts.placement.solvers.choice import engine_default

ReadPlan = Callable[[Path, PlanFacts], EnginePlan]


def read_text_plan(path: Path, facts: PlanFacts) -> EnginePlan:
    """Reads a plan in JSON or CSV. Raises OSError, PlacementError."""
    return parse_text(path.read_text("utf-8"), facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemWithSources:
    """A problem with the workloads and the model facts it was made from."""

    problem: PlacementProblem
    workloads: Workloads
    model: ModelFacts

    @property
    def plan_facts(self) -> PlanFacts:
        """The facts for reading and writing plans of engines."""
        problem = self.problem
        return PlanFacts.of_model(self.model, len(problem.devices), problem.loads.num_experts)

    @property
    def num_groups(self) -> int:
        """Number of expert groups, as requested or as the model's router has them; 1 means no
        groups."""
        grouping = self.problem.grouping
        return self.model.num_groups if grouping is None else grouping.num_groups

    @property
    def engine_default(self) -> str:
        """The method that SGLang and vLLM use by default for these devices and groups."""
        return engine_default(self.problem.devices, self.num_groups)

    def read_plan(self, path: Path, read: ReadPlan = read_text_plan) -> EnginePlan:
        """Reads a plan and keeps the layers of the loads. Raises PlacementError."""
        return only_layers(read(path, self.plan_facts), self.problem.loads.layers, str(path))

    def rivals(self) -> list[tuple[str, PlacementProblem]]:
        """Returns names and problems of the plans to compare. Groups bind the hierarchical
        reference and one plan of the search that keeps them too."""
        free = replace(self.problem, grouping=None)
        found = [("plan", free)]
        if self.num_groups > 1 and free.devices.num_nodes > 1:
            grouping = self.problem.grouping or Grouping(num_groups=self.num_groups)
            with suppress(PlacementError):  # if no plan can keep the groups
                found.append(("plan, groups on nodes", replace(free, grouping=grouping)))
            found.append(("eplb-hierarchical", free))
        return [*found, *((name, free) for name in ("eplb", "round-robin", "linear"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemRequest:
    """The files and numbers that make a problem. `files` are traces or tables of loads, each of
    which becomes `num_windows` scenarios."""

    files: tuple[Path, ...]
    devices: ClusterDevices
    model: ModelFacts = ModelFacts()
    num_windows: int = 1
    num_experts: int | None = None  # for files that do not say how many there are
    top_k: int | None = None
    num_replicas: int | None = None  # of a layer; None: none, or as the devices' slots say
    balance: Balance = "tokens"
    batch_size: int = 64
    current: Path | None = None  # the plan in use
    max_moves: int | None = None  # copies of a layer that may move away from `current`
    pins: tuple[Pin, ...] = ()
    grouping: Grouping | None = None
    fill: bool = True
    read_plan: ReadPlan = read_text_plan  # reads `current`

    def read(self) -> ProblemWithSources:
        """Reads every file and returns the problem. Raises TraceError, PlacementError."""
        read = read_workloads(
            self.files, self.num_windows, self.num_experts or self.model.num_experts
        )
        if self.num_experts not in (None, read.loads.num_experts):
            raise PlacementInputError(
                f"--num-experts is {self.num_experts}, but {self.files[0]} states "
                f"{read.loads.num_experts} experts: leave the flag out, which is for files "
                "that do not state the number."
            )
        workloads, model = self.model.with_loads(read)
        loads = workloads.loads
        slots = self.devices.slots(loads.num_experts, self.num_replicas)
        devices = self.devices.with_slots(slots)
        move = None
        if self.current is not None:
            known = PlanFacts.of_model(model, len(devices), loads.num_experts)
            plan = self.read_plan(self.current, known)
            plan = only_layers(plan, loads.layers, str(self.current))
            move = Move(current=plan.placement, max_copies_per_layer=self.max_moves)
        problem = PlacementProblem(
            loads=loads,
            devices=devices,
            bytes_per_expert=model.bytes_per_expert,
            balance=self.balance,
            batch_size=self.batch_size,
            top_k=self.top_k or workloads.top_k or model.top_k,
            pins=self.pins,
            grouping=self.grouping,
            move=move,
            fill=self.fill,
        )
        return ProblemWithSources(problem=problem, workloads=workloads, model=model)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPlanRequest:
    """A plan to judge on loads. `devices` None: as many as the plan says, on `num_nodes` nodes."""

    files: tuple[Path, ...]
    plan: Path
    devices: ClusterDevices | None = None
    num_nodes: int = 1
    model: ModelFacts = ModelFacts()
    num_windows: int = 1
    num_experts: int | None = None
    top_k: int | None = None
    batch_size: int = 64
    read_plan: ReadPlan = read_text_plan

    def read(self) -> tuple[ProblemWithSources, EnginePlan]:
        """Reads loads and plan; the devices of the problem have the slots that the plan uses.
        Raises TraceError, PlacementError."""
        workloads, model = self.model.with_loads(
            read_workloads(self.files, self.num_windows, self.num_experts or self.model.num_experts)
        )
        loads = workloads.loads
        num_devices = None if self.devices is None else len(self.devices.entries)
        known = PlanFacts.of_model(model, num_devices, loads.num_experts)
        plan = only_layers(self.read_plan(self.plan, known), loads.layers, str(self.plan))
        placement = plan.placement
        placement.check_fits(loads.layers, loads.num_experts, num_devices or placement.num_ranks)
        devices = self.devices or ClusterDevices.even(placement.num_ranks, self.num_nodes)
        problem = PlacementProblem(
            loads=loads,
            devices=devices.with_slots(_used(plan)),
            bytes_per_expert=model.bytes_per_expert,
            batch_size=self.batch_size,
            top_k=self.top_k or workloads.top_k or model.top_k,
            fill=False,
        )
        return ProblemWithSources(problem=problem, workloads=workloads, model=model), plan


def _used(plan: EnginePlan) -> Sequence[int]:
    return [max(1, int(used)) for used in plan.copies_LED.sum(axis=1).max(axis=0)]
