"""The life of a server process: load, listen, say so, serve until told to stop.

Imports everything heavy, so `serve` imports this module only when it has something to serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from moe_serve.cli.serve.banner import banner_rows
from moe_serve.cli.serve.model_files import ModelFiles
from moe_serve.cli.serve.ready import curl_line, loading_bar, print_ready, server_url
from moe_serve.cli.serve.service_start import ServiceStart
from moe_serve.cli.standard_output import optional_output
from moe_serve.cluster.any_engine import build_any_engine
from moe_serve.config.logs import is_json_log, set_up_logs
from moe_serve.config.sections import Config, EngineConfig
from moe_serve.config.sources import ConfigEntry
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.layout import Layout
from moe_serve.engine.tracing import make_tracing
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.http.app import create_app
from moe_serve.http.dashboard.facts import dashboard_facts
from moe_serve.http.operations import Operations
from moe_serve.http.server import run_server
from moe_serve.http.tracing.spans import make_span_export
from moe_serve.model.load.model_tensors import LoadProgress

BuildEngine = Callable[[EngineConfig, LoadProgress | None], BuiltEngine]


def run_service(
    config: Config,
    build: BuildEngine = build_any_engine,
    *,
    settings: Sequence[ConfigEntry] = (),
    has_local_ranks: bool = True,
) -> None:
    """Serve until SIGTERM or Ctrl-C. The port is open from the beginning; what is wrong with the
    model, or does not fit this machine, is raised.

    `settings` are shown; `has_local_ranks` False: ranks run on other machines too.
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
        hangs = HangWatch(engine, built.witness, server.hang_report_s, server.hang_report_directory)
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


def describe_layout(layout: Layout) -> Mapping[str, str]:
    """Which stage runs where, and how large the KV cache is: one line each."""
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


def _model_row(files: ModelFiles, layout: Layout) -> str:
    where = f" from {files.folder}" if files.is_named_otherwise else ""
    return (
        f"{files.name}{where}: {layout.family}, {layout.dtype}, "
        f"context {layout.max_model_len} tokens, loaded in {layout.load_seconds:.1f} s"
    )
