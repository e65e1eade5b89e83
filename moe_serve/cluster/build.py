"""Builds a cluster of ranks, and the engine that drives them, from a configuration."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.pool_watch import PoolWatch, make_watch
from moe_serve.cluster.members.rank_starter import LocalStarter
from moe_serve.cluster.rebalance.planner import Plan, plan_in_process
from moe_serve.cluster.started_ranks import MakeStarter, StartedRanks
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.engine_facts import EngineFacts, memory_line
from moe_serve.engine.execute.next_layer_prediction import check_next_layer
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.schedule.policy.build import policy_maker
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from moe_serve.model.load.model_tensors import LoadProgress
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES


def build_cluster(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    make_starter: MakeStarter = LocalStarter,
    watch_for: Callable[[EngineConfig, ClusterModel], PoolWatch] = make_watch,
    plan: Plan = plan_in_process,
) -> BuiltEngine:
    """Starts the ranks, waits until they have loaded, and makes the engine.

    Raises ConfigError, CheckpointError or ClusterError with the reason why a rank cannot serve.
    """
    clock = time.monotonic()
    model = ClusterModel.read(config)
    routes, loads = RouteListeners(), RankLoads(model.placement)
    make_policy = policy_maker(config, model.folder, model.spec, routes, loads)
    check_next_layer(config, model.folder, model.spec)
    with contextlib.ExitStack() as opened:  # closed again if a later part is refused
        watch = watch_for(config, model)
        opened.callback(watch.close)
        ranks = StartedRanks(model)
        opened.callback(ranks.close)
        ranks.current.on_switch(loads.use)
        ranks.start(make_starter, progress)
        engine = ranks.engine(watch, routes, make_policy, plan)
        opened.pop_all()
    cuts, checkpoint = config.pipeline.micro_batches, model.checkpoint
    layout = EngineFacts.of(
        checkpoint,
        ranks.first_loaded.report,
        page_size=config.cache.page_size,
        micro_batches=MAX_MICRO_BATCHES if cuts == "auto" else cuts,
        load_seconds=time.monotonic() - clock,
        expert_memory=memory_line(config.model),
        cluster=config.cluster,
    )
    return BuiltEngine(
        engine,
        layout,
        model.spec,
        routes,
        placement=ranks.rebalancer,
        last_step=watch.last_step,
        grammars=checkpoint.grammars(),  # to check requests; ranks have own
        activity=ranks.witness,
    )


def build_any_engine(config: EngineConfig, progress: LoadProgress | None = None) -> BuiltEngine:
    """Loads the model here, or starts ranks that do."""
    build = build_cluster if config.cluster.is_disaggregated else build_engine
    return build(config, progress)
