"""Builds a cluster of ranks and the engine that drives them, from a configuration: the processes,
and the listener, store and membership that they need here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from moe_serve.cache.events.kv_events import KVEvents, check_kv_events
from moe_serve.cache.page_times import SampledPages
from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.cell_part import CellPart
from moe_serve.cluster.control.listener import Listener
from moe_serve.cluster.control.meeting_store import StoreServer
from moe_serve.cluster.control.messages import Configure, Loaded, Report
from moe_serve.cluster.control.parcel_messages import ParcelSetup
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret, new_secret, read_secret
from moe_serve.cluster.members.cluster_adapters import ClusterAdapters
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.current_placement import CurrentPlacement
from moe_serve.cluster.members.membership import Membership
from moe_serve.cluster.members.pool_watch import PoolWatch, make_watch
from moe_serve.cluster.members.preflight import ExpectedRank, PreflightRound, check_transport
from moe_serve.cluster.members.rank_calls import RankCalls
from moe_serve.cluster.members.rank_starter import LocalStarter, RankStarter
from moe_serve.cluster.members.roster import Roster
from moe_serve.cluster.rank_arena import RankArena
from moe_serve.cluster.rebalance.mover import Mover
from moe_serve.cluster.rebalance.planner import Plan, plan_in_process
from moe_serve.cluster.rebalance.rebalancer import Rebalancer, make_mover, make_rebalancer
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.coordinator import Coordinator
from moe_serve.cluster.steps.epoch_maker import EpochMaker
from moe_serve.cluster.steps.rank_witness import RankWitness
from moe_serve.cluster.steps.remote_executor import RemoteExecutor
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.build_adapters import check_adapters
from moe_serve.engine.build_tiers import check_tiers
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.drafting_maker import check_on_ranks, drafting_maker
from moe_serve.engine.engine import Engine
from moe_serve.engine.engine_facts import EngineFacts, memory_line
from moe_serve.engine.execute.next_layer_prediction import check_next_layer
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.engine.schedule.policy.policy_maker import MakePolicy, policy_maker
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES
from moe_serve.pipeline.links.meeting import MeetingPlace

MakeStarter = Callable[[str, int, ClusterSecret, int], RankStarter]


class StartedRanks:
    """Listens as soon as it is made; `close` ends everything."""

    def __init__(
        self,
        model: ClusterModel,
        parcels: ParcelSetup | None = None,
        part: CellPart | None = None,
        secret: ClusterSecret | None = None,
    ) -> None:
        """`parcels` and `secret` are shared by the ranks of several cells."""
        cluster = model.config.cluster
        self._model, self._cluster, self._parcels = model, cluster, parcels
        self._part = part or CellPart()
        self._secret = secret or read_secret(os.environ) or new_secret()
        self.current = CurrentPlacement(model.placement)
        self.rebalancer: Rebalancer | None = None  # set with the engine
        self.witness: RankWitness | None = None  # of the engine
        self._steps: Coordinator | None = None  # likewise
        self._is_closed = False
        self._starter: RankStarter | None = None
        self._arena = self._part.arena or RankArena(model.config)
        self.roster = Roster(model.ranks)
        self.membership = Membership(
            self.roster, self._configure, model.weights, cluster.heartbeat_s, self._part.name
        )
        self.adapters = self._part.adapters or adapters_of(model)
        if self.adapters is not None:
            self.membership.adapters = self.adapters.join(self.roster, self._part.name)
        decoder = msgspec.msgpack.Decoder(Report)
        self._listener: Listener[Any] = Listener(
            cluster.host, cluster.port, self._secret, decoder, self.membership.admit
        )
        try:
            self.kv_events = self._part.kv_events or KVEvents(model.config)
            store = StoreServer(cluster.host, 0, self._secret, cluster.timeout_s)
        except BaseException:
            self._listener.close()
            raise
        self._place = MeetingPlace(store, cluster.host)

    def start(self, make_starter: MakeStarter, progress: LoadProgress | None) -> None:
        """Starts the processes and waits until all have loaded. Raises the error that prevents
        it.
        """
        cluster = self._cluster
        starter = self._starter = make_starter(
            cluster.host, self._listener.port, self._secret, self._model.num_threads
        )
        expected = [
            ExpectedRank(name=name, node=starter.place_of(state.name))
            for name, state in self.roster.states.items()
        ]
        try:
            preflight = PreflightRound(
                expected, self._model.folder, cluster.host, self._part.join_s
            )
        except BaseException:
            starter.stop()  # once started, the membership does that
            raise
        self.membership.start(starter, preflight, cluster.start_timeout_s, progress)
        states = self.roster.states
        gpus = {name: of.loaded.gpu if of.loaded is not None else "" for name, of in states.items()}
        check_transport(cluster.transport, gpus)

    @property
    def first_loaded(self) -> Loaded:
        """Returns the first attention rank's report; those of the others are equal."""
        loaded = self.roster["attention-0"].loaded
        assert loaded is not None, "the attention ranks have loaded"
        return loaded

    def engine(
        self, watch: PoolWatch, routes: RouteListeners, make_policy: MakePolicy, plan: Plan
    ) -> ClusterEngine:
        """Makes the engine over all ranks. `routes` tells listeners which experts were chosen."""
        reports = [s.loaded.report for s in self.roster.all() if s.loaded is not None]
        self._arena.open(self._model.folder, self.first_loaded.report, reports)
        calls = RankCalls(self.membership, watch)
        mover = make_mover(self._model, self.roster, calls, self.current)
        coordinator = self._steps = self._coordinator(calls, watch, mover)
        if self._is_closed:  # meanwhile: the engine must not wait for its ranks
            coordinator.stop()
        stacks = self._starter.stacks if isinstance(self._starter, LocalStarter) else None
        self.witness = RankWitness(self.roster, coordinator, stacks)
        identity = self._model.checkpoint.page_identity(self.first_loaded.report)

        make_drafting = drafting_maker(
            self._model.config.speculation,
            self._model.spec.vocab_size,
            self._model.checkpoint.stop_rule,
        )

        service = ServiceState.of(
            self._model.config.scheduler, REAL_CLOCK, policy=self._part.policy
        )

        def make_engine(executor: RemoteExecutor, ids: itertools.count[int]) -> Engine:
            drafting = make_drafting()
            policy = make_policy()
            return self._engine(executor, ids, identity, routes, policy, drafting, service)

        def close() -> None:
            rebalancer.close()
            self.close()
            watch.close()

        is_ahead = self._model.config.pipeline.ahead
        engine = ClusterEngine(
            coordinator,
            make_engine,
            watch,
            close,
            is_ahead=is_ahead,
            service=service,
            wait_for_pages=self._arena.wait,
            ids=self._part.ids,
            step_numbers=self._part.step_numbers,
        )
        rebalancer = make_rebalancer(self._model, self.current, mover, routes, plan)
        rebalancer.start(lambda: self.membership.on_event())
        self.rebalancer = rebalancer
        return engine

    def _coordinator(self, calls: RankCalls, watch: PoolWatch, mover: Mover) -> Coordinator:
        timeout_s, start_timeout_s = self._cluster.timeout_s, self._cluster.start_timeout_s
        maker = EpochMaker(
            self.membership,
            calls,
            self.current,
            self._place,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )
        return Coordinator(
            self.membership,
            calls,
            maker,
            watch,
            self.current,
            mover,
            timeout_s=timeout_s,
            outage_limit_s=start_timeout_s
            if self._part.outage_limit_s is None
            else self._part.outage_limit_s,
            patience_s=self._part.patience_s,
        )

    def _configure(self, name: RankName) -> Configure:
        own, version = self.membership.adapters, self.current.version
        adapters = () if own is None else own.orders_for(name)
        return self._model.configure(name, version, self._arena.path, self._parcels, adapters)

    def close(self) -> None:
        """Ends the ranks and stops listening. May be called several times, and while they start."""
        self._is_closed = True
        if self._steps is not None:
            self._steps.stop()
        if self.adapters is not None and self._part.adapters is None:
            self.adapters.close()
        if self.membership.adapters is not None:
            self.membership.adapters.leave()
        self.membership.close()
        self._listener.close()
        self._place.close()
        if self._part.arena is None:
            self._arena.close()
        if self._part.kv_events is None:
            self.kv_events.close()

    def _engine(
        self,
        executor: RemoteExecutor,
        ids: itertools.count[int],
        identity: bytes,
        routes: RouteListeners,
        policy: BatchPolicy,
        drafting: Drafting | None,
        service: ServiceState | None,
    ) -> Engine:
        """Makes the engine of one attention rank: scheduler, pages and prefixes."""
        config, checkpoint = self._model.config, self._model.checkpoint
        rank = self.roster[executor.name]
        loaded = rank.loaded
        assert loaded is not None, f"{executor.name} has not loaded"
        return Engine(
            executor,
            scheduler=config.scheduler,
            num_pages=loaded.report.num_pages,
            page_size=config.cache.page_size,
            micro_batches=1,
            max_model_len=checkpoint.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            model_identity=identity,
            has_prefix_cache=config.cache.prefix_cache,
            sampled_pages=SampledPages(config.cache.metrics_sample),
            listener=self.kv_events.listener(self._part.first_rank + rank.name.index),
            ids=ids,
            policy=policy,
            routes=routes,
            drafting=drafting,
            make_tier=self._arena.tier_maker(executor),
            window=None if checkpoint.mtp_layer(config) else checkpoint.spec.window,
            service=service,
            layered=LayeredPrefill.of(
                config, checkpoint.spec, loaded.report.device, loaded.report.dtype
            ),
        )


