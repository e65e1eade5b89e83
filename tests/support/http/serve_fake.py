"""A process for test_live_server.py: the real server over the scripted engine.

    python -m tests.support.http.serve_fake STEP_SECONDS DRAIN_SECONDS

It prints its port when it is ready
"""

from __future__ import annotations

import importlib
import sys

from moe_serve.config.sections import ServerConfig
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.server import run_server


def main() -> None:
    fakes = importlib.import_module("tests.http.conftest")
    tokenizer = fakes.byte_tokenizer()
    engine = fakes.FakeEngine(tokenizer, lambda request: "0123456789" * 4)
    engine.step_s = float(sys.argv[1])
    model = ServedModel(
        name="tiny", tokenizer=tokenizer, chat_template=None, created=0, max_model_len=512
    )
    config = ServerConfig(port=0, drain_timeout_s=float(sys.argv[2]))
    app = create_app(engine, model, config)
    run_server(app, engine, config, on_ready)


def on_ready(_: str, port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
