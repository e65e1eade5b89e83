"""An attention rank: runs steps on its own pages, with the experts on other ranks."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from moe_serve.cache.kv_cache import check_page_size
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.adapter_messages import DropAdapter, LoadAdapter
from moe_serve.cluster.control.epoch import layout_of, meet, sparse_layers, split_of, wire_of
from moe_serve.cluster.control.messages import (
    Configure,
    FinitePages,
    Join,
    Loaded,
    QueryPages,
    Report,
    RunStep,
    StageSeconds,
    StepDone,
    StepFailed,
)
from moe_serve.cluster.control.parcel_messages import ParcelOrder
from moe_serve.cluster.control.placement_messages import (
    DropPlacement,
    Staged,
    StagePlacement,
    SwitchPlacement,
)
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.ranks.attention_shards import AttentionShards, ShardStarter, check_can_split
from moe_serve.cluster.ranks.choice_packing import pack_choices
from moe_serve.cluster.ranks.mirror import Mirrors, RankPages, tokens_of
from moe_serve.cluster.ranks.rank_adapters import attention_adapters
from moe_serve.cluster.ranks.rank_base import RankPlacement, loaded_message, open_rank
from moe_serve.cluster.ranks.rank_parcels import ParcelMemories, RankHome, RankParcels
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.execute.next_layer_prediction import open_next_layer
from moe_serve.engine.execute.step_drafter import StepDrafter
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.opened_model import AttentionPart
from moe_serve.engine.sampling.answer_masks import AnswerMasks
from moe_serve.engine.sampling.sampling_backend import make_sampler
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.step_shape import StepShape
from moe_serve.pipeline.groups.parked_states import ParkedStates
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.shard_group import LeaderTransport, ShardLostError
from moe_serve.pipeline.links.transfer import PeerLostError
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.rank_turns import RankTurns
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.timeline.stage_log import Operation, StageLog
from moe_serve.pipeline.timeline.timeline_recorder import NO_LAYER, NO_MICRO_BATCH, Stage
from moe_serve.pipeline.transport import Transport

_log = logging.getLogger(__name__)


class AttentionRank:
    """Holds the attention stage, the pages, the sampler, and mirrors of its sequences."""

    def __init__(
        self,
        name: RankName,
        configure: Configure,
        progress: LoadProgress,
        shard_starter: ShardStarter,
        home: RankHome,
    ) -> None:
        """`home.tell` may be called on another thread than the one that handles orders."""
        clock = time.monotonic()
        self._name, self._configure = name, configure
        config = configure.config
        self._model = open_rank(configure, progress)
        self._loader, self._spec = self._model.loader, self._model.spec
        check_page_size(config.cache.page_size, self._loader.kernels)
        num_shards = config.cluster.attention_tp
        check_can_split(self._loader, num_shards, has_adapters=config.adapters.is_enabled)
        setup, self._parcels = configure.parcels, None
        memories = None if setup is None else ParcelMemories(setup)
        self._shards: AttentionShards | None = None
        if num_shards > 1:
            paths = () if memories is None else (memories.common, memories.own)
            self._shards = AttentionShards(str(name), configure, shard_starter, *paths)
        try:
            self._part = self._load(config)
            num_heads = self._spec.attention.num_kv_heads
            self._wire = WirePages(self._part.cache, num_heads, 0, num_shards)
            if memories is not None:
                self._parcels = self._open_parcels(memories, home)
            self._pages = RankPages(self._part.cache, configure.arena, self._wire)
            self._next_layer = open_next_layer(config, self._model.folder, self._loader)
        except BaseException:
            if self._shards is not None:
                self._shards.close()
            if self._parcels is not None:
                self._parcels.close()
            elif memories is not None:
                memories.close()
            raise
        eos = self._model.eos_token_ids
        self._sampler = make_sampler(eos, self._loader.kernels)
        self._masks = AnswerMasks(self._spec.vocab_size, eos, self._model.grammars())
        self._mirrors, self._parked = Mirrors(), ParkedStates()
        gather = None if self._shards is None else self._shards.group
        parts = (configure.adapters, self._part.stage, gather, home.tell)
        self._adapters = attention_adapters(self._loader, config.adapters, *parts)
        self._placement = RankPlacement(configure.placement)
        self._last_done = 0  # the last step whose tokens were reported
        self._log = StageLog(configure.is_recording)
        self._group: DataGroup | None = None
        self._transport: GroupTransport | None = None
        self._executor: LocalExecutor | None = None
        self._seconds = time.monotonic() - clock

    def _load(self, config: EngineConfig) -> AttentionPart:
        if self._shards is None:
            return self._model.load_attention(config)
        part = self._model.load_attention(config, self._shards.group)
        self._shards.make_pages(part.num_pages)
        return part

    def _open_parcels(self, memories: ParcelMemories, home: RankHome) -> RankParcels:
        report, page_size = self._model.report(self._part), self._part.cache.page_size
        computed_by = self._model.page_identity(report) + report.build.encode()
        timeout_s, parts = self._configure.config.cluster.timeout_s, (self._wire, page_size)
        return RankParcels(memories, *parts, self._shards, home, computed_by, timeout_s)

    @property
    def loaded(self) -> Loaded:
        num_shards = self._configure.config.cluster.attention_tp
        loaded = loaded_message(self._model, self._seconds, self._part, num_shards, self._wire)
        facts = None if self._parcels is None else self._parcels.facts
        return msgspec.structs.replace(loaded, parcels=facts)

    @property
    def operation(self) -> Operation | None:
        """Returns the current operation, on any thread; None between steps."""
        return self._log.operation

    def join(self, join: Join, store: Any, host: str) -> None:
        """Enters an epoch; raises PeerLostError."""
        self.leave()
        self._placement.check(join)
        loader, configure = self._loader, self._configure
        split = None if configure.router_on_experts else split_of(join, configure, loader.device)
        group = meet(join, str(self._name), store, configure, host, loader.device)
        self._group = group
        self._transport = GroupTransport(
            group,
            attention_rank=join.attention_ranks.index(str(self._name)),
            expert_ranks=join.expert_ranks,
            wire=wire_of(join, configure, self._spec, loader.dtype),
            split=split,
            sparse_layers=sparse_layers(self._spec),
            log=self._log,
            layout=layout_of(group, loader.device),
            num_experts=0 if self._adapters is None else self._spec.router.num_experts,
        )
        self._placement.joined(split, self._transport.use)
        transport: Transport = self._transport
        if self._shards is not None:
            transport = LeaderTransport(transport, self._shards.group)
        part, tap = self._part, RouteTap(self._spec.router.num_experts)
        beside = (self._log, tap, self._next_layer)
        pipeline = Pipeline(
            part.stage,
            transport,
            part.cache,
            loader.device,
            *beside,
            parked=self._parked,
            adapters=self._adapters,
        )
        if self._shards is None and self._next_layer is None:
            pipeline.turns = RankTurns.of(part.stage, part.cache, self._transport, self._log, tap)
        self._executor = LocalExecutor(
            pipeline,
            self._sampler,
            tap,
            masks=self._masks,
            drafter=StepDrafter.of(
                configure.config, self._model.folder, self._masks, part.stage, pipeline, part.mtp
            ),
            parked=self._parked,
        )

    def leave(self) -> None:
        """Closes the epoch's connections; ranks that wait for this one wake."""
        if self._transport is not None:
            self._transport.close()
        self._placement.left()
        group, self._group = self._group, None
        self._transport = self._executor = None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Ends the rank and its other shards."""
        self.leave()
        if self._parcels is not None:
            self._parcels.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._shards is not None:
            self._shards.close()

    def handle(self, order: object) -> Report | None:
        """Handles one order of the coordinator; returns the answer, if there is one."""
        if isinstance(order, RunStep | QueryPages) and self._parcels is not None:
            self._parcels.before(order)
        if isinstance(order, RunStep):
            return self._run(order)
        if isinstance(order, QueryPages):
            return self._query(order)
        if isinstance(order, ParcelOrder):
            assert self._parcels is not None, f"{type(order).__name__} without parcels"
            return self._parcels.handle(order)
        if isinstance(order, StagePlacement):
            self._placement.stage(order)
            return Staged(placement=order.placement)
        if isinstance(order, DropPlacement):
            self._placement.drop()
            return None
        if isinstance(order, SwitchPlacement):
            self._placement.switch(order)
            return None
        if isinstance(order, LoadAdapter | DropAdapter) and self._adapters is not None:
            if self._shards is not None:
                self._shards.adapter(order)
            self._adapters.handle(order)
            return None
        raise AssertionError(f"an attention rank got {type(order).__name__}")

    def _query(self, order: QueryPages) -> FinitePages:
        if self._shards is not None:
            self._shards.query(order)
        self._pages.do(order.page_work)
        is_finite = self._part.cache.finite(list(order.pages))
        if self._shards is not None:
            is_finite = self._shards.all_set(is_finite)
        return FinitePages(is_finite=is_finite)

    def _run(self, order: RunStep) -> Report:
        self._placement.check(order)
        if order.after not in (0, self._last_done):
            return self._skip(order)
        if self._shards is not None:
            self._shards.step(order)
        plan = self._mirrors.update(order)
        self._pages.do(order.page_work)
        group, transport, executor = self._group, self._transport, self._executor
        if group is None or transport is None or executor is None or group.epoch != order.epoch:
            return self._failed(
                order, "it is not a member of the data group of this epoch", str(self._name)
            )
        transport.begin(_shape(order))
        try:
            return self._compute(order, plan, transport, executor)
        except PeerLostError as error:
            peer, why = error.peer, str(error)
        self.leave()  # only now: the traceback refers to objects closed here
        return self._failed(order, why, peer)

    def _skip(self, order: RunStep) -> Report:
        """Skips a step whose tokens are missing: applies only its changes to sequences and pages,
        and takes part in its exchanges, with empty rows, so that other ranks do not wait."""
        order = msgspec.structs.replace(order, micro_batches=())
        if self._shards is not None:
            self._shards.step(order)
        self._mirrors.update(order)
        self._pages.do(order.page_work)
        why, peer = f"step {order.after} produced no tokens", None
        group, transport = self._group, self._transport
        if group is None or transport is None or group.epoch != order.epoch:
            peer = str(self._name)
        else:
            transport.begin(_shape(order))
            try:
                transport.abandon()
            except PeerLostError as error:
                peer, why = error.peer, str(error)
            if peer is not None:
                self.leave()
        return StepFailed(epoch=order.epoch, step=order.step, why=why, peer=peer)

    def _compute(
        self, order: RunStep, plan: StepPlan, transport: GroupTransport, executor: LocalExecutor
    ) -> Report:
        """Computes a step. If it fails, its remaining exchanges still take place, so that other
        ranks do not wait."""
        log = self._log
        log.begin(order.step)
        try:
            outcome = executor.run(plan, self._mirrors.sequences)
        except (PeerLostError, ShardLostError):
            raise
        except Exception as error:
            _log.exception("step %d failed", order.step)
            transport.abandon()
            return self._failed(order, str(error), None)
        num_sampled = len(outcome.sampled.keys() | outcome.failures.keys())
        log.add(Stage.SAMPLE, NO_LAYER, NO_MICRO_BATCH, num_sampled, log.end)
        whole = log.finish(sum(batch.num_tokens for batch in plan.micro_batches))
        busy = log.layers_s - log.waited_s
        return self._done(order, outcome, StageSeconds(busy, log.waited_s, whole))

    def _done(self, order: RunStep, outcome: StepOutcome, seconds: StageSeconds) -> StepDone:
        self._last_done = order.step
        tokens = tokens_of(outcome)
        self._mirrors.append(tokens)
        if self._shards is not None:
            self._shards.sampled(tokens)
        return StepDone(
            epoch=order.epoch,
            step=order.step,
            sampled=outcome.sampled,
            failures=outcome.failures,
            prompt_logprobs=outcome.prompt_logprobs,
            seconds=seconds,
            records=self._log.take(),
            choices=None if outcome.choices is None else pack_choices(outcome.choices),
            mask_costs=outcome.mask_costs,
            spoiled=tuple(outcome.spoiled),
            proposals=outcome.proposals,
        )

    def _failed(self, order: RunStep, why: str, peer: str | None) -> StepFailed:
        self._log.give_up()
        if self._shards is not None:
            self._shards.group.abandon()
        return StepFailed(epoch=order.epoch, step=order.step, why=why, peer=peer)


def _shape(order: RunStep) -> StepShape:
    rows = tuple(tuple(counts) for counts in order.rows)
    return StepShape(order.epoch, order.step, rows, order.some_layers)
