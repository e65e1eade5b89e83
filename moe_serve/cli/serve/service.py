"""Serves in one process: loads, listens, prints the ready message and serves until told to stop.

`offline_app` runs the same application without a socket, for `run-batch`.

This module imports everything heavy, so `serve` imports it only when it has something to serve.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType

from fastapi import FastAPI
from rich.console import Console

from moe_serve.cli.console import optional_output
from moe_serve.cli.serve.model_files import ModelFiles
from moe_serve.cli.serve.ready import curl_line, loading_bar, print_ready, server_url
from moe_serve.cluster.started_cells import build_any_engine
from moe_serve.config.logs import STARTUP_LOG, is_json_log, set_up_logs
from moe_serve.config.sections import Config, EngineConfig, ServerConfig
from moe_serve.config.sources import DEFAULT_SOURCE, ConfigEntry
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.engine_facts import EngineFacts
from moe_serve.engine.request.request import MIN_PRIORITY
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.served_config import served_engine_config
from moe_serve.engine.tracing import make_tracing
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.app import Operations, create_app
from moe_serve.http.dashboard.facts import DashboardFacts, dashboard_facts
from moe_serve.http.loading import LoadingServer
from moe_serve.http.pages.page_files import PAGE_FILES
from moe_serve.http.server import bind, run_server
from moe_serve.http.spans import make_span_export
from moe_serve.model.hub.hub_name import hub_name_of
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.planning.plan_memory import plan_memory
from moe_serve.planning.planned_cells import PlannedCells

_log = logging.getLogger(STARTUP_LOG)
_SIGTERM_STATUS = 128 + signal.SIGTERM


class ServiceStart:
    """Use it with `with`, load the model, and take the listener by `hand_over`; without that the
    port is closed.

    Raises ConfigError if the address, a file of keys or a certificate cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loading, self._stack = contextlib.ExitStack(), contextlib.ExitStack()
        self.startup = Startup()

    def __enter__(self) -> ServiceStart:
        server = self._config.server
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(bind(server.host, server.port))
            scheduler = self._config.engine.scheduler
            loading = LoadingServer(self._listener, server, self.startup, scheduler)
            stack.enter_context(_ending_at_sigterm())
            self._loading.enter_context(loading)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._loading.close()
        self._stack.close()

    def fetch_model(self, *, has_local_ranks: bool) -> Config:
        """Returns the configuration with the folder of its model, which is downloaded if a name on
        a hub is given, and into which an adapter may be merged. Raises HubError, also for a model
        that does not fit into memory, and CheckpointError."""

        def check(engine: EngineConfig) -> None:
            plan_memory(engine, has_local_ranks=has_local_ranks).check()

        engine = self._config.engine
        if hub_name_of(engine.model.path) is not None:
            self.startup.begin("downloading")
        engine = served_engine_config(
            engine, check=check, is_quiet=is_json_log(), note=self.startup.note_progress
        )
        self._config = replace(self._config, engine=engine)
        return self._config

    def plan_memory(self, *, has_local_ranks: bool) -> None:
        """Reports the planned memory before anything is read; raises ConfigError if it does not
        fit."""
        plan = self.startup.plan = plan_memory(self._config.engine, has_local_ranks=has_local_ranks)
        for line in plan.lines():
            _log.info("memory: %s", line)
        plan.check()
        self.startup.begin("loading")

    def progress(self, show: LoadProgress | None) -> LoadProgress:
        """Returns the callback for the loader; clients that ask over HTTP see its progress too."""

        def note(done: int, total: int) -> None:
            self.startup.note_progress(done, total)
            if show is not None:
                show(done, total)

        return note

    def hand_over(self) -> socket.socket:
        """Ends the loading page: clients that connect from now on wait for the server itself. Until
        the server handles signals, SIGTERM still ends the start.
        """
        self.startup.begin("ready")
        self._loading.close()
        return self._listener


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Ends the process at SIGTERM while the server does not handle the signal: before it serves and
    after it has served.

    Open resources are closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_SIGTERM_STATUS)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
        fetched = start.fetch_model(has_local_ranks=has_local_ranks)
        _serve(fetched, build, start, settings, has_local_ranks)


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
        cells = built.cells
        if cells is not None and has_local_ranks:
            cells = PlannedCells(cells, config.engine)
        if cells is not None and built.scale_with is not None:
            built.scale_with(engine.stats, cells)
        app = create_app(
            engine,
            model,
            server,
            tracing=tracing,
            placement=built.placement or built.cell_placements,
            facts=dashboard_facts(built, config.engine),
            spans=spans,
            grammars=built.grammars,
            operations=Operations(log=config.log, startup=start.startup, hangs=hangs),
            scheduler=config.engine.scheduler,
            cells=cells,
        )
        opened.callback(app.state.gate.close)

        rows = {"model": _model_row(files, engine.layout), **_source_row(files)}
        rows |= model.description
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
    form = "" if layout.kv_dtype == "auto" else f" in {layout.kv_dtype}"
    weights = f"{layout.weight_format}, {layout.expert_weights}"
    return {
        **({} if layout.weight_format == "plain" else {"weights": weights}),
        "kernels": layout.kernels,
        **({} if layout.cuda_graphs is None else {"graphs": layout.cuda_graphs}),
        "layout": f"{layout.stages}{threads}",
        **({} if layout.expert_memory is None else {"experts": layout.expert_memory}),
        "cache": f"{layout.num_pages} KV pages of {layout.page_size} tokens = {num_tokens} tokens"
        f"{form} ({layout.kv_bytes / 2**20:.1f} MiB)",
    }


