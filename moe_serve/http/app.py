"""The FastAPI application: routes, middleware, error handlers."""

from __future__ import annotations

from fastapi import FastAPI

from moe_serve import __version__
from moe_serve.config import ServerConfig
from moe_serve.engine.client import EngineClient
from moe_serve.engine.tracing import Tracing
from moe_serve.http.auth import ApiKeyMiddleware
from moe_serve.http.chat_routes import chat_router
from moe_serve.http.completion_routes import completion_router
from moe_serve.http.context import ServerContext
from moe_serve.http.edge import EdgeMiddleware
from moe_serve.http.errors import HANDLED_ERRORS, handle_error
from moe_serve.http.generation import GenerationService
from moe_serve.http.health_routes import health_router
from moe_serve.http.metrics import ServerMetrics
from moe_serve.http.model_routes import model_router
from moe_serve.http.served_model import ServedModel
from moe_serve.http.trace_routes import trace_router


def create_app(
    engine: EngineClient,
    model: ServedModel,
    config: ServerConfig,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application for one engine and one model. `app.state.generations` is for the server."""
    metrics = ServerMetrics(engine, model.name, tracing)
    generations = GenerationService(engine, model.tokenizer, metrics)
    server = ServerContext(model=model, config=config, metrics=metrics, generations=generations)
    app = FastAPI(
        title="moe-serve",
        version=__version__,
        docs_url=None,  # the pages of /docs come from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.generations = generations
    for make_router in (chat_router, completion_router, model_router, health_router):
        app.include_router(make_router(server))
    if tracing is not None:
        app.include_router(trace_router(tracing, config.max_body_bytes))
    for kind in HANDLED_ERRORS:
        app.add_exception_handler(kind, handle_error)
    # The last one added is the outermost.
    app.add_middleware(ApiKeyMiddleware, api_keys=config.api_keys, admin_keys=config.admin_keys)
    app.add_middleware(EdgeMiddleware, metrics=metrics)
    return app