def adapters_of(model: ClusterModel) -> ClusterAdapters | None:
    """Returns the object that loads adapters on ranks; None if the configuration has no
    adapters.
    """
    if not model.config.adapters.is_enabled:
        return None
    return ClusterAdapters(model.spec.router.num_experts, model.config.cluster.start_timeout_s)


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
    check_tiers(config)
    check_kv_events(config)
    check_adapters(config)
    clock = time.monotonic()
    model = ClusterModel.read(config)
    routes, loads = RouteListeners(), RankLoads(model.placement)
    make_policy = policy_maker(config, model.folder, model.spec, routes, loads)
    check_next_layer(config, model.folder, model.spec)
    check_on_ranks(config)
    with contextlib.ExitStack() as opened:  # closed again if a later part is refused
        watch = watch_for(config, model)
        opened.callback(watch.close)
        ranks = StartedRanks(model)
        opened.callback(ranks.close)
        ranks.current.on_switch(loads.use)
        ranks.start(make_starter, progress)
        engine = ranks.engine(watch, routes, make_policy, plan)
        opened.pop_all()
        opened.callback(engine.close)  # closes ranks and watch
        own = ranks.adapters
        adapters = None if own is None else own.open(config.adapters)
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
        adapters=adapters,
        kv_events=ranks.kv_events,
    )