def _model_row(files: ModelFiles, layout: EngineFacts) -> str:
    where = f" from {files.folder}" if files.is_named_otherwise else ""
    return (
        f"{files.name}{where}: {layout.family}, {layout.dtype}, "
        f"context {layout.max_model_len} tokens, loaded in {layout.load_seconds:.1f} s"
    )


def _source_row(files: ModelFiles) -> dict[str, str]:
    """Returns the line with the commit of a model from a hub; none for other folders."""
    return {} if files.hub_name is None else {"source": f"{files.hub_name} in {files.folder}"}


def banner_rows(
    config: Config,
    settings: Sequence[ConfigEntry],
    layout: EngineFacts,
    placement: PlacementControl | None,
    app: FastAPI,
) -> dict[str, str]:
    """Returns the rows of the ready message. Secrets are counted, never shown."""
    rows = {"limits": _limits(config, layout)}
    if config.engine.cache.disk_path is not None:
        rows["tier"] = _tier(config)
    if config.engine.speculation.is_on:
        rows["spec"] = config.engine.speculation.summary
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


def _tier(config: Config) -> str:
    cache, server = config.engine.cache, config.server
    salts = "; each API key has its own pages" if server.has_api_keys else ""
    encrypted = "" if cache.disk_key_file is None else "encrypted, "
    return (
        f"disk: {encrypted}at most {cache.disk_bytes / 2**30:.1f} GiB in {cache.disk_path}, for "
        f"{cache.disk_ttl_s / 3600:.1f} h{salts if cache.separates_keys else ''}"
    )


def _placed(placement: PlacementControl) -> str:
    plan = placement.plan()
    counts = [sum(map(len, plan.held_by(rank).values())) for rank in range(plan.num_ranks)]
    where = "1 expert rank" if plan.num_ranks == 1 else f"{plan.num_ranks} expert ranks"
    return (
        f"{sum(counts)} experts of {len(plan.ranks_of)} layers, copies included, on {where}: "
        f"{min(counts)} to {max(counts)} each"
    )


def _routes(app: FastAPI) -> str:
    """Returns the routes of the OpenAPI schema, which is built now instead of at the first request
    for it."""
    return ", ".join(path for path in app.openapi()["paths"] if "{" not in path)


@contextlib.contextmanager
def offline_app(config: Config) -> Iterator[FastAPI]:
    """Loads the model, and releases it at the end. Other processes cannot reach it, so it needs no
    key."""
    set_up_logs(config.log)
    config = replace(config, engine=served_engine_config(config.engine))
    files = ModelFiles.load(config)
    with loading_bar(Console(stderr=True)) as progress:
        built = build_any_engine(config.engine, progress)
    engine = AsyncEngine(built, config.engine.scheduler)
    try:
        server = ServerConfig(  # only settings that shape answers
            is_strict=config.server.is_strict,
            max_body_bytes=config.server.max_body_bytes,
            tool_parser=config.server.tool_parser,
            reasoning_parser=config.server.reasoning_parser,
            grammar_in_reasoning=config.server.grammar_in_reasoning,
            key_min_priority=MIN_PRIORITY,  # the whole file belongs to one user
            force_include_usage=config.server.force_include_usage,
            request_metrics=config.server.request_metrics,
            key_may_tighten=True,
        )
        model = files.served(engine, built, config)
        facts = DashboardFacts(speculation=config.engine.speculation)
        scheduler = config.engine.scheduler
        app = create_app(
            engine, model, server, facts=facts, grammars=built.grammars, scheduler=scheduler
        )
        try:
            yield app
        finally:
            app.state.gate.close()
    finally:
        engine.close()
