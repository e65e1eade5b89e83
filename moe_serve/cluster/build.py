"""From a configuration to a cluster of ranks and the engine that drives them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from experts.placement.errors import PlacementError
from experts.placement.plan import Placement, contiguous
from experts.placement.plan_file import read_placement
from moe_serve.cache.model_identity import model_identity
from moe_serve.cluster.cluster_engine import ClusterEngine
from moe_serve.cluster.coordinator import Coordinator
from moe_serve.cluster.listener import Listener
from moe_serve.cluster.membership import Membership
from moe_serve.cluster.messages import Configure, Loaded, Report
from moe_serve.cluster.rank_name import RankName, all_ranks
from moe_serve.cluster.rank_starter import LocalStarter, RankStarter
from moe_serve.cluster.remote_executor import RemoteExecutor
from moe_serve.cluster.roster import Roster
from moe_serve.cluster.secret import ClusterSecret, new_secret, read_secret
from moe_serve.cluster.store import serve_store
from moe_serve.config import PAGE_SIZE, ClusterConfig, EngineConfig
from moe_serve.engine.build import BuiltEngine, eos_token_ids_of, max_model_len_of, model_folder
from moe_serve.engine.engine import Engine
from moe_serve.engine.layout import Layout
from moe_serve.errors import ConfigError
from moe_serve.model.families import family_of
from moe_serve.model.hf_config import HFConfig
from moe_serve.model.loader import LoadProgress
from moe_serve.model.spec import ModelSpec

MakeStarter = Callable[[str, int, ClusterSecret, int], RankStarter]


def build_cluster(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    make_starter: MakeStarter = LocalStarter,
) -> BuiltEngine:
    """Start the ranks, wait until they have loaded, and make the engine.

    Raises ConfigError, CheckpointError or ClusterError with what keeps a rank from serving.
    """
    clock = time.monotonic()
    folder, cluster = model_folder(config.model), config.cluster
    spec = read_spec(folder)
    placement = placement_of(cluster, spec)
    weights = weights_hash(folder)
    secret = read_secret(os.environ) or new_secret()
    roster = Roster(all_ranks(cluster.attention_ranks, cluster.expert_ranks))
    num_threads = config.model.num_threads or max(1, (os.cpu_count() or 1) // len(roster.states))

    def configure(name: RankName) -> Configure:
        return Configure(
            config=config,
            folder=str(folder),
            num_threads=num_threads,
            held=placement.held_by(name.index) if name.role == "expert" else {},
            router_on_experts=is_routing_on_experts(cluster, spec),
            is_recording=False,
        )

    membership = Membership(roster, configure, weights, cluster.heartbeat_s)
    decoder = msgspec.msgpack.Decoder(Report)
    listener: Listener[Any] = Listener(
        cluster.host, cluster.port, secret, decoder, membership.admit
    )
    stores = [serve_store(cluster.host, 0, cluster.timeout_s)]  # served as long as it is held

    def close() -> None:
        membership.close()
        listener.close()
        del stores[:]

    starter = make_starter(cluster.host, listener.port, secret, num_threads)
    try:
        membership.start(starter, cluster.start_timeout_s, progress)
    except BaseException:
        close()
        raise
    coordinator = Coordinator(
        membership,
        placement,
        store_host=cluster.host,
        store_port=stores[0].port,
        timeout_s=cluster.timeout_s,
        start_timeout_s=cluster.start_timeout_s,
    )
    first = roster["attention-0"].loaded
    assert first is not None, "the attention ranks have loaded"
    max_model_len = max_model_len_of(config.model, spec)
    identity = model_identity(folder, first.dtype, first.kernels)

    def make_engine(executor: RemoteExecutor, ids: Any) -> Engine:
        loaded = roster[executor.name].loaded
        assert loaded is not None, f"{executor.name} has not loaded"
        return Engine(
            executor,
            scheduler=config.scheduler,
            num_pages=loaded.num_pages,
            micro_batches=1,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids_of(folder, spec),
            model_identity=identity,
            has_prefix_cache=config.cache.prefix_cache,
            ids=ids,
        )

    try:
        engine = ClusterEngine(coordinator, make_engine, _chooser(config), close)
    except BaseException:
        close()
        raise
    layout = _layout(config, folder, spec, first, num_threads, time.monotonic() - clock)
    return BuiltEngine(engine, layout, spec)


def read_spec(folder: Path) -> ModelSpec:
    """The model's shape from its config.json; no weights are read."""
    config = HFConfig.read(folder)
    return family_of(config).read_spec(config.text())


def weights_hash(folder: Path) -> str:
    """What ranks prove their checkpoint with."""
    return model_identity(folder).hex()


def placement_of(cluster: ClusterConfig, spec: ModelSpec) -> Placement:
    """Which expert ranks hold which expert: the file's, or equal runs. Raises ConfigError."""
    layers = [index for index, layer in enumerate(spec.layers) if layer.is_sparse]
    num_experts, num_ranks = spec.router.num_experts, cluster.expert_ranks
    try:
        if cluster.placement is None:
            return contiguous(layers, num_experts, num_ranks)
        placement = read_placement(Path(cluster.placement).expanduser())
        placement.check_fits(layers, num_experts, num_ranks)
    except PlacementError as error:
        raise ConfigError(f"cluster.placement: {error}") from error
    return placement


def is_routing_on_experts(cluster: ClusterConfig, spec: ModelSpec) -> bool:
    """auto: the side that moves fewer bytes. A row goes to min(K, E) ranks at most when it is
    routed first, and to all E when not; sums come back from those that have a part in it."""
    if cluster.router != "auto":
        return cluster.router == "experts"
    return False  # with E ranks, rows to min(K, E) of them are never more than rows to all


def _chooser(config: EngineConfig) -> Any:
    cuts = config.pipeline.micro_batches

    def choose(num_sequences: Sequence[int]) -> int:
        most = max(num_sequences, default=1)
        return min(most, 2 if cuts == "auto" else cuts)

    return choose


def _layout(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    first: Loaded,
    num_threads: int,
    seconds: float,
) -> Layout:
    cuts, ranks = config.pipeline.micro_batches, config.cluster.attention_ranks
    return Layout(
        folder=folder,
        family=spec.family,
        num_layers=spec.num_layers,
        num_experts=spec.router.num_experts,
        top_k=spec.router.top_k,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len_of(config.model, spec),
        dtype=first.dtype,
        device=first.device,
        kernels=first.kernels,
        weight_format=first.weight_format,
        num_threads=num_threads,
        num_pages=first.num_pages * ranks,
        page_size=PAGE_SIZE,
        kv_bytes=first.kv_bytes * ranks,
        micro_batches=4 if cuts == "auto" else cuts,
        load_seconds=seconds,
        attention_ranks=ranks,
        expert_ranks=config.cluster.expert_ranks,
    )
