"""The HTTP side of a simulated server: what it adds to requests, tokens and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.bench.workload.workload import Lengths, Workload
from moe_serve.config.cells import CellsConfig, parse_cells
from moe_serve.config.sections import SchedulerConfig
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks
from moe_serve.simulate.coordinated.coordinated_cell import CellPlan, layout_of
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup, PageSpeed, build_cells
from moe_serve.simulate.front_end import FrontEnd
from moe_serve.simulate.layout import Layout, ModelSize
from moe_serve.simulate.simulated_cell import CellLimits, make_cell
from moe_serve.simulate.simulation import CostedModel
from moe_serve.simulate.world import World
from tests.support.cluster.calibrations import HTTP, cpu_calibration

COSTS = cpu_calibration().costs
LIMITS = CellLimits(
    scheduler=SchedulerConfig(), num_pages=256, page_size=16, max_model_len=512
)  # fmt: skip


def served(
    num: int, concurrency: int, *, has_http: bool, loss: bool = False
) -> list[RequestRecord]:
    """Serves requests of 32 + 4 tokens in a closed loop of one device."""
    workload = Workload(
        seed=1, concurrency=concurrency, prompt_tokens=Lengths(low=32, high=32),
        output_tokens=Lengths(low=4, high=4), num_requests=num,
    )  # fmt: skip
    costs = COSTS.with_step_loss(HTTP.step) if loss else COSTS
    layout, ranks = Layout.parse("colocated", 1), Ranks(num_attention=1, num_experts=1)
    cell = make_cell(layout, costs, ranks, LIMITS)
    if has_http:
        cell = replace(cell, front=FrontEnd(HTTP))
    times = World([cell]).run(jobs_of(list(workload.slots()), 0), concurrency)
    return sorted(map(record_of, times), key=lambda record: record.index)


def test_requests_begin_one_after_another() -> None:
    front = FrontEnd(HTTP)
    assert front.pass_request(1.0, 100) == pytest.approx(1.003)
    assert front.pass_request(1.0, 100) == pytest.approx(1.0035), "the loop was busy with the first"
    assert front.pass_request(2.0, 0) == pytest.approx(2.002)


def test_chunks_of_a_step_leave_one_after_another() -> None:
    front = FrontEnd(HTTP)
    assert front.pass_tokens([1.0, 2.0], 3, 0.0) == pytest.approx([1.0003, 2.0003])
    assert front.pass_tokens([1.0], 0, 1.5) == [1.5], "never before the chunk that came before"


def test_a_request_alone_comes_later_by_its_way_and_its_beginning() -> None:
    (engine,), (server,) = (served(1, 1, has_http=each) for each in (False, True))
    assert engine.ttft_s is not None and server.ttft_s is not None
    delay_s = HTTP.request.seconds(32) + HTTP.begin_s
    assert server.ttft_s - engine.ttft_s == pytest.approx(delay_s)
    assert server.tpot_s == pytest.approx(engine.tpot_s)


def test_the_next_request_of_a_client_waits_for_the_last_chunk() -> None:
    records = served(2, 1, has_http=True)
    assert records[1].started_s == records[0].end_s == records[0].last_s


def test_steps_lose_time_by_their_sequences() -> None:
    load = BatchLoad.decode(5, 64)
    lost = COSTS.with_step_loss(HTTP.step)
    assert lost.colocated_time(load) - COSTS.colocated_time(load) == pytest.approx(3.5e-4)
    short, long = (served(4, 4, has_http=True, loss=each)[3].tpot_s for each in (False, True))
    assert short is not None and long is not None
    assert long - short == pytest.approx(HTTP.step.seconds(4), rel=0.2)


def test_cells_under_one_coordinator_have_one_front_end() -> None:
    (shape,) = parse_cells("1x(1A1E)")
    model = CostedModel(
        size=ModelSize(
            name="made-up", attention_bytes=1, expert_bytes=1, kv_token_bytes=1, num_kv_parts=1,
            num_experts=32, max_context=512,
        ),
        costs=COSTS, ranks=Ranks(num_attention=1, num_experts=1), device_name="made up",
        device_bytes=None, http=None,
    )  # fmt: skip
    assert layout_of(shape).is_split
    workload = Workload(
        seed=1, concurrency=1, prompt_tokens=Lengths(low=32, high=32),
        output_tokens=Lengths(low=4, high=4), num_requests=2,
    )  # fmt: skip
    firsts = []
    for http in (None, HTTP):
        setup = CellsSetup(
            name="1x(1A1E)",
            plans=(CellPlan(shape=shape, model=replace(model, http=http), limits=LIMITS),),
            config=CellsConfig(layout="1x(1A1E)"),
            speed=PageSpeed(device_bytes_per_s=1e9, latency_s=1e-5),
        )
        times = build_cells(setup).world.run(jobs_of(list(workload.slots()), 0), 1)
        record = min(map(record_of, times), key=lambda each: each.index)
        assert len(times) == 2 and record.ttft_s is not None
        firsts.append(record.ttft_s)
    assert firsts[1] - firsts[0] == pytest.approx(HTTP.request.seconds(32))
