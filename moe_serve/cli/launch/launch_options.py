"""The options of `moe-serve launch`, and the request that every node derives from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moe_serve.cli.options import argument, option, setting_flags, settings
from moe_serve.cli.serve.adapter_options import AdapterOptions
from moe_serve.cli.serve.event_options import EventOptions
from moe_serve.cli.serve.rank_options import RankCounts, RankOptions
from moe_serve.cli.serve.server_options import (
    BatchOptions,
    HttpOptions,
    ListenOptions,
    ModelOptions,
    RunOptions,
    flag_settings,
)
from moe_serve.cluster.control.rank_name import RankName, all_ranks
from moe_serve.cluster.launch.cell_nodes import ranks_of_cells
from moe_serve.cluster.launch.cluster_file import ClusterFile, read_cluster_file
from moe_serve.cluster.launch.deployment import LaunchCommand
from moe_serve.cluster.launch.emit.kubernetes import KubernetesKind
from moe_serve.cluster.launch.environment import NodeFlags, node_flags
from moe_serve.cluster.launch.node_layout import NodeLayout, share_out
from moe_serve.cluster.launch.node_places import MAX_PLACES
from moe_serve.config.cell_config import cell_shapes
from moe_serve.config.sources import LoadedConfig, load_config
from moe_serve.errors import ConfigError

EmitKind = Literal["slurm", "kubernetes", "systemd", "shell"]
Launcher = Literal["ssh", "deepspeed"]
NODES, START, EMIT = "Nodes", "Start from here", "Emit files"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options about the nodes."""

    cluster: Path | None = option(
        None,
        help="YAML file that lists the nodes and the ranks on each node; examples are in "
        "configs/clusters. Default: the ranks are spread evenly over the nodes.",
        rich_help_panel=NODES,
    )
    node_rank: int | None = option(
        None,
        help="Number of this node, counted from 0. Default: detected from torchrun, Slurm,"
        " Kubernetes or DeepSpeed.",
        rich_help_panel=NODES,
    )
    num_nodes: int | None = option(
        None,
        help="Number of nodes. Default: detected in the same way as --node-rank.",
        rich_help_panel=NODES,
    )
    coordinator: str | None = option(
        None,
        help="Address of node 0 as HOST:PORT. Default: detected in the same way as --node-rank.",
        rich_help_panel=NODES,
    )
    join: str | None = option(
        None,
        metavar="HOST:PORT",
        help="Offer this node to a running launch, which can place new cells on it. Give the "
        "address that the launch has as --coordinator.",
        rich_help_panel=NODES,
    )
    node: str | None = option(
        None,
        metavar="NAME",
        help="Name of this node, with --join. Default: its host name.",
        rich_help_panel=NODES,
    )
    places: int | None = option(
        None,
        min=1,
        max=MAX_PLACES,
        help=(
            "Largest number of ranks on this node, with --join. Default: the number of its "
            "accelerators; on a node without accelerators, the number of its cores."
        ),
        rich_help_panel=NODES,
    )
    secret_file: Path | None = option(
        None,
        help="File with the secret that all nodes share. Default: the environment variable"
        " MOE_SERVE_CLUSTER_SECRET.",
        rich_help_panel=NODES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options for starting the nodes from this machine."""

    hostfile: Path | None = option(
        None,
        help="Text file of hosts; this command then starts the nodes on all of them. One host per "
        "line, such as `node-a slots=4`, where slots is the largest number of ranks on the host.",
        rich_help_panel=START,
    )
    launcher: Launcher = option(
        "ssh",
        help="Program that starts the nodes on the hosts in --hostfile.",
        rich_help_panel=START,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """Options for files that start a launch."""

    emit_kind: EmitKind | None = option(
        None,
        "--emit",
        help="Print files that start this launch with the given system, and exit.",
        rich_help_panel=EMIT,
    )
    out: Path | None = option(
        None,
        help="Folder for the files of --emit. Default: the files are printed.",
        rich_help_panel=EMIT,
    )
    name: str | None = option(
        None,
        help="Name of the deployment in the files of --emit. Default: the name in "
        "--cluster, else moe-serve.",
        rich_help_panel=EMIT,
    )
    kubernetes_kind: KubernetesKind = option(
        "leader-worker-set",
        help="Kind of Kubernetes object that --emit kubernetes writes.",
        rich_help_panel=EMIT,
    )
    image: str | None = option(
        None,
        help="Container image in the files of --emit kubernetes. Default: the moe-serve "
        "image of this version.",
        rich_help_panel=EMIT,
    )
    model_claim: str | None = option(
        None,
        help="Name of the Kubernetes PersistentVolumeClaim that holds the model, for "
        "--emit kubernetes. Default: none.",
        rich_help_panel=EMIT,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `launch`."""

    model: str | None = argument(
        None,
        help="Folder of a checkpoint in Hugging Face layout, or the name of a model on a hub: "
        "OWNER/NAME or OWNER/NAME@REVISION. Default: the demonstration model.",
    )
    counts: RankCounts
    ranks: RankOptions
    nodes: NodeOptions
    start: StartOptions
    files: EmitOptions
    compute: ModelOptions
    adapters: AdapterOptions
    batches: BatchOptions
    listen: ListenOptions
    api_key: list[str] | None = option(
        None,
        key="server.api_keys",
        help="@FILE with the API keys that clients must send, one per line; the file is "
        "read on node 0. May be given more than once. Default: no key is required.",
        rich_help_panel="HTTP",
    )
    http: HttpOptions
    events: EventOptions
    run: RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The command line, checked as far as possible without knowing the node."""

    command: LaunchCommand
    cluster: ClusterFile | None
    node: NodeFlags
    settings: Mapping[str, object]  # by key, as the flags set them
    options: LaunchOptions

    def load(self, environ: Mapping[str, str]) -> LoadedConfig:
        """Loads the configuration from flags, environment, cluster file and YAML file. Raises
        ConfigError."""
        ranks = {
            "model.path": self.command.model,
            "cluster.attention_ranks": self.command.attention_ranks,
            "cluster.expert_ranks": self.command.expert_ranks,
        }
        stated = {path: value for path, value in ranks.items() if value is not None}
        loaded = load_config(
            flags={**stated, **self.settings},
            environ=environ,
            file=self.options.run.config_file,
            settings={} if self.cluster is None else self._settings_of(self.cluster),
            settings_source=self.command.cluster_file or "",
        )
        counts = loaded.config.engine.cluster
        has_cells = loaded.config.engine.cells.layout is not None
        if not has_cells and (counts.attention_ranks < 1 or counts.expert_ranks < 1):
            raise ConfigError(
                "a launch needs --attention-ranks and --expert-ranks, at least 1 each, "
                "or --cells, or --cluster."
            )
        return loaded

    def _settings_of(self, cluster: ClusterFile) -> dict[str, object]:
        layout, settings = cluster.layout, dict[str, object]()
        has_cells = self.options.counts.cells is not None or "cells.layout" in cluster.settings
        if not has_cells:
            settings["cluster.attention_ranks"] = layout.num_ranks("attention")
            settings["cluster.expert_ranks"] = layout.num_ranks("expert")
        if cluster.model is not None:
            settings["model.path"] = cluster.model
        return settings | cluster.settings

    def layout(self, loaded: LoadedConfig, num_nodes: int) -> NodeLayout:
        ranks = wanted_ranks(loaded)
        if self.cluster is None:
            return share_out(ranks, num_nodes)
        layout = self.cluster.layout
        placed = (layout.num_ranks("attention"), layout.num_ranks("expert"))
        wanted = tuple(sum(rank.role == role for rank in ranks) for role in ("attention", "expert"))
        if placed != wanted:
            raise ConfigError(
                f"{self.command.cluster_file} places {placed[0]} attention and {placed[1]} "
                f"expert ranks, but the flags request {wanted[0]} and {wanted[1]}: leave the "
                "flags out, or make the numbers equal."
            )
        return layout

    def devices(self) -> dict[RankName, int]:
        """Returns the accelerators that the cluster file assigns, by rank."""
        nodes = () if self.cluster is None else self.cluster.nodes
        return {
            rank: device
            for node in nodes
            for rank, device in zip(node.ranks, node.devices, strict=False)
        }


def wanted_ranks(loaded: LoadedConfig) -> list[RankName]:
    """Returns all ranks of a configuration, as the nodes of a launch know them."""
    engine = loaded.config.engine
    shapes = cell_shapes(engine)
    if shapes:
        return ranks_of_cells(shapes)
    return all_ranks(engine.cluster.attention_ranks, engine.cluster.expert_ranks)


def launch_request(options: LaunchOptions) -> LaunchRequest:
    """Builds the request from the options of `launch`. Raises ConfigError."""
    nodes, run = options.nodes, options.run
    if nodes.join is None and (nodes.node, nodes.places) != (None, None):
        raise ConfigError("--node and --places belong to --join HOST:PORT.")
    path = nodes.cluster
    cluster = None if path is None else read_cluster_file(path)
    if any(not key.startswith("@") for key in options.api_key or ()):
        raise ConfigError(
            "launch takes API keys only from a file, because other users of a node can see "
            "its command line: give --api-key @FILE."
        )
    counts = replace(options.counts, attention_ranks=None, expert_ranks=None)
    rest = replace(options, counts=counts)  # the nodes' part sets the others
    flags = setting_flags(rest)
    if run.config_file is not None:
        flags += ("--config", str(run.config_file.absolute()))
    if run.print_config:  # with --hostfile every host prints its own configuration
        flags += ("--print-config",)
    command = LaunchCommand(
        model=options.model,
        attention_ranks=options.counts.attention_ranks,
        expert_ranks=options.counts.expert_ranks,
        cluster_file=None if path is None else str(path.absolute()),
        secret_file=None if nodes.secret_file is None else str(nodes.secret_file.absolute()),
        serve_flags=flags,
    )
    return LaunchRequest(
        command=command,
        cluster=cluster,
        node=node_flags(nodes.node_rank, nodes.num_nodes, nodes.coordinator),
        settings=flag_settings(settings(rest)),
        options=options,
    )
