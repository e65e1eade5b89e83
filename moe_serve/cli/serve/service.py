"""Serves in one process: loads, listens, prints the ready message and serves until told to stop.

This module imports everything heavy, so `serve` imports it only when it has something to serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from fastapi import FastAPI
from rich.console import Console

from moe_serve.cli.console import optional_output
from moe_serve.cli.serve.model_files import ModelFiles
from moe_serve.cli.serve.ready import curl_line, loading_bar, print_ready, server_url
from moe_serve.cli.serve.service_start import ServiceStart
from moe_serve.cluster.started_ranks import build_any_engine
from moe_serve.config.logs import is_json_log, set_up_logs
from moe_serve.config.sections import Config, EngineConfig
from moe_serve.config.sources import DEFAULT_SOURCE, ConfigEntry
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.engine_facts import EngineFacts
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.tracing import make_tracing
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.http.app import create_app
from moe_serve.http.dashboard.facts import dashboard_facts
from moe_serve.http.operations import Operations
from moe_serve.http.pages.page_files import PAGE_FILES
from moe_serve.http.server import run_server
from moe_serve.http.tracing.spans import make_span_export
from moe_serve.model.load.weight_reader import LoadProgress

BuildEngine = Callable[[EngineConfig, LoadProgress | None], BuiltEngine]


def run_service(
    config: Config,
    build: BuildEngine = build_any_engine,
    *,
    settings: Sequence[ConfigEntry] = (),
    has_local_ranks: bool = True,
) -> None:
    """Serves until SIGTERM or Ctrl-C.

    The port is open from the beginning. Faults of the model, or a model that does not fit this
    machine, are raised. `settings` are shown; `has_local_ranks` is False if ranks run on other
    machines too.
    """
    set_up_logs(config.log)
    with ServiceStart(config) as start:
        _serve(config, build, start, settings, has_local_ranks)


def _serve(
    config: Config,
    build: BuildEngine,
    start: ServiceStart,
    settings: Sequence[ConfigEntry],
    has_local_ranks: bool,
) -> None:
    files = ModelFiles.load(config)
    spans = make_span_export(config.server.otlp_traces_endpoint, files.name)
    start.plan_memory(has_local_ranks=has_local_ranks)
    with loading_bar(Console(stderr=True, quiet=is_json_log())) as progress:
        built = build(config.engine, start.progress(progress))
    start.startup.begin("preparing")
    server = config.server
    with contextlib.ExitStack() as opened:  # closed in the opposite order
        if spans is not None:
            opened.callback(spans.close)
        engine = AsyncEngine(built, config.engine.scheduler)
        opened.callback(engine.close)
        tracing = make_tracing(built, config.engine, config.trace, files.name)
        opened.callback(tracing.close)
        hangs = HangWatch(
            engine, built.activity, server.hang_report_s, server.hang_report_directory
        )
        opened.callback(hangs.close)
        model = files.served(engine, built, config, describe_layout(engine.layout))
        app = create_app(
            engine,
            model,
            server,
            tracing=tracing,
            placement=built.placement,
            facts=dashboard_facts(built, config.engine),
            spans=spans,
            grammars=built.grammars,
            operations=Operations(log=config.log, startup=start.startup, hangs=hangs),
        )
        opened.callback(app.state.gate.close)

        rows = {"model": _model_row(files, engine.layout), **model.description}
        rows |= banner_rows(config, settings, engine.layout, built.placement, app)

        def say_ready(host: str, port: int) -> None:
            url = server_url(host, port, is_tls=server.ssl_certfile is not None)
            curl = curl_line(url, model.name, needs_key=server.has_api_keys)
            with optional_output(f"ready at {url}"):
                print_ready(Console(highlight=False), url, rows, curl)

        run_server(app, engine, server, on_ready=say_ready, listener=start.hand_over())


def describe_layout(layout: EngineFacts) -> Mapping[str, str]:
    """Returns one line for each stage with its processes, and one for the size of the KV cache."""
    plural = "" if layout.num_threads == 1 else "s"
    threads = f"; {layout.num_threads} thread{plural}" if layout.device == "cpu" else ""
    num_tokens = layout.num_pages * layout.page_size
    weights = f"{layout.weight_format}, {layout.expert_weights}"
    return {
        **({} if layout.weight_format == "plain" else {"weights": weights}),
        "kernels": layout.kernels,
        **({} if layout.cuda_graphs is None else {"graphs": layout.cuda_graphs}),
        "layout": f"{layout.stages}{threads}",
        **({} if layout.expert_memory is None else {"experts": layout.expert_memory}),
        "cache": f"{layout.num_pages} KV pages of {layout.page_size} tokens = {num_tokens} tokens "
        f"({layout.kv_bytes / 2**20:.1f} MiB)",
    }


def _model_row(files: ModelFiles, layout: EngineFacts) -> str:
    where = f" from {files.folder}" if files.is_named_otherwise else ""
    return (
        f"{files.name}{where}: {layout.family}, {layout.dtype}, "
        f"context {layout.max_model_len} tokens, loaded in {layout.load_seconds:.1f} s"
    )


def banner_rows(
    config: Config,
    settings: Sequence[ConfigEntry],
    layout: EngineFacts,
    placement: PlacementControl | None,
    app: FastAPI,
) -> dict[str, str]:
    """Returns one line per row. Of secrets only their number is shown."""
    rows = {"limits": _limits(config, layout)}
    if placement is not None:
        rows["placed"] = _placed(placement)
    rows["pages"] = ", ".join(path for path in PAGE_FILES if "/assets/" not in path)
    rows["routes"] = _routes(app)
    changed = [entry for entry in settings if entry.source != DEFAULT_SOURCE]
    if changed:
        rows["set"] = ", ".join(f"{entry.key.path}={entry.shown}" for entry in changed)
    return rows


def _limits(config: Config, layout: EngineFacts) -> str:
    scheduler, num_ranks = config.engine.scheduler, max(1, layout.attention_ranks)
    most = scheduler.max_num_seqs * num_ranks
    full = layout.num_pages * layout.page_size / layout.max_model_len
    return (
        f"{most} sequences at once, {full:.1f} if each has {layout.max_model_len} tokens; "
        f"{scheduler.max_batched_tokens} tokens in a step, {scheduler.max_queued_requests} may wait"
    )


def _placed(placement: PlacementControl) -> str:
    plan = placement.plan()
    counts = [sum(map(len, plan.held_by(rank).values())) for rank in range(plan.num_ranks)]
    num_layers = len(plan.ranks_of)
    return (
        f"{sum(counts)} experts of {num_layers} layers, copies included, on {plan.num_ranks} "
        f"expert ranks: {min(counts)} to {max(counts)} each"
    )


def _routes(app: FastAPI) -> str:
    """Returns the routes of the OpenAPI schema, which is built now instead of at the first request
    for it."""
    return ", ".join(path for path in app.openapi()["paths"] if "{" not in path)
