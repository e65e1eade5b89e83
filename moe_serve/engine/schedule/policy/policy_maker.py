"""Builds each engine's batch policy from the configuration, and its source of signatures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from moe_serve.cache.page_key import model_identity
from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.routes.placement_version import placement_version
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.schedule.policy.ageing import Ageing
from moe_serve.engine.schedule.policy.arrival_order import BALANCED, FIFO, Observed
from moe_serve.engine.schedule.policy.concave_cost import ConcaveCost
from moe_serve.engine.schedule.policy.expected_experts import ExpectedExperts
from moe_serve.engine.schedule.policy.expert_aware import Bounds, ExpertAware
from moe_serve.engine.schedule.policy.live_learning import LiveLearning
from moe_serve.engine.schedule.policy.live_signatures import FollowedPredictor, LiveSignatures
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.engine.schedule.policy.rank_load import RankLoads
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from moe_serve.errors import ConfigError
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families import family_of
from moe_serve.model.load.weight_reader import open_checkpoint
from moe_serve.model.spec import ModelSpec
from routing_predictor.layers.recall_guard import GuardLimits, RecallGuard
from routing_predictor.predictor_file import load_request_predictor
from routing_predictor.requests.online import OnlineLimits, OnlinePredictor
from routing_predictor.requests.request_mlp import PrefixPredictor, RequestPredictor
from routing_predictor.traces.routing_error import PredictorError

_log = logging.getLogger(__name__)

MakePolicy = Callable[[], BatchPolicy]


def policy_maker(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    routes: RouteListeners,
    loads: RankLoads | None = None,
    clock: Clock = REAL_CLOCK,
) -> MakePolicy:
    """Returns a function that builds an engine's policy. Several engines share what is known of
    requests.

    `loads` are those of expert ranks, if there are any, and follow the placement. Raises
    ConfigError for a predictor that cannot be read or belongs to another model.
    """
    followed = _predictor(config, folder, spec)
    scheduler = config.scheduler
    if scheduler.batch_policy != "expert-aware" and followed is None:
        return lambda: FIFO if scheduler.batch_policy == "fifo" else BALANCED
    cost = ConcaveCost(scheduler.expert_capacity)
    table = SignatureTable(cost)
    source = LiveSignatures(
        table,
        spec.router.num_experts,
        followed,
        config.predictor.refresh_tokens,
        max(1, config.cluster.attention_ranks),
        clock,
    )
    routes.add(source)
    bounds, expected = Bounds(), None
    if followed is not None and followed.is_acting and _has_memory(config):
        expected = ExpectedExperts(table, spec.router.num_experts, lambda: source.is_on)
    if scheduler.batch_policy != "expert-aware":
        plain = FIFO if scheduler.batch_policy == "fifo" else BALANCED
        return lambda: Observed(plain, source, bounds.window, expected)

    def expert_aware() -> BatchPolicy:
        ageing = Ageing(scheduler.max_passed_over, scheduler.max_passed_over_s, clock)
        return ExpertAware(source, table, ageing, cost, bounds, loads, expected)

    return expert_aware


def _has_memory(config: EngineConfig) -> bool:
    """Returns whether the expert memory is limited and its policy uses expected experts."""
    model = config.model
    return model.expert_memory_bytes is not None and model.expert_memory_policy != "lru"


def _predictor(config: EngineConfig, folder: Path, spec: ModelSpec) -> FollowedPredictor | None:
    wanted = config.predictor
    if wanted.path is None or wanted.mode == "off":
        return None
    version = placement_version(config.cluster)
    try:
        predictor: RequestPredictor = open_request_predictor(Path(wanted.path), folder, version)
    except ConfigError as error:
        raise ConfigError(f"predictor.path: {error}") from None
    learning = None
    if wanted.learn:
        predictor = online = OnlinePredictor(predictor, spec.router.top_k, OnlineLimits())
        learning = LiveLearning(online)
    has_follower = config.scheduler.batch_policy == "expert-aware" or _has_memory(config)
    is_acting = wanted.mode == "act" and has_follower
    floor = wanted.min_recall if is_acting else 0.0
    guard = RecallGuard(GuardLimits(min_recall=floor, window=2000, min_measured=256))
    _log.info("a request predictor for the next %d tokens is loaded", predictor.horizon)
    return FollowedPredictor(
        predictor=predictor, guard=guard, is_acting=is_acting, learning=learning
    )


def open_request_predictor(
    folder: Path, model: Path, placement_version: str = ""
) -> PrefixPredictor:
    """Reads the request predictor, and from the checkpoint in `model` only the embedding table.

    Raises ConfigError for a predictor that is damaged, or belongs to another model or placement.
    """
    config = HFConfig.read(model)
    text = config.text()
    spec, reader = family_of(config).read_spec(text), open_checkpoint(model, text)
    name = family_of(config).names_in(reader.has).embedding
    try:
        return load_request_predictor(
            folder.expanduser(),
            model_identity=model_identity(model).hex(),
            embedding_VD=reader.read(name, (spec.vocab_size, spec.width), torch.float32),
            placement_version=placement_version,
            model=model.resolve().name,
        )
    except PredictorError as error:
        raise ConfigError(f"{error}.") from None
    finally:
        reader.done(name)
