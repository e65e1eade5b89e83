"""Runs a workload on simulated cells under one coordinator, and gathers the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_serve.bench.figures.cells_figures import CellFigures, CellsFigures, ScaleFigures
from moe_serve.bench.figures.summary import Spread
from moe_serve.cluster.autoscale.autoscaler import Autoscaler
from moe_serve.engine.request.stats import EngineStats
from moe_serve.simulate.coordinated.cells_world import CellChange
from moe_serve.simulate.coordinated.coordinated_run import BuiltCells, CellsSetup, build_cells
from moe_serve.simulate.coordinated.scaled_cells import ScaleTimes
from moe_serve.simulate.simulated_timeline import SimulatedTimeline
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The policy that chooses the number of cells, and the time that a start takes."""

    autoscaler: Autoscaler
    times: ScaleTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCells:
    """The requests of a run, and the cells' statistics."""

    times: list[RequestTimes]
    peak_in_flight: int
    stats: list[EngineStats]
    figures: CellsFigures


def serve_cells(
    setup: CellsSetup,
    jobs: Iterator[SimulatedRequest],
    concurrency: int | None = None,
    *,
    scaling: Scaling | None = None,
    timeline: SimulatedTimeline | None = None,
) -> ServedCells:
    """Serves all jobs. See `World.run`."""
    built = build_cells(
        setup,
        autoscaler=None if scaling is None else scaling.autoscaler,
        times=None if scaling is None else scaling.times,
        timeline=timeline,
    )
    times = built.world.run(jobs, concurrency)
    for cell in built.cells:
        cell.engine.check_integrity()
    stats = [cell.engine.stats() for cell in built.cells]
    return ServedCells(
        times=times,
        peak_in_flight=built.world.peak_in_flight,
        stats=stats,
        figures=_figures(built, times, stats, scaling),
    )


def _figures(
    built: BuiltCells,
    times: Sequence[RequestTimes],
    stats: Sequence[EngineStats],
    scaling: Scaling | None,
) -> CellsFigures:
    started, moves = Counter(each.cell for each in times), built.world.moved
    ended = built.moves.stats().ended
    done = {kind: num for (kind, result), num in ended.items() if result == "done"}
    num_asked = sum(num for (_, result), num in ended.items() if result != "ended")
    return CellsFigures(
        cells=tuple(
            CellFigures(
                shape=str(cell.shape),
                num_devices=cell.num_devices,
                num_steps=each.num_steps,
                num_started=started[cell.index],
                num_tokens=each.counts.num_prompt_tokens + each.counts.num_generated_tokens,
            )
            for cell, each in zip(built.cells, stats, strict=True)
        ),
        num_hand_overs=done.get("hand_over", 0),
        num_migrations=sum(num for kind, num in done.items() if kind != "hand_over"),
        num_given_up=num_asked - sum(done.values()),
        num_parcels=built.carrier.num_parcels,
        num_bytes=built.carrier.num_bytes,
        exposed_ms=Spread.of([each.exposed_s for each in moves]),
        exposed_share=_exposed_share(moves, times),
        scale=None if scaling is None else _scale(built, scaling),
    )


def _exposed_share(moves: Sequence[CellChange], times: Sequence[RequestTimes]) -> float | None:
    if not moves:
        return None
    first_s = {str(x.index): x.token_times[0] - x.due_s for x in times if x.token_times}
    waited_s = sum(first_s[each.request_id] for each in moves)
    return sum(each.exposed_s for each in moves) / waited_s if waited_s else None


def _scale(built: BuiltCells, scaling: Scaling) -> ScaleFigures:
    assert built.scaled is not None, "cells are scaled"
    now = built.clock.now
    return ScaleFigures(
        policy=scaling.autoscaler.policy.name,
        device_hours=built.scaled.device_hours(now),
        all_device_hours=sum(cell.num_devices for cell in built.cells) * now / 3600,
        num_changes=len(built.scaled.changes),
        most_changes_per_hour=built.scaled.most_changes(),
    )
