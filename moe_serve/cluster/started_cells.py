"""Builds a server of several cells, each with ranks of its own, and chooses what builds the engine
of a configuration.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from moe_serve.cache.events.kv_events import KVEvents, check_kv_events
from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.cells.cell import Cell, cell_name
from moe_serve.cluster.cells.cells_engine import CellsEngine, Parcels
from moe_serve.cluster.cells.joined_parts import JoinedParts
from moe_serve.cluster.cells.moves import Moves
from moe_serve.cluster.cells.parcel_post import ParcelPost
from moe_serve.cluster.control.secret import new_secret, read_secret
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.pool_watch import PoolWatch, make_watch
from moe_serve.cluster.members.rank_starter import LocalStarter
from moe_serve.cluster.parcels.cell_ranks import RosterRanks
from moe_serve.cluster.parcels.link_setup import LinkSetup
from moe_serve.cluster.parcels.rank_carrier import RankCarrier
from moe_serve.cluster.rank_arena import RankArena
from moe_serve.cluster.rebalance.planner import plan_in_process
from moe_serve.cluster.started_ranks import (
    CellPart,
    MakeStarter,
    StartedRanks,
    adapters_of,
    build_cluster,
)
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.rank_witness import CellsWitness
from moe_serve.config.cell_config import cell_shapes, config_of_cell
from moe_serve.config.cells import CellShape
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.build_adapters import check_adapters
from moe_serve.engine.build_tiers import check_tiers
from moe_serve.engine.drafting.drafting_maker import check_on_ranks
from moe_serve.engine.engine_facts import EngineFacts, memory_line
from moe_serve.engine.execute.next_layer_prediction import check_next_layer
from moe_serve.engine.execute.step_timeline import StepTimeline
from moe_serve.engine.opened_model import LoadReport
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.schedule.policy.policy_maker import MakePolicy, policy_maker
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from moe_serve.errors import ConfigError
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES

_PATIENCE_S = 0.5  # without a rank that all steps need, until the requests move to other cells

StarterOfCell = Callable[[int, Sequence[CellShape]], MakeStarter]


def local_starter(index: int, shapes: Sequence[CellShape]) -> MakeStarter:
    """Returns what starts the ranks of a cell on this host."""
    first = sum(shape.attention_ranks + shape.expert_ranks for shape in shapes[:index])
    return lambda host, port, secret, num_threads: LocalStarter(
        host, port, secret, num_threads, cell=cell_name(index), first_place=first
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CellStart:
    """The parts of a cell that is to be started."""

    index: int
    shape: CellShape
    ranks: StartedRanks
    watch: PoolWatch
    make_policy: MakePolicy
    make_starter: MakeStarter

    def run(self, routes: RouteListeners, progress: LoadProgress) -> ClusterEngine:
        """Starts the ranks, waits until they have loaded, and makes their engine."""
        self.ranks.start(self.make_starter, progress)
        own = RouteListeners(routes)  # its placement follows its own rows
        return self.ranks.engine(self.watch, own, self.make_policy, plan_in_process)


class _Shared:
    """Everything that the cells of a server have in common. It is closed after them."""

    def __init__(self, config: EngineConfig, model: ClusterModel) -> None:
        """`model`: of any cell. Raises ConfigError."""
        self.ids, self._step_numbers = itertools.count(), itertools.count(1)
        self.news = threading.Event()
        self.post = ParcelPost(self.news.set)
        self.secret = read_secret(os.environ) or new_secret()
        with contextlib.ExitStack() as opened:  # closed again if a part is refused
            self.link = LinkSetup(config.cells)
            opened.callback(self.link.close)
            self.kv_events = KVEvents(config)
            opened.callback(self.kv_events.close)
            self._arena = RankArena(model.config)
            opened.callback(self._arena.close)
            self.joined = JoinedParts(config, adapters_of(model))
            opened.callback(self.joined.close)
            self.close = opened.pop_all().close

    def part(self, index: int, first_rank: int) -> CellPart:
        """Returns the place of a cell. `first_rank`: the attention ranks of the cells before."""
        return CellPart(
            name=cell_name(index),
            ids=self.ids,
            step_numbers=self._step_numbers,
            outage_limit_s=math.inf,
            patience_s=_PATIENCE_S,
            kv_events=self.kv_events,
            first_rank=first_rank,
            arena=self._arena,
            adapters=self.joined.adapters,
            policy=self.joined.policy,
        )


def build_cells(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    starter_of: StarterOfCell = local_starter,
) -> BuiltEngine:
    """Starts all cells together, waits until they have loaded, and makes the engine over them.

    Raises ConfigError, CheckpointError or ClusterError with the reason why a rank cannot serve.
    """
    clock, shapes = time.monotonic(), cell_shapes(config)
    configs = [config_of_cell(config, index, shape) for index, shape in enumerate(shapes)]
    check_kv_events(config)
    for each in configs:
        check_tiers(each)
        check_on_ranks(each)
        check_adapters(each)
    models, routes = ClusterModel.read_cells(configs), RouteListeners()
    check_next_layer(config, models[0].folder, models[0].spec)
    with contextlib.ExitStack() as opened:  # closed again if a cell cannot start
        shared = _Shared(config, models[0])
        opened.callback(shared.close)
        starts = _cell_starts(models, shapes, shared, routes, starter_of, opened)
        engines = _started(starts, routes, progress)
        _check_alike(starts)
        cells = [
            Cell(start.index, start.shape, engine, shared.news.set)
            for start, engine in zip(starts, engines, strict=True)
        ]
        for start, cell in zip(starts, cells, strict=True):
            ranks = start.ranks
            shared.joined.connect(cell, ranks.membership.adapters, ranks.rebalancer)
        engine = _engine(config, cells, _carrier(config, starts), shared)
        opened.pop_all()
        opened.callback(engine.close)
        adapters = shared.joined.open_adapters()
        opened.pop_all()
    return BuiltEngine(
        engine,
        _facts(config, models, starts, time.monotonic() - clock),
        models[0].spec,
        routes,
        last_step=lambda: _last_step(cells, starts),
        grammars=models[0].checkpoint.grammars(),
        activity=CellsWitness({cell_name(s.index): s.ranks.witness for s in starts}),
        adapters=adapters,
        cell_placements=shared.joined.placements,
        cells=engine,
        nudge=engine.nudge,
        kv_events=shared.kv_events,
    )


def _cell_starts(
    models: Sequence[ClusterModel],
    shapes: Sequence[CellShape],
    shared: _Shared,
    routes: RouteListeners,
    starter_of: StarterOfCell,
    opened: contextlib.ExitStack,
) -> list[_CellStart]:
    """Makes the parts of all cells. `opened` closes them if a later one is refused."""
    starts, first_rank = [], 0
    for index, (model, shape) in enumerate(zip(models, shapes, strict=True)):
        watch = make_watch(model.config, model)
        opened.callback(watch.close)
        part = shared.part(index, first_rank)
        first_rank += shape.attention_ranks
        ranks = StartedRanks(model, shared.link.setup, part, shared.secret)
        opened.callback(ranks.close)
        ranks.membership.on_parcel = shared.post.receiver(index, ranks.roster)
        loads = RankLoads(model.placement)
        ranks.current.on_switch(loads.use)
        starts.append(
            _CellStart(
                index=index,
                shape=shape,
                ranks=ranks,
                watch=watch,
                make_policy=policy_maker(model.config, model.folder, model.spec, routes, loads),
                make_starter=starter_of(index, shapes),
            )
        )
    return starts


def _engine(
    config: EngineConfig, cells: Sequence[Cell], carrier: RankCarrier, shared: _Shared
) -> CellsEngine:
    moves = Moves(
        cells,
        carrier,
        config.cells,
        REAL_CLOCK,
        timeout_s=config.cluster.timeout_s,
        chunk_tokens=config.scheduler.max_batched_tokens,
        policy=shared.joined.policy,
    )
    return CellsEngine(
        cells,
        moves,
        Parcels(carrier, shared.post, shared.close),
        shared.ids,
        shared.news,
        outage_limit_s=config.cluster.start_timeout_s,
    )


def _started(
    starts: Sequence[_CellStart], routes: RouteListeners, progress: LoadProgress | None
) -> list[ClusterEngine]:
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
            start.ranks.close()

    def run(start: _CellStart) -> ClusterEngine:
        try:
            return start.run(routes, lambda done, total: note(start.index, done, total))
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
    return [future.result() for future in futures]


def _carrier(config: EngineConfig, starts: Sequence[_CellStart]) -> RankCarrier:
    facts = starts[0].ranks.first_loaded.parcels
    assert facts is not None, "attention ranks of cells were told of parcels"
    ranks, timeout_s = RosterRanks([s.ranks.roster for s in starts]), config.cluster.timeout_s
    return RankCarrier(config.cells, ranks, facts.page_bytes, timeout_s)


def _check_alike(starts: Sequence[_CellStart]) -> None:
    """Raises ConfigError unless all cells compute the same bits, so that requests may move."""
    first = starts[0].ranks.first_loaded.report
    for start in starts[1:]:
        report = start.ranks.first_loaded.report
        for name in ("kernels", "build", "device", "dtype", "expert_weights", "kv_dtype"):
            own, others = getattr(report, name), getattr(first, name)
            if own != others:
                raise ConfigError(
                    f"{cell_name(start.index)} and {cell_name(0)} differ in {name} ({own} and "
                    f"{others}), so a request that moves could get other tokens: give all cells "
                    "the same kind of machine."
                )


def _facts(
    config: EngineConfig,
    models: Sequence[ClusterModel],
    starts: Sequence[_CellStart],
    load_seconds: float,
) -> EngineFacts:
    reports = [start.ranks.first_loaded.report for start in starts]
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


def _last_step(cells: Sequence[Cell], starts: Sequence[_CellStart]) -> StepTimeline | None:
    """Returns the newest step of the cell with the most running sequences that has one."""
    for cell in sorted(cells, key=lambda cell: -cell.engine.num_running):
        found = starts[cell.index].watch.last_step()
        if found is not None:
            tracks = [replace(track, name=f"{cell.name}/{track.name}") for track in found.tracks]
            return replace(found, tracks=tuple(tracks))
    return None


def build_any_engine(config: EngineConfig, progress: LoadProgress | None = None) -> BuiltEngine:
    """Loads the model here, or starts ranks that do: those of one cell, or of several."""
    shapes = cell_shapes(config)
    if len(shapes) > 1:
        return build_cells(config, progress)
    if shapes:
        config = config_of_cell(config, 0, shapes[0])
    build = build_cluster if config.cluster.is_disaggregated else build_engine
    return build(config, progress)
