"""Runs the server's application over an engine in this process, without a socket, for
`run-batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastapi import FastAPI
from rich.console import Console

from moe_serve.cli.serve.model_files import ModelFiles
from moe_serve.cli.serve.ready import loading_bar
from moe_serve.cli.serve.service import BuildEngine
from moe_serve.cluster.started_ranks import build_any_engine
from moe_serve.config.logs import set_up_logs
from moe_serve.config.sections import Config, ServerConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.request.request import MIN_PRIORITY
from moe_serve.http.app import create_app


@contextlib.contextmanager
def offline_app(config: Config, build: BuildEngine = build_any_engine) -> Iterator[FastAPI]:
    """Loads the model, and releases it at the end. Other processes cannot reach it, so it needs no
    key."""
    set_up_logs(config.log)
    files = ModelFiles.load(config)
    with loading_bar(Console(stderr=True)) as progress:
        built = build(config.engine, progress)
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
        )
        model = files.served(engine, built, config)
        app = create_app(engine, model, server, grammars=built.grammars)
        try:
            yield app
        finally:
            app.state.gate.close()
    finally:
        engine.close()
