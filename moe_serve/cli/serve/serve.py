"""`moe-serve serve`: loads a model and answers over HTTP."""

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
    typer.Argument(
        help="Folder of a checkpoint in Hugging Face layout. Default: the demonstration model."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Number format of weights and activations: auto (the checkpoint's own), "
        "float32, bfloat16 or float16. Default: auto.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device to compute on: auto (cuda if there is a CUDA GPU, else cpu), cpu or "
        "cuda. Default: auto.",
        rich_help_panel=MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Largest number of tokens in a prompt and its answer together. Default: the "
        "checkpoint's context length.",
        rich_help_panel=MODEL,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        help="Number of CPU threads for computing, in each process. Default: torch chooses.",
        rich_help_panel=MODEL,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="Model name that requests give in their `model` field. Default: the name of "
        "the checkpoint's folder.",
        rich_help_panel=MODEL,
    ),
]
ExpertMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for expert weights in each process that holds experts, in bytes or as a "
        "size such as 2GiB. Experts that do not fit are read from disk when needed. "
        "Default: all experts stay in memory.",
        rich_help_panel=LIMITS,
    ),
]
NumPages = Annotated[
    int | None,
    typer.Option(
        help="Size of the KV cache of each attention rank, in pages of 16 tokens. Default: "
        "enough for --max-num-seqs requests of average length.",
        rich_help_panel=LIMITS,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        help="Largest number of sequences that one step of an attention rank computes. Default: "
        "64.",
        rich_help_panel=LIMITS,
    ),
]
MaxBatchedTokens = Annotated[
    int | None,
    typer.Option(
        help="Largest number of tokens that one step of an attention rank computes; longer "
        "prompts are split into chunks. Default: 1024.",
        rich_help_panel=LIMITS,
    ),
]
MaxQueuedRequests = Annotated[
    int | None,
    typer.Option(
        help="Largest number of waiting requests; further requests get HTTP status 429. "
        "Default: 256.",
        rich_help_panel=LIMITS,
    ),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(
        help="Number of micro-batches to split each step into: 1 to 4, or auto (1 without "
        "expert ranks; with expert ranks, chosen from measured times). Default: auto.",
        rich_help_panel=LIMITS,
    ),
]
BatchPolicy = Annotated[
    str | None,
    typer.Option(
        help="Rule that chooses the sequences of a step and splits them into micro-batches: "
        "fifo (order of arrival), balanced (also considers context lengths) or "
        "expert-aware (also considers the predicted experts). Default: fifo.",
        rich_help_panel=LIMITS,
    ),
]
Predictor = Annotated[
    str | None,
    typer.Option(
        help="Folder of routing predictors, written by `moe-serve predictor train`. Default: no "
        "trained predictors; the experts of a request are predicted from those it has "
        "used so far.",
        rich_help_panel=LIMITS,
    ),
]
AttentionRanks = Annotated[
    int | None,
    typer.Option(
        help="Number of attention ranks. Each one computes attention for its own requests and "
        "has its own KV cache. With 0 here and in --expert-ranks, one process does "
        "everything. Default: 0.",
        rich_help_panel=RANKS,
    ),
]
ExpertRanks = Annotated[
    int | None,
    typer.Option(
        help="Number of expert ranks. Each one is a process that holds and computes some of the "
        "experts. Default: 0.",
        rich_help_panel=RANKS,
    ),
]
AttentionTp = Annotated[
    int | None,
    typer.Option(
        help="Number of processes that share the attention heads of each attention rank (tensor "
        "parallelism). Default: 1.",
        rich_help_panel=RANKS,
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        help="JSON file that assigns experts to expert ranks, written by `moe-serve place "
        "--out`. Default: each rank holds an equal number of consecutive experts.",
        rich_help_panel=RANKS,
    ),
]
TimelineFile = Annotated[
    str | None,
    typer.Option(
        "--timeline",
        help="File for a timeline of what every rank does; `moe-serve timeline` reads it. "
        "Default: no timeline is written.",
        rich_help_panel=RANKS,
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        help="Address to listen on. Addresses that other machines can reach require --api-key. "
        "Default: 127.0.0.1.",
        rich_help_panel=HTTP,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        help="Port to listen on; 0 chooses a free port. Default: 8000.", rich_help_panel=HTTP
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        help="API key that clients must send, or @FILE with one key per line. May be given"
        " more than once. Default: no key is required.",
        rich_help_panel=HTTP,
    ),
]
MetricsAlias = Annotated[
    str | None,
    typer.Option(
        help="Additional names in /metrics: none, or vllm (also report the values under vLLM's "
        "metric names). Default: none.",
        rich_help_panel=HTTP,
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        help="URL of an OpenTelemetry collector that receives request traces (OTLP over "
        "HTTP), such as http://127.0.0.1:4318/v1/traces. Default: no traces are sent.",
        rich_help_panel=HTTP,
    ),
]
SslCertfile = Annotated[
    str | None,
    typer.Option(
        help="PEM file with the certificate chain; switches on HTTPS. Default: plain HTTP.",
        rich_help_panel=HTTP,
    ),
]
SslKeyfile = Annotated[
    str | None,
    typer.Option(
        help="PEM file with the certificate's private key. Default: the key is in --ssl-certfile.",
        rich_help_panel=HTTP,
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        help="Format of the log on standard error: text or json (one object per line). "
        "Default: text.",
        rich_help_panel=RUN,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with the configuration; configs/serve.yaml lists every key.",
        rich_help_panel=RUN,
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print the effective configuration with the source of each value, and exit.",
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

    Settings come from flags, from environment variables such as MOE_SERVE_SERVER_PORT=8001 and from
    the YAML file given with --config. Flags override environment variables, and environment
    variables override the file.
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

    # Imported late, as it is slow: `--help`, typing errors and a taken port must answer at once.
    from moe_serve.cli.serve.service import run_service

    run_service(loaded.config, settings=loaded.entries)
