"""Steps that are run at once have the schedules and times of the same steps one by one."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.bench.simulated_requests import service_of
from moe_serve.config.sections import OrderName, SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.step_costs import Ranks
from moe_serve.simulate.front_end import FrontEnd
from moe_serve.simulate.instant_executor import InstantExecutor
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulated_cell import CellLimits, make_cell
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest, num_alike
from moe_serve.simulate.world import World
from tests.support.cluster.calibrations import HTTP, cpu_calibration

COSTS = cpu_calibration().costs
LONGEST = 120
TIERS = (TierConfig(name="fast", weight=4.0, ttft_s=0.01), TierConfig(name="slow", ttft_s=0.2))


@dataclass(frozen=True)
class Load:
    """A random workload and the engines that serve it."""

    requests: tuple[tuple[int, int, int], ...]  # prompt, output, milliseconds since the last one
    page_size: int
    num_pages: int  # for one longest request, and so many more
    num_seqs: int
    num_cells: int
    concurrency: int | None
    scatter: tuple[float, ...]
    order: OrderName = "auto"
    has_http: bool = False

    def jobs(self) -> list[SimulatedRequest]:
        at_s, made = 0.0, []
        for index, (prompt, output, gap_ms) in enumerate(self.requests):
            at_s += gap_ms / 1e3
            ids = [index % 3 + 7] * (prompt // 2) + list(range(100, 100 + prompt - prompt // 2))
            made.append(
                SimulatedRequest(
                    index=index,
                    at_s=at_s,
                    num_output=output,
                    make_prompt=partial(list, ids),
                    service=service_of(TIERS[index % 2], str(index % 3), is_strict=False),
                    priority=index % 2,
                )
            )
        return made


LOADS = st.builds(
    Load,
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 50), st.integers(0, 40)),
        min_size=1, max_size=12,
    ).map(tuple),
    page_size=st.sampled_from([4, 16, 64, 128]),
    num_pages=st.integers(0, 12),
    num_seqs=st.integers(1, 5),
    num_cells=st.integers(1, 3),
    concurrency=st.sampled_from([None, 1, 3, 8]),
    scatter=st.sampled_from([(), (0.5, 1.0, 2.5)]),
    order=st.sampled_from(["auto", "priority", "fifo", "edf", "atc"]),
    has_http=st.booleans(),
)  # fmt: skip
Step = tuple[float, tuple[tuple[int, int, int, int], ...]]  # its end, (id, start, count, pages)


def served(load: Load, *, jumps: bool) -> tuple[list[RequestTimes], list[list[Step]], World]:
    """Serves the load -> requests in the order of their ends, and the steps of each cell."""
    limits = CellLimits(
        scheduler=SchedulerConfig(
            max_num_seqs=load.num_seqs,
            max_batched_tokens=48,
            order=load.order,
            tiers=() if load.order in ("auto", "priority") else TIERS,
        ),
        num_pages=-(-LONGEST // load.page_size) + load.num_pages,
        page_size=load.page_size,
        max_model_len=LONGEST,
        scatter=load.scatter,
    )
    layout, ranks = Layout.parse("colocated", 1), Ranks(num_attention=1, num_experts=1)
    cells = [
        replace(
            make_cell(layout, COSTS, ranks, limits), front=FrontEnd(HTTP) if load.has_http else None
        )
        for _ in range(load.num_cells)
    ]
    steps: dict[int, list[Step]] = {id(cell.executor): [] for cell in cells}
    run = InstantExecutor.run

    def recorded(
        self: InstantExecutor, plan: StepPlan, sequences: Mapping[int, Sequence]
    ) -> StepOutcome:
        ends = tuple(self._ends)
        outcome = run(self, plan, sequences)
        for number, end_s in enumerate(ends or (self._clock.now,)):
            slices = tuple(
                (s.sequence_id, s.start + number, len(s.token_ids), len(s.page_table))
                for s in plan.slices
            )
            steps[id(self)].append((end_s, slices))
        return outcome

    world = World(cells, jumps=jumps)
    with patch.object(InstantExecutor, "run", recorded):
        done = world.run(iter(load.jobs()), load.concurrency)
    for cell in cells:
        cell.engine.check_integrity()
    return done, list(steps.values()), world


@settings(max_examples=40, deadline=None)
@given(load=LOADS)
def test_schedules_and_times_are_equal(load: Load) -> None:
    plain, plain_steps, one_by_one = served(load, jumps=False)
    fast, fast_steps, world = served(load, jumps=True)
    assert fast_steps == plain_steps
    assert fast == plain
    assert world.peak_in_flight == one_by_one.peak_in_flight and one_by_one.num_repeated == 0


def test_most_steps_of_long_answers_are_run_at_once() -> None:
    load = Load(
        requests=((20, 60, 0), (30, 60, 0)), page_size=128, num_pages=8, num_seqs=4,
        num_cells=1, concurrency=None, scatter=(),
    )  # fmt: skip
    _, steps, world = served(load, jumps=True)
    assert world.num_repeated > 0.8 * len(steps[0])


def test_alike_until_a_page_or_an_end() -> None:
    """Requests of 10 + 3 and 20 + 5 tokens, pages of 16: the next tokens are at places 12 and 24
    (8 of its page), so 4 and 8 steps fit these pages."""

    def job(num_prompt: int, num_got: int, num_output: int) -> RequestTimes:
        times = array("d", [0.0] * num_got)
        return RequestTimes(
            index=0, cell=0, due_s=0.0, num_prompt=num_prompt, num_output=num_output,
            token_times=times,
        )  # fmt: skip

    assert num_alike([job(10, 3, 99), job(20, 5, 99)], 16) == 4
    assert num_alike([job(10, 3, 6), job(20, 5, 99)], 16) == 3, "the first one ends"
    assert num_alike([job(10, 3, 4)], 16) == 0, "a single step is no run of steps"
    assert num_alike([job(16, 1, 99)], 16) == 0, "the next place begins a page"
    assert num_alike([], 16) == 0
