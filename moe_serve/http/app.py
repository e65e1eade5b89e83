"""The FastAPI application: routes, middleware, error handlers, OpenAPI schema.

FastAPI's schema is corrected where it does not know how our routes work: they read their bodies
themselves and answer errors with one envelope, never with FastAPI's 422. Some stream, and /metrics
is text. Schemas with their own definitions ("$defs") get them moved to the document's components,
where references can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI

from moe_serve import __version__
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.config.sections import DEFAULT_SCHEDULER, LogConfig, SchedulerConfig, ServerConfig
from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.routes.cell_placements import AnyPlacement
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import vocabulary_of
from moe_serve.engine.tracing import Tracing
from moe_serve.engine.watch.cells_control import CellsControl
from moe_serve.engine.watch.hang_watch import HangWatch
from moe_serve.engine.watch.startup import Startup
from moe_serve.http.admin.adapter_routes import adapter_router
from moe_serve.http.admin.cell_routes import cells_router
from moe_serve.http.admin.control import placement_router, trace_router
from moe_serve.http.admin.status import (
    LoadReportMiddleware,
    hang_router,
    health_router,
    info_router,
    model_router,
    startup_router,
)
from moe_serve.http.anthropic.message_routes import messages_router
from moe_serve.http.dashboard.board import Board, dashboard_router
from moe_serve.http.dashboard.facts import NO_FACTS, DashboardFacts
from moe_serve.http.edge import AccessLog, EdgeMiddleware
from moe_serve.http.gate.auth import (
    OPEN_PATHS,
    ApiKeyMiddleware,
    KeyRing,
    api_keys,
    is_admin_path,
)
from moe_serve.http.gate.key_limits import KeyLimitMiddleware
from moe_serve.http.gate.origins import ConfiguredCors, HostMiddleware
from moe_serve.http.generation.assistant_formats import assistant_formats
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.generation.service_tiers import ServiceTiers
from moe_serve.http.metrics.metrics import ServerMetrics
from moe_serve.http.metrics.page import MetricsPage
from moe_serve.http.metrics.scrape import AdapterSource, ScrapeSources
from moe_serve.http.openai.chat_routes import chat_router
from moe_serve.http.openai.completion_routes import completion_router
from moe_serve.http.openai.responses.response_routes import responses_router
from moe_serve.http.openai.tokens import render_router, token_router
from moe_serve.http.pages.page_files import add_page_routes
from moe_serve.http.schema.api_error import HANDLED_ERRORS, error_handler
from moe_serve.http.spans import SpanExport, SpanMiddleware
from moe_serve.http.wire.late_routes import LateRouter

_STREAMING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"}
)
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_ERRORS = {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
_RANGES = {
    "4XX": "The request is invalid or not allowed.",
    "5XX": "The server failed, or cannot serve requests now.",
}


def honest_openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Returns a function for `app.openapi` that makes FastAPI's document once and corrects it."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()  # FastAPI caches it, so this is done once
        components = document.setdefault("components", {})
        if "Error" not in components.get("schemas", {}):
            _put_right(document, components)
        return document

    return openapi


def _put_right(document: dict[str, Any], components: dict[str, Any]) -> None:
    schemas: dict[str, Any] = {**_ERRORS}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, operation["responses"])
            if path not in OPEN_PATHS:
                kind = "adminKey" if is_admin_path(path) else "apiKey"
                operation["security"] = [{kind: []}, *([] if kind == "adminKey" else [{}])]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body:
                body["schema"] = _moved(body["schema"], operation["operationId"], schemas)
    components["schemas"] = schemas
    bearer = {"type": "http", "scheme": "bearer"}
    components["securitySchemes"] = {"apiKey": bearer, "adminKey": bearer}


def _responses(path: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the successful answers with their media types, and the error envelope for all
    others."""
    found = {status: dict(answer) for status, answer in known.items() if status.startswith("2")}
    for answer in found.values():
        if path in _STREAMING:
            stream = {"text/event-stream": {"schema": {"type": "string"}}}
            answer["content"] = {**answer.get("content", {}), **stream}
        elif path == "/metrics":
            answer["content"] = {"text/plain": {"schema": {"type": "string"}}}
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    envelope = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    for status, text in _RANGES.items():
        found[status] = {"description": text, "content": envelope}
    return found


