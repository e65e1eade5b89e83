"""The coordinator's view of the model before any rank has loaded it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experts.placement.placement_error import PlacementError
from experts.placement.plan_file import read_placement
from experts.placement.problem.placement import Placement, contiguous
from moe_serve.cache.page_key import model_identity
from moe_serve.cluster.control.adapter_messages import LoadAdapter
from moe_serve.cluster.control.epoch import sparse_layers
from moe_serve.cluster.control.messages import Configure
from moe_serve.cluster.control.parcel_messages import ParcelSetup
from moe_serve.cluster.control.rank_name import RankName, all_ranks
from moe_serve.cluster.members.current_placement import PlacementVersion
from moe_serve.config.sections import ClusterConfig, EngineConfig
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.errors import ConfigError
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.tensor_shard import check_shards
from moe_serve.pipeline.exchange.row_split import is_broadcast_worth

_TURNS = "round-robin"  # depends on the row's index and the expert only


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """A checkpoint, and how a configuration lays it out on ranks."""

    config: EngineConfig
    checkpoint: ServedCheckpoint
    placement: Placement  # at the start
    weights: str  # the hash that every rank's checkpoint must have
    num_threads: int  # per process

    @classmethod
    def read(cls, config: EngineConfig) -> ClusterModel:
        """Reads config.json and samples of the weights. Raises ConfigError, CheckpointError."""
        (model,) = cls.read_cells([config])
        return model

    @classmethod
    def read_cells(cls, configs: Sequence[EngineConfig]) -> list[ClusterModel]:
        """Reads a model once for cells that share this host and differ in their ranks only."""
        checkpoint = ServedCheckpoint.read(configs[0].model)
        for config in configs:
            _check_ranks(checkpoint.spec, config.cluster)
        share = _threads_each(sum(_num_processes(config.cluster) for config in configs))
        weights = model_identity(checkpoint.folder).hex()
        return [
            cls(
                config=config,
                checkpoint=checkpoint,
                placement=placement_of(config.cluster, checkpoint.spec),
                weights=weights,
                num_threads=config.model.num_threads or share,
            )
            for config in configs
        ]

    def for_cell(self, config: EngineConfig, num_others: int) -> ClusterModel:
        """Returns the same model for a further cell, whose ranks must find the same weights.
        `num_others` counts the processes of other cells on this host. Raises ConfigError.
        """
        _check_ranks(self.spec, config.cluster)
        share = _threads_each(num_others + _num_processes(config.cluster))
        return replace(
            self,
            config=config,
            placement=placement_of(config.cluster, self.spec),
            num_threads=config.model.num_threads or share,
        )

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def ranks(self) -> list[RankName]:
        return all_ranks(self.config.cluster.attention_ranks, self.config.cluster.expert_ranks)

    @property
    def is_routing_on_experts(self) -> bool:
        """Returns True if expert ranks route, as configured. "auto" chooses the side that sends
        fewer bytes, if both may route."""
        cluster, spec = self.config.cluster, self.spec
        if cluster.router != "auto":
            return cluster.router == "experts"
        if cluster.replica_choice != _TURNS:
            return False
        is_wide = cluster.wire_dtype == "auto" and self.config.model.dtype == "float32"
        value_bytes = 1 if cluster.wire_dtype == "fp8" else 4 if is_wide else 2
        row_bytes = spec.width * value_bytes
        return is_broadcast_worth(row_bytes, spec.router.top_k, cluster.expert_ranks)

    def slots_per_layer(self) -> list[int]:
        """Returns, for each expert rank, the largest number of copies that it may hold in a layer,
        whichever experts move.
        """
        return slots_per_layer(self.placement, self.config.cluster)

    def configure(
        self,
        name: RankName,
        in_force: PlacementVersion,
        arena: str = "",
        parcels: ParcelSetup | None = None,
        adapters: Sequence[LoadAdapter] = (),
    ) -> Configure:
        """Returns the order that tells a rank what to load. `arena` is the path of the memory tier.
        `parcels` says how KV pages reach attention ranks, if they do.
        """
        is_expert = name.role == "expert"
        return Configure(
            config=self.config,
            folder=str(self.folder),
            num_threads=self.num_threads,
            held=in_force.placement.held_by(name.index) if is_expert else {},
            router_on_experts=self.is_routing_on_experts,
            is_recording=self.config.pipeline.timeline is not None,
            placement=in_force.number,
            num_slots=num_slots(self.placement, self.config, name.index) if is_expert else 0,
            arena="" if is_expert else arena,
            parcels=None if is_expert else parcels,
            adapters=adapters,
        )


def _num_processes(cluster: ClusterConfig) -> int:
    return cluster.attention_ranks * cluster.attention_tp + cluster.expert_ranks


def _threads_each(num_processes: int) -> int:
    """Returns an equal share of this host's cores."""
    return max(1, (os.cpu_count() or 1) // num_processes)


def _check_ranks(spec: ModelSpec, cluster: ClusterConfig) -> None:
    _check_has_experts(spec, cluster)
    check_shards(spec, cluster.attention_tp)
    check_replica_choice(cluster)


def _check_has_experts(spec: ModelSpec, cluster: ClusterConfig) -> None:
    if not any(layer.is_sparse for layer in spec.layers):
        raise ConfigError(
            f"cluster.expert_ranks is {cluster.expert_ranks}, but none of the {spec.num_layers} "
            "layers of this checkpoint has routed experts: serve it in one process (attention_ranks"
            " and expert_ranks 0)."
        )


def slots_per_layer(placement: Placement, cluster: ClusterConfig) -> list[int]:
    """Computes `ClusterModel.slots_per_layer` from the placement at the start."""
    held = [placement.held_by(rank) for rank in range(placement.num_ranks)]
    return [max(map(len, of_rank.values())) + cluster.rebalance_spare_slots for of_rank in held]


def num_slots(placement: Placement, config: EngineConfig, rank: int) -> int:
    """Returns the slots of an expert rank: for its experts of all layers and for one round of
    copies.

    It is 0 where experts do not move, or where an expert memory manages them.
    """
    cluster = config.cluster
    if cluster.rebalance == "off" or config.model.expert_memory_bytes is not None:
        return 0
    each = slots_per_layer(placement, cluster)[rank]
    return len(placement.ranks_of) * each + cluster.rebalance_max_moves


def check_replica_choice(cluster: ClusterConfig) -> None:
    """Raises ConfigError if the choice of the copy that serves a row would depend on other rows on
    each expert rank.

    Routers that differ in a last bit would then disagree about those other rows.
    """
    if cluster.router == "experts" and cluster.replica_choice != _TURNS:
        raise ConfigError(
            f"cluster.replica_choice '{cluster.replica_choice}' depends on all rows of a "
            "micro-batch, so all routing ranks must agree on every row, but with cluster.router "
            f"'experts' each expert rank routes by itself: use '{_TURNS}', or let attention ranks "
            "route (cluster.router 'attention' or 'auto')."
        )


def placement_of(cluster: ClusterConfig, spec: ModelSpec) -> Placement:
    """Returns the placement of the file, or equal contiguous runs of experts. Raises
    ConfigError."""
    layers, num_experts = sparse_layers(spec), spec.router.num_experts
    if cluster.expert_ranks > num_experts:
        raise ConfigError(
            f"{cluster.expert_ranks} expert ranks are more than the {num_experts} experts of a "
            f"layer, and each needs one: use 1 to {num_experts} (cluster.expert_ranks, or E in the "
            "layout of cells)."
        )
    try:
        if cluster.placement is None:
            return contiguous(layers, num_experts, cluster.expert_ranks)
        placement = read_placement(Path(cluster.placement).expanduser())
        if placement.num_experts == num_experts and placement.num_ranks != cluster.expert_ranks:
            raise ConfigError(
                f"cluster.placement: {cluster.placement} is for {placement.num_ranks} expert ranks "
                f"and cluster.expert_ranks is {cluster.expert_ranks}: make them the same."
            )
        placement.check_fits(layers, num_experts, cluster.expert_ranks)
    except PlacementError as error:
        raise ConfigError(f"cluster.placement: {error}") from error
    return placement
