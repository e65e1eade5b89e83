"""The life of a server process: load, listen, say so, serve until told to stop.

Imports everything heavy, so `serve` imports this module only when it has something to serve.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from moe_serve.cli.ready import curl_line, loading_bar, print_ready, server_url
from moe_serve.cluster.any_engine import build_any_engine
from moe_serve.config import Config, EngineConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import BuiltEngine, model_folder
from moe_serve.engine.layout import Layout
from moe_serve.engine.tracing import make_tracing
from moe_serve.http.app import create_app
from moe_serve.http.served_model import ServedModel
from moe_serve.http.server import run_server
from moe_serve.model.model_tensors import LoadProgress
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

BuildEngine = Callable[[EngineConfig, LoadProgress | None], BuiltEngine]

DEMO_MODEL_NAME = "moe-serve-demo"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_service(config: Config, build: BuildEngine = build_any_engine) -> None:
    """Serve until SIGTERM or Ctrl-C. What is wrong with the model is raised before listening."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    folder = model_folder(config.engine.model)
    tokenizer = Tokenizer.load(folder)
    chat_template = ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens)
    with loading_bar(Console(stderr=True)) as progress:
        built = build(config.engine, progress)
    engine = AsyncEngine(built, config.engine.scheduler)
    name = config.server.served_model_name or model_name(config, folder)
    tracing = make_tracing(built, config.engine, config.trace, name)
    try:
        model = ServedModel(
            name=name,
            tokenizer=tokenizer,
            chat_template=chat_template,
            created=int(time.time()),
            max_model_len=engine.max_model_len,
            description=describe_layout(engine.layout),
        )
        app = create_app(engine, model, config.server, tracing)

        def say_ready(host: str, port: int) -> None:
            url = server_url(host, port)
            curl = curl_line(url, model.name, needs_key=bool(config.server.api_keys))
            rows = {"model": _model_row(model.name, folder, engine.layout), **model.description}
            print_ready(Console(highlight=False), url, rows, curl)

        run_server(app, engine, config.server, on_ready=say_ready)
    finally:
        tracing.close()
        engine.close()


def model_name(config: Config, folder: Path) -> str:
    """The name that requests ask for when none was configured."""
    return DEMO_MODEL_NAME if config.engine.model.path is None else folder.name


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


def _model_row(name: str, folder: Path, layout: Layout) -> str:
    where = "" if name in (folder.name, DEMO_MODEL_NAME) else f" from {folder}"
    return (
        f"{name}{where}: {layout.family}, {layout.dtype}, context {layout.max_model_len} tokens, "
        f"loaded in {layout.load_seconds:.1f} s"
    )
