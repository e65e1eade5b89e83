"""`moe-serve launch`: serves with attention and expert ranks on many nodes, by the same command on
each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moe_serve.cli.launch.launch_emit import emit
from moe_serve.cli.launch.launch_hosts import run_from_here
from moe_serve.cli.launch.launch_request import EmitKind, Launcher, launch_request
from moe_serve.cli.serve.first_log import begin_log
from moe_serve.cli.serve.serve import (
    AttentionRanks,
    AttentionTp,
    BatchPolicy,
    ConfigFile,
    Device,
    Dtype,
    ExpertMemory,
    ExpertRanks,
    Host,
    LogFormat,
    MaxBatchedTokens,
    MaxModelLen,
    MaxNumSeqs,
    MaxQueuedRequests,
    MetricsAlias,
    MicroBatches,
    Model,
    NumPages,
    NumThreads,
    OtlpTracesEndpoint,
    Placement,
    Port,
    Predictor,
    PrintConfig,
    ServedModelName,
    SslCertfile,
    SslKeyfile,
    TimelineFile,
)
from moe_serve.cluster.launch.emit.kubernetes import KubernetesKind

NODES, START, EMIT = "Nodes", "Start from here", "Emit files"

Cluster = Annotated[
    Path | None,
    typer.Option(
        help="YAML file that lists the nodes and the ranks on each node; examples are in "
        "configs/clusters. Default: the ranks are spread evenly over the nodes.",
        rich_help_panel=NODES,
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        help="Number of this node, counted from 0. Default: detected from torchrun, Slurm,"
        " Kubernetes or DeepSpeed.",
        rich_help_panel=NODES,
    ),
]
NumNodes = Annotated[
    int | None,
    typer.Option(
        help="Number of nodes. Default: detected in the same way as --node-rank.",
        rich_help_panel=NODES,
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="Address of node 0 as HOST:PORT. Default: detected in the same way as --node-rank.",
        rich_help_panel=NODES,
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that all nodes share. Default: the environment variable"
        " MOE_SERVE_CLUSTER_SECRET.",
        rich_help_panel=NODES,
    ),
]
Hostfile = Annotated[
    Path | None,
    typer.Option(
        help="Text file of hosts; this command then starts the nodes on all of them. One host "
        "per line, such as `node-a slots=4`, where slots is the largest number of ranks on "
        "the host.",
        rich_help_panel=START,
    ),
]
LauncherName = Annotated[
    Launcher,
    typer.Option(
        help="Program that starts the nodes on the hosts in --hostfile.", rich_help_panel=START
    ),
]
Emit = Annotated[
    EmitKind | None,
    typer.Option(
        "--emit",
        help="Print files that start this launch with the given system, and exit.",
        rich_help_panel=EMIT,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the files of --emit. Default: the files are printed.",
        rich_help_panel=EMIT,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        help="Name of the deployment in the files of --emit. Default: the name in "
        "--cluster, else moe-serve.",
        rich_help_panel=EMIT,
    ),
]
Kind = Annotated[
    KubernetesKind,
    typer.Option(
        help="Kind of Kubernetes object that --emit kubernetes writes.", rich_help_panel=EMIT
    ),
]
Image = Annotated[
    str | None,
    typer.Option(
        help="Container image in the files of --emit kubernetes. Default: the moe-serve "
        "image of this version.",
        rich_help_panel=EMIT,
    ),
]
ModelClaim = Annotated[
    str | None,
    typer.Option(
        help="Name of the Kubernetes PersistentVolumeClaim that holds the model, for "
        "--emit kubernetes. Default: none.",
        rich_help_panel=EMIT,
    ),
]
ApiKeyFile = Annotated[
    list[str] | None,
    typer.Option(
        help="@FILE with the API keys that clients must send, one per line; the file is "
        "read on node 0. May be given more than once. Default: no key is required.",
        rich_help_panel="HTTP",
    ),
]


def launch(
    context: typer.Context,
    model: Model = None,
    attention_ranks: AttentionRanks = None,
    expert_ranks: ExpertRanks = None,
    attention_tp: AttentionTp = None,
    placement: Placement = None,
    timeline: TimelineFile = None,
    cluster: Cluster = None,
    node_rank: NodeRank = None,
    num_nodes: NumNodes = None,
    coordinator: Coordinator = None,
    secret_file: SecretFile = None,
    hostfile: Hostfile = None,
    launcher: LauncherName = "ssh",
    emit_kind: Emit = None,
    out: Out = None,
    name: Name = None,
    kubernetes_kind: Kind = "leader-worker-set",
    image: Image = None,
    model_claim: ModelClaim = None,
    dtype: Dtype = None,
    device: Device = None,
    max_model_len: MaxModelLen = None,
    num_threads: NumThreads = None,
    served_model_name: ServedModelName = None,
    expert_memory: ExpertMemory = None,
    num_pages: NumPages = None,
    max_num_seqs: MaxNumSeqs = None,
    max_batched_tokens: MaxBatchedTokens = None,
    max_queued_requests: MaxQueuedRequests = None,
    micro_batches: MicroBatches = None,
    batch_policy: BatchPolicy = None,
    predictor: Predictor = None,
    host: Host = None,
    port: Port = None,
    api_key: ApiKeyFile = None,
    metrics_alias: MetricsAlias = None,
    otlp_traces_endpoint: OtlpTracesEndpoint = None,
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    log_format: LogFormat = None,
    config_file: ConfigFile = None,
    print_config: PrintConfig = False,
) -> None:
    """Serve a model on several nodes: run the same command on each node.

    Node 0 serves HTTP and coordinates. The other nodes start the ranks that node 0 asks for.
    """
    begin_log({} if log_format is None else {"log.format": log_format}, os.environ, config_file)
    request = launch_request(context.params)
    if request.emit_kind is not None:
        emit(request, os.environ)
    elif request.hostfile is not None:
        raise typer.Exit(run_from_here(request, os.environ))
    else:
        # Imported late, as it is slow: `--help` and typing errors must answer at once.
        from moe_serve.cli.launch.launch_node import run_node

        run_node(request, os.environ, has_to_print=print_config)
