"""From a configuration to what measures, plans and moves."""

from __future__ import annotations

from moe_serve.cluster.control.epoch import sparse_layers
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.current_placement import CurrentPlacement
from moe_serve.cluster.members.rank_calls import RankCalls
from moe_serve.cluster.members.roster import Roster
from moe_serve.cluster.rebalance.load_window import LoadWindow
from moe_serve.cluster.rebalance.mover import Mover, MoverLimits
from moe_serve.cluster.rebalance.planner import Plan
from moe_serve.cluster.rebalance.proposal import PlanLimits, Proposer
from moe_serve.cluster.rebalance.rebalancer import Rebalancer
from moe_serve.engine.routes.route_records import RouteListeners

_WIDEST = 4  # bytes of a weight


def make_mover(
    model: ClusterModel, roster: Roster, calls: RankCalls, current: CurrentPlacement
) -> Mover:
    cluster, spec = model.config.cluster, model.spec
    limits = MoverLimits(
        room=cluster.rebalance_max_moves,
        bytes_per_s=cluster.rebalance_bytes_per_s,
        expert_bytes=3 * spec.width * spec.expert_width * _WIDEST,
    )
    return Mover(roster, calls.send, current, limits)


def make_rebalancer(
    model: ClusterModel,
    current: CurrentPlacement,
    mover: Mover,
    routes: RouteListeners,
    plan: Plan,
) -> Rebalancer:
    """It listens to `routes` from here on, unless it is off."""
    cluster, layers = model.config.cluster, sparse_layers(model.spec)
    window = LoadWindow(len(layers), model.spec.router.num_experts)
    if cluster.rebalance != "off":
        routes.add(window)
    limits = PlanLimits(
        layers=tuple(layers),
        top_k=model.spec.router.top_k,
        num_attention_ranks=cluster.attention_ranks,
        slots=model.slots_per_layer(),
        max_moves=cluster.rebalance_max_moves,
        min_gain=cluster.rebalance_min_gain,
        objective=cluster.rebalance_objective,
    )
    return Rebalancer(
        cluster.rebalance,
        cluster.rebalance_interval_s,
        current,
        window,
        Proposer(limits, plan),
        mover,
    )