def _moved(schema: dict[str, Any], owner: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Moves the definitions of the schema to `schemas`, under unique names."""
    names = {name: f"{owner}.{name}" for name in schema.get("$defs", {})}
    for name, definition in schema.get("$defs", {}).items():
        schemas[names[name]] = _renamed(definition, names)
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    moved: dict[str, Any] = _renamed(rest, names)
    return moved


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {key: _renamed(item, names) for key, item in value.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        name = reference.removeprefix("#/$defs/")
        renamed["$ref"] = f"#/components/schemas/{names[name]}"
    return renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The log configuration, the start's progress and the hang watch.

    `hangs` None: there is no hang watch, and /admin/hang does not exist.
    """

    log: LogConfig = field(default_factory=LogConfig)
    startup: Startup = field(default_factory=Startup)
    hangs: HangWatch | None = None


def create_app(
    engine: EngineClient,
    model: ServedModel,
    config: ServerConfig,
    tracing: Tracing | None = None,
    placement: AnyPlacement | None = None,
    facts: DashboardFacts = NO_FACTS,
    spans: SpanExport | None = None,
    grammars: Grammars | None = None,
    operations: Operations | None = None,
    scheduler: SchedulerConfig = DEFAULT_SCHEDULER,
    cells: CellsControl | None = None,
) -> FastAPI:
    """Creates the application for one engine and one model. The server reads `app.state`.

    `scheduler` is that of the engine: the application needs its service tiers.
    """
    operations = operations or Operations()
    assistant = assistant_formats(model, config)
    metrics = ServerMetrics(model.name, assistant.tool_parser)
    generations = GenerationService(
        engine,
        model.tokenizer,
        metrics,
        has_timing=config.request_metrics,
        speculates=facts.speculation.is_on,
    )
    sources = replace(
        _sources(generations, facts, operations, model.adapters),
        tracing=tracing,
        placement=placement,
        has_each_expert=config.expert_metrics,
    )
    server = ServerContext(
        model=model,
        config=config,
        metrics=metrics,
        metrics_page=MetricsPage(metrics, sources, config.metrics_alias),
        generations=generations,
        gate=GrammarGate(grammars or _own_grammars(engine, model)),
        assistant=assistant,
        tiers=ServiceTiers(scheduler, config),
        speculates=facts.speculation.is_on,
        separates_keys=facts.cache.separates_keys and config.has_api_keys,
    )
    board = Board(server, placement, facts)
    app = _empty_app(board)
    app.state.generations, app.state.gate, app.state.metrics = generations, server.gate, metrics
    _add_routes(app, server)
    _add(app, cells_router(cells, engine, config.max_body_bytes))
    _add(app, dashboard_router(board))
    _add_control(app, config.max_body_bytes, tracing, placement)
    _add_operations(app, operations)
    app.openapi = honest_openapi(app)  # type: ignore[method-assign]
    for kind in HANDLED_ERRORS:
        app.add_exception_handler(kind, error_handler(config.overload_status))
    access = AccessLog(operations.log.access_exclude)
    keys = api_keys(config, scheduler)
    _add_middleware(app, config, engine, metrics, access, spans, keys)
    return app


def _add_control(
    app: FastAPI, max_bytes: int, tracing: Tracing | None, placement: AnyPlacement | None
) -> None:
    if tracing is not None:
        _add(app, trace_router(tracing, max_bytes))
    _add(app, placement_router(placement, max_bytes))


def _add(app: FastAPI, router: LateRouter) -> None:
    """Adds the routes as they are: FastAPI's `include_router` would build each once more, and look
    for the route of a request in one router after the other."""
    app.router.routes += router.routes


def _empty_app(board: Board) -> FastAPI:
    return FastAPI(
        title="moe-serve",
        lifespan=board.lifespan,
        version=__version__,
        docs_url=None,  # the pages of /docs load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )


def _sources(
    generations: GenerationService,
    facts: DashboardFacts,
    operations: Operations,
    adapters: AdapterRegistry | None,
) -> ScrapeSources:
    def names(has_begun: bool) -> list[str]:
        return sorted(generations.adapters(has_begun=has_begun))

    return ScrapeSources(
        engine=generations.engine,
        startup=operations.startup,
        is_draining=lambda: generations.is_draining,
        cache=facts.cache,
        experts=facts.experts,
        adapters=None if adapters is None else AdapterSource(adapters, names),
        drafters=facts.speculation.drafters,
        kv_events=facts.kv_events,
    )


def _add_routes(app: FastAPI, server: ServerContext) -> None:
    for make_router in (
        chat_router,
        completion_router,
        responses_router,
        messages_router,
        model_router,
        token_router,
        render_router,
        info_router,
        health_router,
        adapter_router,
    ):
        _add(app, make_router(server))
    add_page_routes(app)


def _add_operations(app: FastAPI, operations: Operations) -> None:
    _add(app, startup_router(operations.startup))
    if operations.hangs is not None:
        _add(app, hang_router(operations.hangs))


def _add_middleware(
    app: FastAPI,
    config: ServerConfig,
    engine: EngineClient,
    metrics: ServerMetrics,
    access: AccessLog,
    spans: SpanExport | None,
    keys: KeyRing,
) -> None:
    """Adds the middleware. The last one added is the outermost."""
    app.add_middleware(LoadReportMiddleware, stats=engine.stats)
    admin_keys = KeyRing(config.admin_keys)
    app.add_middleware(KeyLimitMiddleware, config=config, count=metrics.count_rejection)
    app.add_middleware(ApiKeyMiddleware, keys=keys, admin_keys=admin_keys)
    app.add_middleware(HostMiddleware, allowed=config.allowed_hosts, has_keys=config.has_api_keys)
    if config.cors_origins:
        app.add_middleware(ConfiguredCors, origins=config.cors_origins)
    app.add_middleware(EdgeMiddleware, metrics=metrics, access=access)
    if spans is not None:
        app.add_middleware(SpanMiddleware, spans=spans)


def _own_grammars(engine: EngineClient, model: ServedModel) -> Grammars:
    """Returns the grammars if the engine does not share its own."""
    tokenizer, eos = model.tokenizer, frozenset(model.tokenizer.eos_token_ids)
    return Grammars(lambda: vocabulary_of(tokenizer, engine.vocab_size, eos))
