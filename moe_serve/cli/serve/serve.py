"""`moe-serve serve`: load a model and answer over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moe_serve.cli.serve.first_log import begin_log
from moe_serve.cli.serve.listening import check_can_listen, check_is_guarded
from moe_serve.cli.serve.setting_flags import SERVE_KEYS, given_flags
from moe_serve.config.sources import LoadedConfig, load_config

MODEL, LIMITS, RANKS, HTTP, RUN = "Model", "Limits", "Ranks", "HTTP", "Run"

Model = Annotated[
    str | None,
    typer.Argument(help="A folder in Hugging Face layout. Without it: the demonstration model."),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=MODEL)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest prompt and answer together, in tokens.", rich_help_panel=MODEL),
]
NumThreads = Annotated[
    int | None, typer.Option(help="CPU threads for the math.", rich_help_panel=MODEL)
]
ServedModelName = Annotated[
    str | None, typer.Option(help="The name that requests ask for.", rich_help_panel=MODEL)
]
ExpertMemory = Annotated[
    str | None,
    typer.Option(
        help="Routed experts that stay in memory, such as 2GiB; others are read when needed.",
        rich_help_panel=LIMITS,
    ),
]
NumPages = Annotated[
    int | None, typer.Option(help="KV pages of 16 tokens each.", rich_help_panel=LIMITS)
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Sequences in one step.", rich_help_panel=LIMITS)
]
MaxBatchedTokens = Annotated[
    int | None, typer.Option(help="Tokens in one step.", rich_help_panel=LIMITS)
]
MaxQueuedRequests = Annotated[
    int | None,
    typer.Option(help="Requests that may wait; more get status 429.", rich_help_panel=LIMITS),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(help="Micro-batches of a step: auto, or 1 to 4.", rich_help_panel=LIMITS),
]
BatchPolicy = Annotated[
    str | None,
    typer.Option(
        help="Who runs with whom: fifo, balanced or expert-aware.", rich_help_panel=LIMITS
    ),
]
Predictor = Annotated[
    str | None,
    typer.Option(help="A folder of trained routing predictors.", rich_help_panel=LIMITS),
]
AttentionRanks = Annotated[
    int | None,
    typer.Option(help="Attention ranks, each a process. 0: one process.", rich_help_panel=RANKS),
]
ExpertRanks = Annotated[
    int | None, typer.Option(help="Expert ranks, each a process.", rich_help_panel=RANKS)
]
AttentionTp = Annotated[
    int | None,
    typer.Option(
        help="Processes of each attention rank, which share its heads.", rich_help_panel=RANKS
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        help="A file: which expert on which rank. Default: equal runs.", rich_help_panel=RANKS
    ),
]
TimelineFile = Annotated[
    str | None,
    typer.Option(
        "--timeline", help="Record every rank's stages into this file.", rich_help_panel=RANKS
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", rich_help_panel=HTTP)]
Port = Annotated[
    int | None, typer.Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=HTTP)
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(help="A key to ask for, or @FILE of keys. Repeatable.", rich_help_panel=HTTP),
]
MetricsAlias = Annotated[
    str | None,
    typer.Option(
        help="Names that /metrics has beside its own: none or vllm.", rich_help_panel=HTTP
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        help="URL of a collector of OpenTelemetry traces (OTLP over HTTP).", rich_help_panel=HTTP
    ),
]
SslCertfile = Annotated[
    str | None,
    typer.Option(help="Certificate chain (PEM) for HTTPS.", rich_help_panel=HTTP),
]
SslKeyfile = Annotated[
    str | None,
    typer.Option(help="Its private key (PEM), if it is not in there.", rich_help_panel=HTTP),
]
LogFormat = Annotated[
    str | None, typer.Option(help="Of the log: text or json.", rich_help_panel=RUN)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file, see configs/serve.yaml.", rich_help_panel=RUN),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print the effective configuration and its sources, and leave.",
        rich_help_panel=RUN,
    ),
]


def serve(
    context: typer.Context,
    model: Model = None,
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
    attention_ranks: AttentionRanks = None,
    expert_ranks: ExpertRanks = None,
    attention_tp: AttentionTp = None,
    placement: Placement = None,
    timeline: TimelineFile = None,
    host: Host = None,
    port: Port = None,
    api_key: ApiKey = None,
    metrics_alias: MetricsAlias = None,
    otlp_traces_endpoint: OtlpTracesEndpoint = None,
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    log_format: LogFormat = None,
    config_file: ConfigFile = None,
    print_config: PrintConfig = False,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    A flag wins over the environment (MOE_SERVE_SERVER_PORT=8001), and that over the YAML file.
    """
    given = given_flags(context.params, SERVE_KEYS)
    settings = {SERVE_KEYS[name]: value for name, value in given.items()}
    begin_log(settings, os.environ, config_file)
    _run(load_config(flags=settings, environ=os.environ, file=config_file), print_config)


def _run(loaded: LoadedConfig, has_to_print: bool) -> None:
    if has_to_print:
        typer.echo(loaded.to_yaml(), nl=False)
        return
    check_is_guarded(loaded.config.server)
    check_can_listen(loaded.config.server)

    # Only now what is heavy: `--help`, a typing error and a taken port must answer at once.
    from moe_serve.cli.serve.service import run_service

    run_service(loaded.config, settings=loaded.entries)
