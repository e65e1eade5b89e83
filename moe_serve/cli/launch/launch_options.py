"""The options of `moe-serve launch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_serve.cli.options import argument, option
from moe_serve.cli.serve.server_options import (
    BatchOptions,
    HttpOptions,
    ListenOptions,
    ModelOptions,
    RankCounts,
    RankOptions,
    RunOptions,
)
from moe_serve.cluster.launch.emit.kubernetes import KubernetesKind

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
        help="Folder of a checkpoint in Hugging Face layout. Default: the demonstration model.",
    )
    counts: RankCounts
    ranks: RankOptions
    nodes: NodeOptions
    start: StartOptions
    files: EmitOptions
    compute: ModelOptions
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
    run: RunOptions
