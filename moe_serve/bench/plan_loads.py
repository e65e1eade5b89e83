"""Finds by simulation how full cells may be, for the plan table of autoscaling.

    time of a request in a cell = L_in step(C) / (A C)  +  L_out step(b) / (A b)

That is its share of full steps: step(C) reads chunks of C tokens on A attention ranks, and step(b)
decodes b sequences on each. How much of this time cells can be given within the limits of latency
is found by bisection: the largest rate at which enough requests meet them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.summary import Goodput, Slo
from moe_serve.bench.simulated_cells import serve_cells
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.bench.workload.prompt_maker import Slot
from moe_serve.bench.workload.workload import GammaArrivals
from moe_serve.cluster.autoscale.plan_table import CellRates, PlanTable
from moe_serve.cluster.autoscale.policies import TokenMeans
from moe_serve.config.cells import CellRole
from moe_serve.pipeline.costs.step_costs import BatchLoad, step_time
from moe_serve.simulate.coordinated.coordinated_cell import CellPlan
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup

_COUNTS = (1, 2, 4)  # cells that are simulated; more are filled like four
_REQUESTS = 120  # for each cell
_HALVINGS = 5
_POOL_LOAD = 0.7  # of cells with a role: not simulated, as the roles depend on each other
_SEATS_CELLS = 2  # number of simulated cells
_LEAST_LOAD = 0.01

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The limits of latency that cells must keep, and the share of requests that must meet them."""

    slo: Slo
    attainment: float


def rates_of(plan: CellPlan, means: TokenMeans) -> CellRates:
    """Returns the tokens per second of a cell in full steps."""
    scheduler, layout = plan.limits.scheduler, plan.layout
    context = means.prompt + means.output / 2
    num_tokens = plan.limits.num_pages * plan.limits.page_size
    fitting = max(1, min(scheduler.max_num_seqs, int(num_tokens // context)))
    num_prompts = max(1, round(scheduler.max_batched_tokens / max(1.0, means.prompt)))
    chunk = scheduler.max_batched_tokens // num_prompts
    reading = BatchLoad.of_parts([0] * num_prompts, [chunk] * num_prompts)
    role, ranks = plan.shape.role, layout.num_attention
    prompt_tok_s = ranks * chunk * num_prompts / _step_s(plan, reading)
    output_tok_s = ranks * fitting / _step_s(plan, BatchLoad.decode(fitting, round(context)))
    return CellRates(
        prompt_tok_s=None if role == "decode" else prompt_tok_s,
        output_tok_s=None if role == "prefill" else output_tok_s,
    )


def _step_s(plan: CellPlan, load: BatchLoad) -> float:
    model = plan.model
    if not plan.layout.is_split and plan.layout.num_attention == 1:
        return model.costs.colocated_time(load)
    return step_time(model.costs, [load] * plan.layout.num_attention, 1, model.ranks)


def plan_table(
    setup: CellsSetup, slots: Sequence[Slot], wanted: Wanted, progress: Progress
) -> PlanTable:
    """Returns the table for cells like those of a setup and requests like these."""
    means = means_of(slots)
    rates: dict[CellRole, CellRates] = {}
    loads: dict[CellRole, tuple[float, ...]] = {}
    for plan in setup.plans:
        role = plan.shape.role
        if role in rates:
            continue
        rates[role], loads[role] = rates_of(plan, means), (_POOL_LOAD,)
        if role == "both":
            per_request = rates[role].seconds(means.prompt, means.output)
            loads[role] = _loads(setup, plan, slots, wanted, per_request, progress)
    return PlanTable(rates=rates, most_load=loads)


def means_of(slots: Sequence[Slot]) -> TokenMeans:
    """Returns the mean tokens of requests."""
    num = len(slots)
    return TokenMeans(
        sum(slot.prompt_tokens for slot in slots) / num,
        sum(slot.output_tokens for slot in slots) / num,
    )


def _loads(
    setup: CellsSetup,
    plan: CellPlan,
    slots: Sequence[Slot],
    wanted: Wanted,
    per_request_s: float,
    progress: Progress,
) -> tuple[float, ...]:
    """Returns the largest load of 1, 2, 3 and 4 cells; that of 3 lies between its neighbours."""
    found: dict[int, float] = {}
    for count in _COUNTS:
        some = replace(setup, plans=(plan,) * count)
        found[count] = load = _most_load(some, slots, wanted, per_request_s)
        progress(
            f"{count} cells keep {wanted.slo} up to {load * count / per_request_s:.3f} requests/s"
        )
    one, two, four = (max(found[count], 1e-3) for count in _COUNTS)
    return one, max(one, two), max(one, (two + four) / 2), max(one, four)


def most_seats(
    setup: CellsSetup, slots: Sequence[Slot], wanted: Wanted, progress: Progress
) -> float | None:
    """Returns the largest mean share of taken seats at which two cells keep the limits; None for
    cells with roles, which depend on each other."""
    plan, means = setup.plans[0], means_of(slots)
    if plan.shape.role != "both":
        return None
    some = replace(setup, plans=(plan,) * min(_SEATS_CELLS, len(setup.plans)))
    per_request_s = rates_of(plan, means).seconds(means.prompt, means.output)
    load = max(_most_load(some, slots, wanted, per_request_s), _LEAST_LOAD)
    records = _records(some, slots, load * len(some.plans) / per_request_s)
    num_seats = plan.limits.scheduler.max_num_seqs * plan.layout.num_attention * len(some.plans)
    busy_s = sum(record.end_s - record.scheduled_s for record in records)
    share = busy_s / max(record.end_s for record in records) / num_seats
    progress(f"{len(some.plans)} cells keep {wanted.slo} with up to {share:.2f} of their seats")
    return min(1.0, share)


def _most_load(
    setup: CellsSetup, slots: Sequence[Slot], wanted: Wanted, per_request_s: float
) -> float:
    """Returns the largest load, as a share of the cells' time, at which they keep the limits."""
    low, high = 0.0, 1.2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        records = _records(setup, slots, middle * len(setup.plans) / per_request_s)
        is_kept = Goodput.of(wanted.slo, records, 1.0).share >= wanted.attainment
        low, high = (middle, high) if is_kept else (low, middle)
    return low


def _records(setup: CellsSetup, slots: Sequence[Slot], rate: float) -> list[RequestRecord]:
    """Serves requests at a rate. The requests of a few slots are repeated, because a queue builds
    up slowly."""
    times = GammaArrivals(rate=rate).times(np.random.default_rng(len(setup.plans)))
    some = [
        replace(slot, index=index, at_s=next(times))
        for index, slot in zip(range(_REQUESTS * len(setup.plans)), cycle(slots))
    ]
    served = serve_cells(setup, jobs_of(some, 0))
    return [record_of(each) for each in served.times]
