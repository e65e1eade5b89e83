"""Builds a server of several cells, each with its own ranks, and chooses the builder for the engine
of a configuration.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from moe_serve.cache.events.kv_events import check_kv_events
from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.autoscale.live_scaler import LiveScaler
from moe_serve.cluster.autoscale.scaler_maker import make_scaler, scale_policy
from moe_serve.cluster.cell_start import (
    CellShared,
    StarterOfCell,
    StartingCell,
    check_alike,
    local_starter,
)
from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.cell_roll import CellRoll
from moe_serve.cluster.cells.cells_engine import CellsEngine, Parcels
from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.cluster.later_cells import LaterCells, LaunchNodes
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.parcels.rank_carrier import RankCarrier
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.cluster.steps.rank_witness import CellsWitness
from moe_serve.config.cell_config import cell_shapes, config_of_cell
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.build_adapters import check_adapters
from moe_serve.engine.build_tiers import check_tiers
from moe_serve.engine.drafting.drafting_maker import check_on_ranks
from moe_serve.engine.engine_facts import EngineFacts, memory_line
from moe_serve.engine.execute.next_layer_prediction import check_next_layer
from moe_serve.engine.execute.step_timeline import StepTimeline
from moe_serve.engine.opened_model import LoadReport
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES


def build_cells(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    starter_of: StarterOfCell = local_starter,
    nodes: LaunchNodes | None = None,
) -> BuiltEngine:
    """Starts all cells together, waits until they have loaded, and makes the engine over them.
    `nodes` are those of a launch.

    Raises ConfigError, CheckpointError or ClusterError with the reason why a rank cannot serve.
    """
    clock, shapes, policy = time.monotonic(), cell_shapes(config), scale_policy(config.cells)
    configs = [config_of_cell(config, index, shape) for index, shape in enumerate(shapes)]
    check_kv_events(config)
    for each in configs:
        check_tiers(each)
        check_on_ranks(each)
        check_adapters(each)
    models = ClusterModel.read_cells(configs)
    check_next_layer(config, models[0].folder, models[0].spec)
    with contextlib.ExitStack() as opened:  # closed again if a cell cannot start
        shared = CellShared(config, models[0])
        opened.callback(shared.close)
        starts: list[StartingCell] = []
        for index, (model, shape) in enumerate(zip(models, shapes, strict=True)):
            start = StartingCell(shared, model, index, shape, starter_of)
            opened.callback(start.close)
            starts.append(start)
        _load(starts, progress)
        check_alike(starts)
        cells = [start.serve() for start in starts]
        roll = CellRoll(cells, LaterCells(shared, models[0], starter_of, nodes))
        load_s = time.monotonic() - clock
        scaler = make_scaler(config, policy, load_s, REAL_CLOCK)
        engine = _engine(config, roll, _carrier(config, shared, starts[0]), shared, scaler)
        opened.pop_all()
        opened.callback(engine.close)
        adapters = shared.joined.open_adapters()
        opened.pop_all()
    return BuiltEngine(
        engine,
        _facts(config, models, starts, load_s),
        models[0].spec,
        shared.routes,
        last_step=lambda: _last_step(engine.cells, shared),
        grammars=models[0].checkpoint.grammars(),
        activity=CellsWitness(shared.witnesses),
        adapters=adapters,
        cell_placements=shared.joined.placements,
        cells=engine,
        scale_with=None if scaler is None else scaler.start,
        nudge=engine.nudge,
        kv_events=shared.kv_events,
    )


def _engine(
    config: EngineConfig,
    roll: CellRoll,
    carrier: RankCarrier,
    shared: CellShared,
    scaler: LiveScaler | None,
) -> CellsEngine:
    moves = CellMoves(
        roll.now.cells,
        carrier,
        config.cells,
        REAL_CLOCK,
        timeout_s=config.cluster.timeout_s,
        chunk_tokens=config.scheduler.max_batched_tokens,
        policy=shared.joined.policy,
    )
    return CellsEngine(
        roll,
        moves,
        Parcels(carrier, shared.post, shared.close),
        shared.ids,
        shared.news,
        outage_limit_s=config.cluster.start_timeout_s,
        scaler=scaler,
    )


def _load(starts: Sequence[StartingCell], progress: LoadProgress | None) -> None:
    """Starts all cells at the same time. If one cannot start, the others end."""
    counts, lock = [(0, 0)] * len(starts), threading.Lock()
    failures: list[BaseException] = []  # the first is the cause of the others

    def note(index: int, done: int, total: int) -> None:
        with lock:
            counts[index] = done, total
            if progress is not None:
                progress(sum(done for done, _ in counts), sum(total for _, total in counts))

    def end() -> None:
        for start in starts:
            start.close()

    def run(start: StartingCell) -> None:
        try:
            start.load(lambda done, total: note(start.index, done, total))
        except BaseException as error:
            failures.append(error)
            end()
            raise

    with ThreadPoolExecutor(len(starts), "cell-start") as pool:
        futures = [pool.submit(run, start) for start in starts]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C, or SIGTERM
            end()
            raise
    if failures:
        raise failures[0]


def _carrier(config: EngineConfig, shared: CellShared, any_cell: StartingCell) -> RankCarrier:
    facts = any_cell.ranks.first_loaded.parcels
    assert facts is not None, "attention ranks of cells were told of parcels"
    timeout_s = config.cluster.timeout_s
    return RankCarrier(config.cells, shared.rosters, facts.page_bytes, timeout_s)


def _facts(
    config: EngineConfig,
    models: Sequence[ClusterModel],
    starts: Sequence[StartingCell],
    load_seconds: float,
) -> EngineFacts:
    reports = [start.report for start in starts]
    shapes, cuts = [start.shape for start in starts], config.pipeline.micro_batches
    facts = EngineFacts.of(
        models[0].checkpoint,
        reports[0],
        page_size=config.cache.page_size,
        micro_batches=MAX_MICRO_BATCHES if cuts == "auto" else cuts,
        load_seconds=load_seconds,
        expert_memory=memory_line(config.model),
        cluster=models[0].config.cluster,
    )

    def total(value: Callable[[LoadReport], int]) -> int:
        pairs = zip(shapes, reports, strict=True)
        return sum(shape.attention_ranks * value(report) for shape, report in pairs)

    return replace(
        facts,
        attention_ranks=sum(shape.attention_ranks for shape in shapes),
        expert_ranks=sum(shape.expert_ranks for shape in shapes),
        num_pages=total(lambda report: report.num_pages),
        kv_bytes=total(lambda report: report.kv_bytes),
        cells=tuple(str(shape) for shape in shapes),
    )


def _last_step(cells: Sequence[Cell], shared: CellShared) -> StepTimeline | None:
    """Returns the newest step of the cell with the most running sequences that has one."""
    starts = shared.starts
    for cell in sorted(cells, key=lambda cell: -cell.engine.num_running):
        found = starts[cell.index].watch.last_step() if cell.index in starts else None
        if found is not None:
            tracks = [replace(track, name=f"{cell.name}/{track.name}") for track in found.tracks]
            return replace(found, tracks=tuple(tracks))
    return None


def build_any_engine(config: EngineConfig, progress: LoadProgress | None = None) -> BuiltEngine:
    """Builds the configured engine: loads the model here, or starts ranks of one or several cells
    that load it.
    """
    shapes = cell_shapes(config)
    if len(shapes) > 1 or (shapes and (config.cells.can_grow or config.cells.is_scaled)):
        return build_cells(config, progress)
    if shapes:
        config = config_of_cell(config, 0, shapes[0])
    build = build_cluster if config.cluster.is_disaggregated else build_engine
    return build(config, progress)
