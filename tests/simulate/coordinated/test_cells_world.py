"""Simulated cells under one coordinator: hand-overs, independent steps, and changing numbers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from moe_serve.bench.simulated_cells import Scaling, ServedCells, serve_cells
from moe_serve.cluster.autoscale.autoscaler import Autoscaler, ScaleLimits
from moe_serve.cluster.autoscale.scale_view import ScaleView
from moe_serve.config.cells import CellRole, CellsConfig, HandOverName, parse_cells
from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.service_terms import Service
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.coordinated.coordinated_cell import costed_plans
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup, PageSpeed, build_cells
from moe_serve.simulate.coordinated.scaled_cells import ScaleTimes
from moe_serve.simulate.costs.device import read_device
from moe_serve.simulate.costs.model_shape import read_model_shape
from moe_serve.simulate.simulation import CellSettings, limits_of, make_cells, on_device
from moe_serve.simulate.steps_ahead import SimulatedRequest
from moe_serve.simulate.world import World

MODEL = read_model_shape(find_model("qwen3-30b"), "fp8")
DEVICE = read_device(find_device("h100"))
SCHEDULER = SchedulerConfig(max_num_seqs=32, max_batched_tokens=1024)


def setup(text: str, *, hand_over: HandOverName = "auto", giga: float = 25.0) -> CellsSetup:
    shapes = parse_cells(text, is_simulated=True)
    plans = costed_plans(
        shapes,
        lambda layout: on_device(MODEL, DEVICE, layout, None),
        lambda model, layout: limits_of(
            model, CellSettings(layout=layout, scheduler=SCHEDULER, max_model_len=8192)
        ),
    )
    config = CellsConfig(layout=text, hand_over=hand_over)
    speed = PageSpeed(device_bytes_per_s=giga * 1e9, latency_s=1e-5)
    return CellsSetup(name=text, plans=tuple(plans), config=config, speed=speed)


def jobs(num: int, *, prompt: int, output: int, gap_s: float) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(index=i, at_s=gap_s * i, num_output=output,
                         make_prompt=partial(list, range(i * 10_000, i * 10_000 + prompt)))
        for i in range(num)
    ]  # fmt: skip


def streams_beside_prompts() -> list[SimulatedRequest]:
    """Returns 8 long answers to short prompts, and 12 long prompts with short answers."""
    first = jobs(8, prompt=32, output=150, gap_s=0.001)
    later = jobs(20, prompt=4096, output=3, gap_s=0.05)[8:]
    return [*first, *later]


def longest_gap(done: ServedCells) -> float:
    """Returns the longest gap between two tokens of a long answer, after the first ones."""
    gaps = [
        later - earlier
        for each in done.times if each.num_output == 150
        for earlier, later in itertools.pairwise(list(each.token_times)[60:])
    ]  # fmt: skip
    return max(gaps)


def test_one_cell_serves_as_the_world_of_independent_cells_does() -> None:
    described = setup("1x(2A2E)")
    (plan,) = described.plans
    some = jobs(12, prompt=300, output=20, gap_s=0.01)
    settings = CellSettings(layout=plan.layout, scheduler=SCHEDULER, max_model_len=8192)
    alone = World(make_cells(plan.model, settings)).run(iter(some))
    done = serve_cells(described, iter(some))
    assert [list(x.token_times) for x in done.times] == [list(x.token_times) for x in alone]


def test_long_prompts_do_not_delay_the_streams_of_another_cell() -> None:
    """Two replicas read prompts between the tokens of their streams; with roles one cell reads."""
    replicas = serve_cells(setup("2x(1A1E)"), iter(streams_beside_prompts()))
    roles = serve_cells(setup("1x(1A1E prefill) 1x(1A1E decode)"), iter(streams_beside_prompts()))
    assert longest_gap(roles) < 0.5 * longest_gap(replicas)
    for done in (replicas, roles):
        assert len(done.times) == 20 and not any(each.error for each in done.times)
        assert all(len(each.token_times) == each.num_output for each in done.times)
    assert replicas.figures.num_hand_overs == 0
    figures = roles.figures
    assert figures.num_hand_overs > 0 and figures.num_bytes > 0
    assert figures.exposed_ms is not None and figures.exposed_ms.p50 >= 0


def test_a_cell_goes_on_generating_while_pages_travel() -> None:
    """On a slow link more tokens come from the cell that read the prompt, and none is lost."""
    some = jobs(10, prompt=2000, output=30, gap_s=0.2)
    layout = "1x(1A1E prefill) 1x(1A1E decode)"
    fast, slow = (
        serve_cells(setup(layout, hand_over="always", giga=giga), iter(some)).figures
        for giga in (50.0, 5.0)
    )
    assert fast.num_hand_overs == slow.num_hand_overs == 10
    assert slow.cells[0].num_steps > fast.cells[0].num_steps
    assert sum(cell.num_tokens for cell in slow.cells) == 10 * 2030
    again = serve_cells(setup(layout, hand_over="always", giga=50.0), iter(some)).figures
    assert again == fast, "the same run gives the same figures"


def test_cells_have_one_account_of_tiers_and_tenants() -> None:
    """The policy of tiers is that of all cells, and forecasts count only on cells that take
    requests."""
    tier = TierConfig(name="fast", ttft_s=5.0)
    scheduler = replace(SCHEDULER, tiers=(tier,))
    built = build_cells(setup("2x(1A1E)").with_scheduler(scheduler))
    some = [
        replace(job, service=Service.of_tier(tier, f"t{job.index % 2}"))
        for job in jobs(12, prompt=300, output=8, gap_s=0.01)
    ]
    built.world.run(iter(some))
    services = [cell.engine.service for cell in built.cells]
    first, second = (each.policy for each in services if each is not None)
    assert first is second
    stats = first.stats()
    assert (stats.num_tenants, stats.tiers[0].num_finished) == (2, 12)
    assert first.admission.num_snapshots == 2
    built.cells[0].is_draining = True
    assert first.admission.num_snapshots == 1
    built.cells[0].is_draining = False
    assert first.admission.num_snapshots == 2


class ByTime:
    """Implements AutoscalePolicy: other numbers of cells after a time."""

    name = "by time"

    def __init__(self, before: int, after: int, at_s: float) -> None:
        self._counts, self._at_s = (before, after), at_s

    def decide(self, view: ScaleView) -> Mapping[CellRole, int]:
        return dict.fromkeys(view.roles, self._counts[view.at_s >= self._at_s])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_cells_start_late_and_drain_by_migration(before: int, after: int) -> None:
    """Cells cost from their start, which takes a second, until their requests have moved away."""
    limits = ScaleLimits(min_cells=1, max_cells={"both": 3}, calm_s=0.0)
    scaler = Autoscaler(ByTime(before, after, 1.0), limits)
    scaling = Scaling(autoscaler=scaler, times=ScaleTimes(every_s=0.5, start_s=1.0))
    some = jobs(40, prompt=100, output=60, gap_s=0.1)
    done = serve_cells(setup("3x(1A1E)"), iter(some), scaling=scaling)
    assert len(done.times) == 40 and not any(each.error for each in done.times)
    scale, end_s = done.figures.scale, max(each.end_s for each in done.times)
    assert scale is not None and scale.num_changes == 1
    expected_s = 2 * (before * 1.0 + after * (end_s - 1.0))
    assert 3600 * scale.device_hours == pytest.approx(expected_s, rel=0.1)
    used = [cell.num_started for cell in done.figures.cells]
    if after < before:
        assert done.figures.num_migrations > 0, "draining cells hand their requests on"
        late = {each.cell for each in done.times if each.due_s > 1.1}
        assert len(late) == 1
    else:
        early = {each.cell for each in done.times if each.due_s < 1.9}
        assert early == {0} and min(used) > 0
