"""The real server on a real socket over the real engine, in this process, for all tests here."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
from fastapi import FastAPI

from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, ServerConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import build_engine
from moe_serve.http.app import create_app
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.server import DrainingServer, bind
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.chat_template import ChatTemplate
from moe_serve.text.tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, TEXT)
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
REFERENCE = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 5, "logprobs": 2}
# What no answer may say: where we are, and how we failed.
INTERNALS = (
    "Traceback",
    "moe_serve",
    ".py",
    "site-packages",
    "/home",
    "/tmp",
    "torch.",
    "object at",
)
_IDLE_LIMIT_S = 60.0


def whole_body(route: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {"messages": MESSAGES} if route == CHAT else {"prompt": "hi"}
    return {"max_tokens": 4, **base, **fields}


def refused(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """Returns the envelope of an answer that is an error with one of these statuses, after checking
    that it reveals no internals."""
    assert response.status_code in statuses, f"{response.status_code}: {response.text[:300]}"
    body = response.json()
    error: dict[str, Any] = body["error"]
    assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    told = [word for word in INTERNALS if word in error["message"]]
    assert not told, f"the answer tells of the server's inside: {error['message']}"
    return error


class RealServer:
    """The demonstration model's server with 600 pages and no keys; `client` talks to it."""

    def __init__(self) -> None:
        built = build_engine(
            EngineConfig(model=ModelConfig(num_threads=1), cache=CacheConfig(num_pages=600))
        )
        self.engine = AsyncEngine(built, EngineConfig().scheduler)
        folder = demo_model_folder()
        tokenizer = Tokenizer.load(folder)
        self.model = ServedModel(
            name="demo",
            tokenizer=tokenizer,
            chat_template=ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens),
            created=0,
            max_model_len=self.engine.max_model_len,
        )
        self.app: FastAPI = create_app(self.engine, self.model, ServerConfig())
        self.vocab_size = self.engine.vocab_size
        self.port = 0
        self._ready = threading.Event()
        self._listener = bind("127.0.0.1", 0)
        self._server = DrainingServer(self.app, self.engine, ServerConfig(), self._on_ready)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        if not self._ready.wait(90):  # no assertion: this also runs under `python -O`
            raise RuntimeError("the server does not listen")
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self._reference = self._ask_reference()

    def post(self, route: str, **fields: Any) -> httpx.Response:
        return self.client.post(route, json=whole_body(route, fields))

    def post_raw(self, route: str, content: bytes) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return self.client.post(route, content=content, headers=headers)

    def text_of(self, **fields: Any) -> str:
        """Returns the whole answer of a text completion as JSON, without the parts that differ each
        time."""
        response = self.post(TEXT, **fields)
        assert response.status_code == 200, response.text
        return json.dumps(response.json()["choices"], sort_keys=True)

    def check_unharmed(self) -> None:
        """Checks that the server is alive and idle, has every page free, and gives the same answer
        to the same question."""
        deadline = time.monotonic() + _IDLE_LIMIT_S
        while True:
            stats = self.engine.stats()
            assert stats.is_alive, f"the engine is dead: {stats.death}"
            is_idle = not stats.load.num_running and not stats.load.num_waiting
            if is_idle and stats.load.num_free_pages == stats.load.num_pages:
                break
            assert time.monotonic() < deadline, f"something is left: {stats}"
            time.sleep(0.005)
        assert self.client.get("/health/live").status_code == 200
        assert self._ask_reference() == self._reference, "another answer to the same question"

    def close(self) -> None:
        assert self._server._loop is not None
        with contextlib.suppress(RuntimeError):
            self._server._loop.call_soon_threadsafe(self._server.begin_shutdown)
        self._thread.join(60)
        self.client.close()
        self._listener.close()
        self.engine.close()
        assert not self._thread.is_alive(), "the server did not end"

    def _ask_reference(self) -> str:
        return self.text_of(**REFERENCE)

    def _on_ready(self, _: str, port: int) -> None:
        self.port = port
        self._ready.set()


@contextlib.contextmanager
def running() -> Iterator[RealServer]:
    server = RealServer()
    try:
        yield server
    finally:
        server.close()
