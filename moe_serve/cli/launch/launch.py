"""`moe-serve launch`: attention and expert ranks on many nodes, by the same command on each."""

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
    typer.Option(help="YAML file of nodes and ranks, see configs/clusters.", rich_help_panel=NODES),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        help="Number of this node, from 0. Default: from torchrun, Slurm, Kubernetes, DeepSpeed.",
        rich_help_panel=NODES,
    ),
]
NumNodes = Annotated[
    int | None, typer.Option(help="Number of nodes; found likewise.", rich_help_panel=NODES)
]
Coordinator = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of node 0; found likewise.", rich_help_panel=NODES),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the cluster's secret. Default: MOE_SERVE_CLUSTER_SECRET.",
        rich_help_panel=NODES,
    ),
]
Hostfile = Annotated[
    Path | None,
    typer.Option(help="Start it on all these hosts: `host slots=4`.", rich_help_panel=START),
]
LauncherName = Annotated[
    Launcher, typer.Option(help="How hosts are reached.", rich_help_panel=START)
]
Emit = Annotated[
    EmitKind | None,
    typer.Option("--emit", help="Print files for this, and leave.", rich_help_panel=EMIT),
]
Out = Annotated[
    Path | None, typer.Option(help="Write them into this folder.", rich_help_panel=EMIT)
]
Name = Annotated[
    str | None, typer.Option(help="What the deployment is called.", rich_help_panel=EMIT)
]
Kind = Annotated[KubernetesKind, typer.Option(help="For Kubernetes.", rich_help_panel=EMIT)]
Image = Annotated[
    str | None,
    typer.Option(help="Container image. Default: ours of this version.", rich_help_panel=EMIT),
]
ModelClaim = Annotated[
    str | None,
    typer.Option(help="PersistentVolumeClaim with the model.", rich_help_panel=EMIT),
]
ApiKeyFile = Annotated[
    list[str] | None,
    typer.Option(help="@FILE of keys to ask for, on node 0. Repeatable.", rich_help_panel="HTTP"),
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
    """Serve a model on many nodes: run the same command on each.

    Node 0 serves HTTP and coordinates; the others start the ranks that it asks for.
    """
    begin_log({} if log_format is None else {"log.format": log_format}, os.environ, config_file)
    request = launch_request(context.params)
    if request.emit_kind is not None:
        emit(request, os.environ)
    elif request.hostfile is not None:
        raise typer.Exit(run_from_here(request, os.environ))
    else:
        # Only now what is heavy: `--help` and a typing error must answer at once.
        from moe_serve.cli.launch.launch_node import run_node

        run_node(request, os.environ, has_to_print=print_config)
