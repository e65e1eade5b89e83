"""From a configuration to the policy of each engine, and what tells it the signatures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from experts.placement.plan import Placement
from moe_serve.cache.model_identity import model_identity
from moe_serve.config import EngineConfig, SchedulerConfig
from moe_serve.engine.batch_policy.ageing import Ageing
from moe_serve.engine.batch_policy.arrival_order import BALANCED, FIFO
from moe_serve.engine.batch_policy.concave_cost import ConcaveCost
from moe_serve.engine.batch_policy.expert_aware import Bounds, ExpertAware
from moe_serve.engine.batch_policy.live_signatures import FollowedPredictor, LiveSignatures
from moe_serve.engine.batch_policy.observed import Observed
from moe_serve.engine.batch_policy.policy import BatchPolicy
from moe_serve.engine.batch_policy.rank_load import RankLoads
from moe_serve.engine.batch_policy.signature_table import SignatureTable
from moe_serve.engine.route_records import RouteListeners
from moe_serve.errors import ConfigError
from moe_serve.model.families import family_of
from moe_serve.model.hf_config import HFConfig
from moe_serve.model.spec import ModelSpec
from moe_serve.model.weight_reader import open_checkpoint
from routing_predictor.errors import PredictorError
from routing_predictor.predictor_file import load_request_predictor
from routing_predictor.recall_guard import GuardLimits, RecallGuard

_log = logging.getLogger(__name__)

MakePolicy = Callable[[], BatchPolicy]


def policy_maker(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    routes: RouteListeners,
    placement: Placement | None = None,
) -> MakePolicy:
    """Makes the policy of an engine; several engines share what is known of requests.

    Raises ConfigError for a predictor that cannot be read or is another model's.
    """
    followed = _predictor(config, folder, spec)
    scheduler = config.scheduler
    if scheduler.batch_policy != "expert-aware" and followed is None:
        return lambda: FIFO if scheduler.batch_policy == "fifo" else BALANCED
    cost = ConcaveCost()
    table = SignatureTable(cost)
    source = LiveSignatures(
        table, spec.router.num_experts, followed, config.predictor.refresh_tokens
    )
    routes.add(source)
    bounds = Bounds()
    if scheduler.batch_policy != "expert-aware":
        plain = FIFO if scheduler.batch_policy == "fifo" else BALANCED
        return lambda: Observed(plain, source, bounds.window)
    loads = None if placement is None else RankLoads(placement)
    return lambda: ExpertAware(source, table, _ageing(scheduler), cost, bounds, loads)


def _ageing(config: SchedulerConfig) -> Ageing:
    return Ageing(config.max_passed_over, config.max_passed_over_s, time.monotonic)


def _predictor(config: EngineConfig, folder: Path, spec: ModelSpec) -> FollowedPredictor | None:
    wanted = config.predictor
    if wanted.path is None or wanted.mode == "off":
        return None
    hf_config = HFConfig.read(folder)
    reader = open_checkpoint(folder, hf_config.text())
    name = family_of(hf_config).names_in(reader.has).embedding
    embedding_VD = reader.read(name, (spec.vocab_size, spec.width), torch.float32)
    try:
        predictor = load_request_predictor(
            Path(wanted.path).expanduser(),
            model_identity=model_identity(folder).hex(),
            embedding_VD=embedding_VD,
            model=folder.name,
        )
    except PredictorError as error:
        raise ConfigError(f"predictor.path: {error}.") from error
    reader.done(name)
    is_acting = wanted.mode == "act" and config.scheduler.batch_policy == "expert-aware"
    floor = wanted.min_recall if is_acting else 0.0
    guard = RecallGuard(GuardLimits(min_recall=floor, window=2000, min_measured=256))
    _log.info("a request predictor for the next %d tokens is loaded", predictor.horizon)
    return FollowedPredictor(predictor=predictor, guard=guard, is_acting=is_acting)
